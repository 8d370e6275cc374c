"""The store of one machine: a file in a folder of its user's own."""
