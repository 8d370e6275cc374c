"""Checks between nodes: they meet in two rounds of pairs, so that the one bad node, or the one bad link, is found.

`rounds` says who meets whom, and `judge` what follows from the pairs that failed.
"""
