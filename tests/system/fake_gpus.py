"""Runs the agent's command, which follows, in this process and on a machine that seems to have one GPU."""

from __future__ import annotations

import sys

from elastic_agent.__main__ import start
from elastic_agent.agent.machine import inventory as machine
from elastic_agent.agent.machine.devices import Device, Inventory

ADDRESS = "0000:3b:00.0"

if __name__ == "__main__":
    machine.probe = lambda environ: Inventory((Device("0", ADDRESS),), cpus=2)
    interpreter, dash_m, *sys.argv = sys.argv[1:]
    start()
