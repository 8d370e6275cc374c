"""Metrics of a node, the comparison of nodes, and the HTTP server for both. Never steers by itself."""
