"""What a worker, its node's agent and the agent's disk writer exchange. Imports no torch."""
