"""Checkpoints in this node's memory: the folder that the workers fill, and the writer that brings them to disk."""
