"""How many spares to ask the preloaded process for, and how long a generation may wait for them. Pure decisions.

Words: a *spare* is ready when it has reported so, and *coming* from the moment it was asked for. A *start* is warm with
a spare and cold without.

Invariant: no start waits for a preloaded process or for spares any longer than is declared here. A cold start is slow,
but it always comes to an end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LOADING_S = 60.0
"""For the imports: a cold start beside them would import the same on the same cores and from the same disk."""

FORKING_S = 5.0
"""From the request for spares to the last of them. A fork takes some 10 ms, many on a machine with too much to do."""

CALM_S = 2.0
"""A generation is left alone for so long before spares are made for its successor: its start needs the cores."""

RETRY_S = (0.0, 1.0, 4.0, 15.0, 60.0)
"""Pauses before a preloaded process that has ended or hung is replaced; the last one for ever."""

HEALTHY_S = 60.0
"""A preloaded process that has served for so long had nothing to do with the trouble of those before it."""


class Phase(Enum):
    LOADING = "importing"
    READY = "ready"
    BROKEN = "not there"


@dataclass(frozen=True, slots=True)
class Stock:
    """What there is. Instants are monotonic."""

    phase: Phase
    since: float
    """That it is in this phase."""
    ready: int = 0
    coming: int = 0
    asked_at: float = 0.0
    """When the first of those coming were asked for."""
    fork_failed: bool = False
    """Some of them have ended instead."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Ask for so many, and wait until then at most; None: there is nothing to wait for."""

    ask: int = 0
    wait_until: float | None = None


def before_start(stock: Stock, workers: int, now: float) -> Advice:
    """A generation is to be started now."""
    if stock.ready >= workers or overdue(stock, now):
        return Advice()
    if stock.phase is Phase.LOADING:
        return Advice(wait_until=stock.since + LOADING_S)
    if stock.phase is Phase.BROKEN or stock.fork_failed:
        return Advice()
    missing = max(0, workers - stock.ready - stock.coming)
    asked_at = stock.asked_at if stock.coming else now
    return Advice(missing, asked_at + FORKING_S)


def in_background(stock: Stock, wanted: int, calm_at: float, now: float) -> int:
    """How many to ask for while no start waits. Nothing is done before `calm_at`."""
    if stock.phase is not Phase.READY or now < calm_at:
        return 0
    return max(0, wanted - stock.ready - stock.coming)


def overdue(stock: Stock, now: float) -> str:
    """Why the preloaded process must be taken to hang; empty if it need not."""
    if stock.phase is Phase.LOADING and now >= stock.since + LOADING_S:
        return f"it has not done its imports within {LOADING_S:g} s"
    if stock.phase is Phase.READY and stock.coming and now >= stock.asked_at + FORKING_S:
        return f"it has not forked {stock.coming} spares within {FORKING_S:g} s"
    return ""


def due_at(stock: Stock) -> float | None:
    """When `overdue` will be true."""
    if stock.phase is Phase.LOADING:
        return stock.since + LOADING_S
    return stock.asked_at + FORKING_S if stock.phase is Phase.READY and stock.coming else None


def pause_s(failures: int) -> float:
    """Before the next attempt, after so many in a row have failed."""
    return RETRY_S[min(failures, len(RETRY_S)) - 1]
