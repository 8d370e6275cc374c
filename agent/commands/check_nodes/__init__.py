"""`elastic-agent check --nodes N`: nodes meet in the store of a job, try each other out, and all print one report.

`run` puts a check together; `check_store` has its keys in the store, `stages` the order of its stages, and `local_node`
what one node does in each. What follows from the results is in `health/checks/pairs/`.
"""
