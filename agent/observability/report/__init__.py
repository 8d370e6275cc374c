"""The report of a run from its journals: how it spent its time, and which nodes and causes cost most of it."""
