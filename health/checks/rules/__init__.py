"""What facts mean for a job: pure functions from facts and needs to findings."""
