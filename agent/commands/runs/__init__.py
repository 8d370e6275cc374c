"""The commands about runs: `events`, `report` and `diagnose`."""
