"""Sub-commands about the folder of a run: what agents have left there, of a run that goes on or has ended."""
