"""A process that keeps NVML open and reads this node's GPUs whenever it is asked: NVML may hang in any of these calls.

Its arguments are the GPUs, as NVML knows them. Each line on standard input asks; the answer is a line of standard
output, a `NvmlFacts`. What a library of the driver prints goes nowhere.
"""

from __future__ import annotations

import os
import sys

from ..rules.gpus import GPU_READING
from .gpus import open_nvml, read_gpus


def main() -> None:
    """Until standard input ends."""
    gpus = sys.argv[2:]
    with os.fdopen(os.dup(1), "wb") as answers:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        nvml = open_nvml()
        for _ in sys.stdin.buffer:
            answers.write(GPU_READING.encode(read_gpus(nvml, gpus)))
            answers.flush()
