"""How far the clocks of nodes are apart, from what pairs have measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .results import Measurement

OFFSET_S = 1.0
"""More than this is worth a warning: logs cannot be put in order, and certificates may not be valid yet."""


def clock_offsets(nodes: Sequence[str], measured: Iterable[Measurement]) -> dict[str, float]:
    """Seconds by which each clock is ahead of the first node's, for all that pairs connect with it."""
    known: dict[str, dict[str, float]] = {}
    for one in measured:
        if one.clock_offset_s is not None:
            known.setdefault(one.first, {})[one.second] = one.clock_offset_s
            known.setdefault(one.second, {})[one.first] = -one.clock_offset_s
    start = next((node for node in nodes if node in known), None)
    if start is None:
        return {}
    offsets = {start: 0.0}
    ahead = [start]
    for node in ahead:
        for other, offset_s in known[node].items():
            if other not in offsets:
                offsets[other] = offsets[node] + offset_s
                ahead.append(other)
    return offsets
