"""What a job needs of a node, what one check says of this node, or of several, and how a check's process is started.

`check` is a stable name, such as `gpu-ecc`: metrics and reports refer to it. `summary` says what
was found, `advice` what to do about it; a finding that is not ok has some.

Findings travel between processes and nodes, and are refused where they are not of this form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

from ... import __file__ as _package
from ...codec import AtMost, Checked, Count, Positive, Text

MOST_SUMMARY = 6144
"""Characters: room for a path and for what a kernel or a driver says."""

_CHECK = re.compile(r"[a-z][a-z0-9-]*")


class Outcome(Enum):
    """In the order in which a person wants to read them."""

    FAIL = "fail"
    """Training here would fail, hang or be much slower than it should."""
    WARN = "warn"
    """Training works, and something will cost time or safety."""
    UNKNOWN = "unknown"
    """It could not be found out: not permitted, or not there."""
    OK = "ok"

    @property
    def rank(self) -> int:
        """0 is the worst."""
        return list(Outcome).index(self)

    @property
    def severity(self) -> int | None:
        """As a metric: 0 ok, 1 warn, 2 fail; None: unknown."""
        return {Outcome.OK: 0, Outcome.WARN: 1, Outcome.FAIL: 2}.get(self)


@dataclass(frozen=True, slots=True)
class Finding(Checked):
    """One check's answer."""

    check: Annotated[str, Text(64, _CHECK)]
    outcome: Outcome
    summary: Annotated[str, Text(MOST_SUMMARY)]
    advice: Annotated[str, Text(2048)] = ""


def worst(findings: Iterable[Finding]) -> Outcome:
    """Of all of them; ok without any."""
    return min(
        (finding.outcome for finding in findings), key=lambda outcome: outcome.rank, default=Outcome.OK
    )


def worst_first(findings: Iterable[Finding]) -> Sequence[Finding]:
    """For a person; those of one outcome stay in their order."""
    return sorted(findings, key=lambda finding: finding.outcome.rank)


# --- What a job needs


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds(Checked):
    """As far as checks look at it. Empty texts and zeros: the job does not say, or does not need it."""

    ranks: Positive = 1
    """Of the whole job, at its largest."""
    copies_bytes: Count = 0
    """Of the states that are to be kept in shared memory."""
    log_directory: Annotated[str, Text(4096)] = ""
    address: Annotated[str, Text(256)] = ""
    """By which other nodes reach this one."""
    gpus: Annotated[tuple[Annotated[str, Text(128)], ...], AtMost(256)] = ()
    """As NVML knows them: a PCI address, a uuid or an index."""
    rdma: bool = False
    """NCCL uses InfiniBand or RoCE."""


# --- Sizes and lists of names as findings show them

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
MIB = 1 << 20
GIB = 1 << 30


def size(number: float) -> str:
    """64 MiB, 1.5 GiB."""
    power = 0
    while number >= 1024 and power < len(_UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.1f}".removesuffix(".0") + f" {_UNITS[power]}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


# --- The process of a function: what hangs in a driver, a disk or torch is killed

PROGRAM = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; from {module} import {main}; {main}()"
)
"""An empty entry is the current directory, whose modules are not to be imported. This package comes last."""

ISOLATED = ("-I", "-S")
"""For a probe that needs the standard library and this package only: no module of PYTHONPATH is imported, and nothing
that is installed runs at its start."""

_PACKAGES = Path(_package).parents[1]


def probe_command(python: str, module: str, main: str = "main", flags: Sequence[str] = ()) -> list[str]:
    """`main` is a function of `module`; what is put behind the command is its `sys.argv[2:]`."""
    return [python, *flags, "-c", PROGRAM.format(module=module, main=main), str(_PACKAGES)]
