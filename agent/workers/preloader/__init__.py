"""Warm start: a process that has imported what workers import, and what makes its forks like fresh workers.

`spares` and `spare_policy` run in the agent; `import_profile` and `wire` in both; all else in the preloaded process, in
the job's interpreter, which need not be the agent's. What runs there imports the standard library, modules of this
folder and the codec under names of its own, and what it was asked to preload.
"""
