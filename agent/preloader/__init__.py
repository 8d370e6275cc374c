"""Warm start: a process that has imported what workers import, and what makes its forks like fresh workers.

Everything in this folder but `spares` and `supply` runs in the preloaded process, in the job's interpreter, which need
not be the agent's: it imports the standard library only, and what it was asked to preload.
"""
