"""Checks between nodes: they meet in two rounds of pairs, so that the one bad node, or the one bad link, is found.

`rounds` says who meets whom, `evidence` which pairs passed, and `judge` what follows from that; all three are pure.
`client` asks what `server` answers on another node, `all_reduce` does with it what workers do, and `results` has what
they find out.
"""
