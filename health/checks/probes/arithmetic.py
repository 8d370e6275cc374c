"""Copies to each device and back, and matrix products there that are compared with the CPU's.

A process of its own imports torch, with the environment of the workers, so that it sees the devices that they see.
Without torch only the CPU is tested: its floating-point products must agree with exact ones.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from .... import __file__ as _package
from ..probe_process import PROGRAM
from ..rules.recheck import ArithmeticFacts

WITHIN_S = 80.0
"""On an overloaded machine most of it goes into the import of torch."""
TIMES = 8
SIZE = 256
SMALL_SIZE = 48
COPIED = 1 << 24
"""Numbers that are copied to each device, of four bytes each."""


def probe_arithmetic() -> ArithmeticFacts:
    packages = str(Path(_package).parents[1])
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(module=__name__), packages],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        return ArithmeticFacts(problem=f"no result within {WITHIN_S:g} s")
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        return ArithmeticFacts(problem=f"ended with {done.returncode}: {last}"[:1024])
    found = json.loads(done.stdout)
    return ArithmeticFacts(
        devices=tuple(found["devices"]),
        wrong=tuple(found["wrong"]),
        sees_no_gpu=bool(found.get("sees_no_gpu")),
    )


def main() -> None:
    """Runs in the process of its own, and prints the result as JSON."""
    try:
        import torch
    except ImportError:
        print(
            json.dumps(
                {"devices": ["the processor"], "wrong": [] if _fractions_agree() else ["the processor"]}
            )
        )
        return
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    numbers = torch.randint(-4, 5, (SIZE, SIZE), generator=torch.Generator().manual_seed(1))
    expected = (
        numbers @ numbers
    ).float()  # every sum is exact also in single precision, and its factors in TF32
    copied = torch.arange(COPIED, dtype=torch.int32)
    wrong = []
    for device in devices:
        there = numbers.float().to(device)
        agree = all(torch.equal((there @ there).cpu(), expected) for _ in range(TIMES))
        if not agree or not torch.equal(copied.to(device).clone().cpu(), copied):
            wrong.append(device)
    sees_no_gpu = torch.version.cuda is not None and len(devices) == 1
    print(json.dumps({"devices": devices, "wrong": wrong, "sees_no_gpu": sees_no_gpu}))


def _fractions_agree() -> bool:
    rng, places = random.Random(1), range(SMALL_SIZE)
    rows = [[rng.randint(-4, 4) for _ in places] for _ in places]
    return all(
        sum(rows[i][k] * rows[k][j] for k in places) / 8
        == sum(rows[i][k] / 4 * (rows[k][j] / 2) for k in places)
        for i in places
        for j in places
    )
