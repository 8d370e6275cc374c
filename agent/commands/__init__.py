"""What `elastic-agent` does besides running a job: each sub-command in a module of its name, with a `main`."""
