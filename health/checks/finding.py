"""What a job needs of a node, and what one check says of this node, or of a pair of nodes, in words and in numbers.

`check` is a stable name, such as `gpu-ecc`: metrics, exit codes and later exclusions refer to it. `summary` says what
was found, `advice` what to do about it; a finding that is not ok has some.

A codec of them is `Codec((Finding,), version=1, most_bytes=MOST_BYTES)` (`elastic_agent/codec.py`): findings travel
between processes and nodes, and are refused where they are not of this form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from ...codec import AtMost, Checked, Count, Positive, Seconds, Text, Within

MOST_BYTES = 16_384
"""Of one finding as JSON."""

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
        return _RANKS[self]

    @property
    def severity(self) -> int | None:
        """As a metric: 0 ok, 1 warn, 2 fail; None: unknown."""
        return {Outcome.OK: 0, Outcome.WARN: 1, Outcome.FAIL: 2}.get(self)


_RANKS = {outcome: rank for rank, outcome in enumerate(Outcome)}


@dataclass(frozen=True, slots=True)
class Finding(Checked):
    """One check's answer. `seconds` is how long it took to find it; `values` are the numbers that it rests on."""

    check: Annotated[str, Text(64, _CHECK)]
    outcome: Outcome
    summary: Annotated[str, Text(MOST_SUMMARY)]
    advice: Annotated[str, Text(2048)] = ""
    values: dict[str, Annotated[float, Within(-1e300, 1e300)]] = field(default_factory=dict)
    seconds: Seconds = 0.0


def worst(findings: Iterable[Finding]) -> Outcome:
    """Of all of them; ok without any."""
    return min(
        (finding.outcome for finding in findings), key=lambda outcome: outcome.rank, default=Outcome.OK
    )


def worst_first(findings: Iterable[Finding]) -> Sequence[Finding]:
    """For a person; those of one outcome stay in their order."""
    return sorted(findings, key=lambda finding: finding.outcome.rank)


# --- What a job needs

MOST_PEERS = 8
"""The most other nodes that are asked whether they answer."""
_Path = Annotated[str, Text(4096)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds(Checked):
    """As far as checks look at it. Empty texts and zeros: the job does not say, or does not need it."""

    ranks: Positive = 1
    """Of the whole job, at its largest."""
    copies_bytes: Count = 0
    """Of the states that are to be kept in shared memory."""
    checkpoint_directory: _Path = ""
    log_directory: _Path = ""
    interface: Annotated[str, Text(64)] = ""
    address: Annotated[str, Text(256)] = ""
    """By which other nodes reach this one."""
    gpus: Annotated[tuple[Annotated[str, Text(128)], ...], AtMost(256)] = ()
    """As NVML knows them: a PCI address, a uuid or an index."""
    rdma: bool = False
    """NCCL uses InfiniBand or RoCE."""
    peers: Annotated[tuple[Annotated[str, Text(280)], ...], AtMost(MOST_PEERS)] = ()
    """Where other nodes' agents answer over HTTP, as HOST:PORT."""


# --- Sizes, rates, durations and lists of names as findings show them

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
MIB = 1 << 20
GIB = 1 << 30


def size(number: float) -> str:
    """64 MiB, 1.5 GiB."""
    power = 0
    while number >= 1024 and power < len(_UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.1f}".removesuffix(".0") + f" {_UNITS[power]}"


def span(seconds: float) -> str:
    """
    >>> span(0.000045), span(0.0021), span(0.4), span(3600.0)
    ('45 us', '2.1 ms', '400 ms', '3600.0 s')
    """
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f}".removesuffix(".0") + " ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def rate(bytes_per_s: float) -> str:
    """
    >>> rate(1.25e9), rate(117.4e6), rate(900.0)
    ('1.2 GB/s', '117 MB/s', '900 B/s')
    """
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            number = bytes_per_s / size
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
