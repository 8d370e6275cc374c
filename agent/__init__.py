"""The node daemon: command line, configuration, main loop, worker processes, ports, devices and logs.

The only folder that touches processes, signals and ports. It stands on `rendezvous` (which world?), `health`
(what can be seen?) and no other folder imports it.
"""
