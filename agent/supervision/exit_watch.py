"""Some ranks have ended with success, and others of the same generation live on: since when does nothing happen?

A job is over only when all of its workers have ended. One that is stuck after its script's last line, in the end of
the interpreter or of a library, would keep all nodes for ever. One that writes the final model is at work. So what
counts is the time since the last sign of life: a step, a checkpoint, the end of a rank. Instants are monotonic.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WORD_S = 10.0
"""The ranks of a job end within seconds of each other; more is worth a line in the log."""

SECOND_WORD_S = 60.0
"""From then on, twice as long each time."""


@dataclass(slots=True)
class ExitWatch:
    """`limit_s` None: nothing is ever due."""

    limit_s: float | None
    _heard_at: float | None = None
    """None: no rank has ended."""
    _next_word_s: float = FIRST_WORD_S

    def ended(self, at: float) -> None:
        """A rank has ended with success."""
        self._heard_at = at if self._heard_at is None else max(self._heard_at, at)

    def alive(self, at: float) -> None:
        """One of those that live on is at work."""
        if self._heard_at is not None:
            self._heard_at = max(self._heard_at, at)

    @property
    def watching(self) -> bool:
        return self._heard_at is not None

    def silence_s(self, now: float) -> float:
        return max(0.0, now - self._heard_at) if self._heard_at is not None else 0.0

    def due(self, now: float) -> bool:
        """The silence is a hang."""
        return self.watching and self.limit_s is not None and self.limit_s <= self.silence_s(now)

    def word_due(self, now: float) -> bool:
        """A line in the log is due; True once each time."""
        if not self.watching or self.silence_s(now) < self._next_word_s:
            return False
        self._next_word_s = max(SECOND_WORD_S, 2 * self._next_word_s)
        return True
