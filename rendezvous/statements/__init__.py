"""The messages inside the records of nodes and of the world: terms, paces, inquiries, exclusions."""
