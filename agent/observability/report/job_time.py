"""How a job spent its time, from how each of its nodes did.

A second of the job is one second, however many nodes it has: each instant is divided among the uses as on the average
of the nodes. A node that waits for a world counts only while all nodes wait: a spare, or a node that came early, costs
the job nothing. Training stands still for a save of any node, so the slowest save counts. Time without an account of
any agent is ABSENT.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .lives import Stretch, Use


@dataclass(frozen=True, slots=True)
class Slice:
    began_at: float
    ended_at: float
    seconds: Mapping[Use, float]
    """They add up to the length of the slice."""


def job_time(stretches: Sequence[Stretch]) -> Iterator[Slice]:
    """From the first instant to the last, without a gap, in order."""
    begins = sorted(stretches, key=lambda stretch: stretch.began_at)
    instants = sorted({at for stretch in begins for at in (stretch.began_at, stretch.ended_at)})
    present, following = _Present(), 0
    for at, until in pairwise(instants):
        present.leave(at)
        while following < len(begins) and begins[following].began_at <= at:
            present.enter(begins[following])
            following += 1
        yield Slice(at, until, present.divide(until - at))


@dataclass(slots=True)
class _Present:
    """The stretches of all nodes at one instant. Each is added and taken away once: there may be a million."""

    ends: list[tuple[float, int, Stretch]] = field(default_factory=list)
    """A heap."""
    saves: list[tuple[float, float]] = field(default_factory=list)
    """A heap of negative share of time blocked by saves, and end. Ended entries are removed once they are on top."""
    uses: Counter[Use] = field(default_factory=Counter)
    entered: int = 0

    def enter(self, stretch: Stretch) -> None:
        self.entered += 1
        self.uses[stretch.use] += 1
        heapq.heappush(self.ends, (stretch.ended_at, self.entered, stretch))
        if stretch.blocked_s:
            share = min(1.0, stretch.blocked_s / (stretch.ended_at - stretch.began_at))
            heapq.heappush(self.saves, (-share, stretch.ended_at))

    def leave(self, at: float) -> None:
        """Remove the stretches that have ended."""
        while self.ends and self.ends[0][0] <= at:
            self.uses[heapq.heappop(self.ends)[2].use] -= 1
        while self.saves and self.saves[0][1] <= at:
            heapq.heappop(self.saves)

    def divide(self, length_s: float) -> dict[Use, float]:
        if not self.ends:
            return {Use.ABSENT: length_s}
        busy = len(self.ends) - self.uses[Use.WAITING]
        if not busy:
            return {Use.WAITING: length_s}
        seconds: dict[Use, float] = {
            use: length_s * count / busy
            for use, count in self.uses.items()
            if count and use is not Use.WAITING
        }
        saving = -self.saves[0][0] * length_s if self.saves else 0.0
        for use in (Use.PRODUCTIVE, Use.REDONE):
            taken = min(saving, seconds.get(use, 0.0))
            if taken > 0.0:
                saving -= taken
                seconds[use] -= taken
                seconds[Use.SAVING] = seconds.get(Use.SAVING, 0.0) + taken
        return seconds


def until(slices: Iterable[Slice], end: float) -> Iterator[Slice]:
    """The slices before this instant, with the last one cut there."""
    for one in slices:
        if one.ended_at <= end:
            yield one
        elif one.began_at < end:
            yield _part(one, one.began_at, end)


def binned(slices: Sequence[Slice], count: int) -> tuple[Slice, ...]:
    """The same time in `count` slices of equal length."""
    if not slices:
        return ()
    began_at, ended_at = slices[0].began_at, slices[-1].ended_at
    edges = [began_at + (ended_at - began_at) * number / count for number in range(count)] + [ended_at]
    sums: list[dict[Use, float]] = [{} for _ in range(count)]
    place = 0
    for one in slices:
        at = one.began_at
        while at < one.ended_at:
            while place < count - 1 and edges[place + 1] <= at:
                place += 1
            end = one.ended_at if place == count - 1 else min(one.ended_at, edges[place + 1])
            for use, seconds in _part(one, at, end).seconds.items():
                sums[place][use] = sums[place].get(use, 0.0) + seconds
            at = end
    return tuple(Slice(edges[number], edges[number + 1], sums[number]) for number in range(count))


def _part(one: Slice, began_at: float, ended_at: float) -> Slice:
    share = (ended_at - began_at) / (one.ended_at - one.began_at)
    return Slice(began_at, ended_at, {use: seconds * share for use, seconds in one.seconds.items()})
