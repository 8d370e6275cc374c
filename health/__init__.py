"""Metrics of a node, and the HTTP server for them and for probes. Never steers by itself."""
