"""Runs the agent's command, which follows, in this process and on a machine that seems to have GPUs.

`FAKE_GPUS` is their number, without it 1. Not a test.
"""

from __future__ import annotations

import os
import sys

from elastic_agent.__main__ import start
from elastic_agent.agent.machine import inventory as machine
from elastic_agent.agent.machine.devices import Device, Inventory

ADDRESS = "0000:3b:00.0"

if __name__ == "__main__":
    addresses = [ADDRESS, *(f"0000:{number:02x}:00.0" for number in range(0x40, 0x4F))]
    gpus = [Device(str(index), address) for index, address in enumerate(addresses)]
    machine.probe = lambda environ: Inventory(tuple(gpus[: int(os.environ.get("FAKE_GPUS", "1"))]), cpus=2)
    interpreter, dash_m, *sys.argv = sys.argv[1:]
    start()
