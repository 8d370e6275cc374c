"""The agent's end of the messages that its workers send."""
