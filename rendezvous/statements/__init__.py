"""What the records of nodes and of the world are made of."""
