"""What the agent tells of itself: states, seconds, steps and changes as metrics, status pages and log lines."""
