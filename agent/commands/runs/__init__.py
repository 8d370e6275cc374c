"""Sub-commands that read the folder of a run, while it goes on or after its end."""
