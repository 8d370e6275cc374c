"""The store that one of the agents hosts behind a torch TCPStore, the way of torchrun's c10d backend."""
