"""The web page of the agent at `/`, and the stream of events and states that it shows."""
