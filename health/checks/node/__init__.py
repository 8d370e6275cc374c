"""The checks of one node: their table, and the processes that run them within a time limit."""
