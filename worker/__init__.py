"""The library inside the training process: checkpoints and progress. Never imports the agent."""
