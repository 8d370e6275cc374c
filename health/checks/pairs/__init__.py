"""Checks between nodes: they meet in two rounds of pairs, so that the one bad node, or the one bad link, is found.

`rounds` says who meets whom, `evidence` which pairs passed, `fault_location` what follows from that, and `report`
says it; all of it is pure. `facts` and `results` have what nodes tell each other, and `probes/` finds that out.
"""
