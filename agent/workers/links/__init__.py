"""The agent's end of what its workers tell and ask it."""
