"""Sums up saves into events, as some jobs copy their state into memory at every step.

There is at most one event of a tier in `RESTS_S`; it covers all saves since the one before. The last one, at the end of
the agent, covers the rest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ....worker.wire.messages import SaveReport, Tier
from .events import Kind
from .journal import Journal

RESTS_S: dict[Tier, float] = {"memory": 60.0, "local": 1.0, "part": 60.0}

_PLACES: dict[Tier, str] = {"memory": "in memory", "local": "on disk", "part": "on disk in part"}


@dataclass(slots=True)
class _Since:
    """The saves of one tier since the last event."""

    due_at: float = 0.0
    step: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    duration_s: float = 0.0
    blocked_s: float = 0.0


class SaveEvents:
    """For the main thread. `now` is monotonic."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._tiers: dict[Tier, _Since] = {}

    def add(self, report: SaveReport, now: float) -> None:
        since = self._tiers.setdefault(report.tier, _Since())
        good = report.result == "ok"
        since.counts.update(saves=int(good), failed=int(not good), bytes=report.bytes if good else 0)
        since.duration_s += report.duration_s
        since.blocked_s += report.blocked_s
        since.step = max(since.step, report.step)
        if now >= since.due_at:
            self._note(report.tier, since, now)

    def flush(self, now: float) -> None:
        """Write the events of all saves that have none yet."""
        for tier, since in self._tiers.items():
            if since.counts.total():
                self._note(tier, since, now)

    def _note(self, tier: Tier, since: _Since, now: float) -> None:
        saves, failed = since.counts["saves"], since.counts["failed"]
        what = (
            f"step {since.step} is {_PLACES[tier]}" if saves else f"step {since.step} is not {_PLACES[tier]}"
        )
        more = f", {failed} failed" if failed else ""
        self._journal.note(
            Kind.SAVE,
            f"{what}{f' ({saves} saves)' if saves > 1 else ''}{more}",
            cause=tier,
            seconds={"duration": since.duration_s, "blocked": since.blocked_s},
            counts={**since.counts, "step": since.step},
        )
        self._tiers[tier] = _Since(now + RESTS_S[tier])
