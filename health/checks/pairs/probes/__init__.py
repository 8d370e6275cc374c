"""What one node finds out about another one: `client` asks what `server` answers there, and `all_reduce` does with it
what workers do. Each runs in a process of its own, which `process` starts and bounds."""
