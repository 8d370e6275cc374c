"""Why a worker ended: what it left behind, in words and as data, and what is to be done about it."""
