"""Idle nodes that know each other, and the jobs that are submitted to them: one queue, and who runs what."""
