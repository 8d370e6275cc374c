"""Hang detection: the workers of one generation on this node make no visible progress any more.

Judged is silence, nothing else. It counts from the first step on, so that compilation, data loading and the first
collectives may take their time; from then on it must be longer than anything that happens between two steps. A
worker whose collective waits for a worker elsewhere is as silent as the one that is the reason for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class HangWatch:
    """`limit_s` None: nothing is ever due. Instants are monotonic: those at which it happened, not was seen."""

    limit_s: float | None
    steps: dict[int, int] = field(default_factory=dict)
    """The newest step of each worker that has finished one, by local rank."""
    _alive_at: float = 0.0
    _silence_s: float = 0.0
    """The longest since then that is certain."""
    _warned: bool = False

    def stepped(self, local_rank: int, step: int, at: float) -> float | None:
        """A worker has finished a step. Returns the silence before it if that came near the limit, once.

        Of several steps only the newest may be seen: how long those before it took is not known then.
        """
        before = self.steps.get(local_rank)
        near_s = self._alive(at, exact=before is not None and step == before + 1)
        self.steps[local_rank] = step
        return near_s

    def alive(self, at: float) -> float | None:
        """A worker has reported something else: no first step, but as good as one afterwards. Returns as `stepped`."""
        return self._alive(at, exact=True)

    def silent(self, now: float) -> None:
        """Nothing new is to be seen."""
        self._silence_s = max(self._silence_s, now - self._alive_at)

    def _alive(self, at: float, *, exact: bool) -> float | None:
        silence_s = max(self._silence_s, at - self._alive_at) if exact else self._silence_s
        self._alive_at, self._silence_s = max(self._alive_at, at), 0.0
        near = bool(self.steps) and self.limit_s is not None and silence_s > self.limit_s / 2
        if not near or self._warned:
            return None
        self._warned = True
        return silence_s

    @property
    def due_at(self) -> float | None:
        """The instant from which the silence is a hang; None while there is no such instant."""
        return self._alive_at + self.limit_s if self.steps and self.limit_s is not None else None

    @property
    def hindmost(self) -> int:
        """The local rank that is behind the others: the likeliest of this node to be stuck by itself."""
        return min(self.steps, key=lambda local_rank: (self.steps[local_rank], local_rank))

    def cause(self, ranks: Mapping[int, int]) -> str:
        """Of the end that the agent makes of these workers; `ranks` by local rank."""
        at = ", ".join(f"rank {ranks[local]}: {step}" for local, step in sorted(self.steps.items()))
        return (
            f"hang: no step or checkpoint reported for {self.limit_s:g} s (--hang-timeout); last steps: {at}"
        )
