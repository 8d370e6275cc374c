"""Decides which nodes form which world: frozen data, pure decisions, and a folder for each kind of store.

Knows nothing of processes, ports or torch workers; `agent` turns its answers into action.
"""
