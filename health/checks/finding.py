"""A finding: what one check says of this node, or of a pair of nodes, in words for a person and in numbers.

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

from ...codec import Checked, Seconds, Text, Within

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
