"""Stands for torch in the agents of jobs whose workers have no use for it: see `harness.WITHOUT_TORCH`."""
