"""The daemon of a node: it offers the node to a pool, and runs the jobs that the pool gives it."""
