"""The node daemon: command line, configuration, main loop, worker processes, ports, devices and logs.

It stands on `rendezvous` (which world?), `health` (what can be seen?) and `worker`'s wire; `pool` alone imports it.
"""
