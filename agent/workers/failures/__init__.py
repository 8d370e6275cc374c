"""Why a worker failed: evidence that it left behind, the table of causes, and the action that follows."""
