"""The store that the nodes of a job meet in, as the agent opens, hosts and asks it."""
