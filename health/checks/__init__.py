"""Pre-flight checks: is this machine fit to train? Probes return facts, pure rules judge them, findings say it."""
