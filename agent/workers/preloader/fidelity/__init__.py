"""What makes what a fork of the preloaded process sees like what a fresh process sees: modules, variables, /proc.

In the job's interpreter: standard library only.
"""
