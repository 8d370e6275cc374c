"""`elastic-agent check --nodes N`: nodes meet in the store of a job, try each other out, and all print one report.

`meeting` is what they have in the store, `stages` who does what when, `here` what one node does, and `command` puts a
check together. What follows from what they find is in `health/checks/pairs/`.
"""
