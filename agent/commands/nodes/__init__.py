"""The commands about one node of a job: each module has a `main`."""
