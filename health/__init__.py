"""What can be seen of a node: metrics and the HTTP server that serves them. Never steers by itself."""
