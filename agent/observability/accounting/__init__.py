"""What the agent publishes of itself: states, seconds, steps and changes as metrics, status pages and log lines."""
