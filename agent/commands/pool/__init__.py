"""The commands about a pool and its jobs."""
