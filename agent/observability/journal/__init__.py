"""The events of a job as this agent saw them: in memory for the pages, and in a file of the run's folder."""
