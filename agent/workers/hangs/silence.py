"""How long the workers of one generation on this node have reported no step and no checkpoint.

A worker whose collective waits for a worker elsewhere is as silent as the one that is the reason for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepSilence:
    """Instants are monotonic: those at which it happened, not was seen. `limit_s` is the user's own, if any."""

    limit_s: float | None
    steps: dict[int, int] = field(default_factory=dict)
    """The newest step of each worker that has finished one, by local rank."""
    alive_at: float = 0.0
    """The newest sign of life."""
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
        self._silence_s = max(self._silence_s, now - self.alive_at)

    def _alive(self, at: float, *, exact: bool) -> float | None:
        silence_s = max(self._silence_s, at - self.alive_at) if exact else self._silence_s
        self.alive_at, self._silence_s = max(self.alive_at, at), 0.0
        near = bool(self.steps) and self.limit_s is not None and silence_s > self.limit_s / 2
        if not near or self._warned:
            return None
        self._warned = True
        return silence_s

    @property
    def hindmost(self) -> int:
        """The local rank that is behind the others: the likeliest of this node to be stuck by itself."""
        return min(self.steps, key=lambda local_rank: (self.steps[local_rank], local_rank))
