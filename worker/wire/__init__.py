"""What a worker, its node's agent and the agent's disk writer say to each other. Imports no torch."""
