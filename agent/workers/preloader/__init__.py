"""Warm starts: a fork server that has imported what workers import, and its idle forks, the *spares*.

`spares` runs in the agent, which asks `imported` about environments, too; all else in the fork
server, in the job's interpreter, which need not be the agent's.
"""
