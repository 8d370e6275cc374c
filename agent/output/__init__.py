"""What the agent and its workers print: the console, log files, and the threads that write there."""
