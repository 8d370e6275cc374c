"""How many spares are asked for, and how long a start waits for them: tables."""

from __future__ import annotations

import pytest

from elastic_agent.agent.workers.preloader.spare_policy import (
    CALM_S,
    FORKING_S,
    LOADING_S,
    RETRY_S,
    Advice,
    Phase,
    Stock,
    before_start,
    due_at,
    in_background,
    overdue,
    pause_s,
)

LOADING, READY, BROKEN = Phase.LOADING, Phase.READY, Phase.BROKEN
NOW = 1000.0


@pytest.mark.parametrize(
    ("stock", "advice"),
    [
        # The first start comes during the imports: they would only be done twice at once.
        (Stock(LOADING, NOW), Advice(wait_until=NOW + LOADING_S)),
        (Stock(LOADING, NOW - LOADING_S + 1), Advice(wait_until=NOW + 1)),
        (Stock(LOADING, NOW - LOADING_S), Advice()),
        # As many as are needed, or more.
        (Stock(READY, 0.0, ready=4), Advice()),
        (Stock(READY, 0.0, ready=5, coming=1, asked_at=NOW), Advice()),
        # Those that were forked before outlive the process that they were forked from.
        (Stock(BROKEN, 0.0, ready=4), Advice()),
        (Stock(LOADING, NOW, ready=4), Advice()),
        # Too few: the others are forked now.
        (Stock(READY, 0.0), Advice(4, NOW + FORKING_S)),
        (Stock(READY, 0.0, ready=1), Advice(3, NOW + FORKING_S)),
        (Stock(READY, 0.0, ready=1, coming=2, asked_at=NOW - 1), Advice(1, NOW - 1 + FORKING_S)),
        (Stock(READY, 0.0, ready=1, coming=3, asked_at=NOW - 1), Advice(0, NOW - 1 + FORKING_S)),
        (Stock(READY, 0.0, ready=1, coming=5, asked_at=NOW - 1), Advice(0, NOW - 1 + FORKING_S)),
        # Nobody forks them: a cold start comes to an end.
        (Stock(READY, 0.0, ready=1, coming=3, asked_at=NOW - FORKING_S), Advice()),
        (Stock(READY, 0.0, ready=3, fork_failed=True), Advice()),
        (Stock(BROKEN, 0.0), Advice()),
        (Stock(BROKEN, 0.0, ready=3), Advice()),
    ],
)
def test_what_is_asked_for_and_waited_for_before_four_workers_start(stock: Stock, advice: Advice) -> None:
    assert before_start(stock, 4, NOW) == advice


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("ready", [0, 3])
@pytest.mark.parametrize("coming", [0, 1, 4])
@pytest.mark.parametrize("fork_failed", [False, True])
def test_every_wait_ends_when_nothing_more_happens(
    phase: Phase, ready: int, coming: int, fork_failed: bool
) -> None:
    """The invariant: a start that asks again at the given instant begins after two waits at most."""
    stock, now = Stock(phase, NOW, ready, coming, NOW, fork_failed), NOW
    for _ in range(3):
        advice = before_start(stock, 4, now)
        if advice.wait_until is None:
            return
        if advice.ask:
            stock = Stock(phase, NOW, ready, coming + advice.ask, now, False)
        now = advice.wait_until
    pytest.fail(f"still waiting at {now}: {stock}")


@pytest.mark.parametrize(
    ("stock", "calm_at", "asked"),
    [
        (Stock(READY, 0.0), NOW, 4),
        (Stock(READY, 0.0, ready=3), NOW, 1),
        (Stock(READY, 0.0, ready=1, coming=3), NOW, 0),
        (Stock(READY, 0.0, ready=6), NOW, 0),
        (Stock(READY, 0.0), NOW + CALM_S, 0),
        (Stock(LOADING, 0.0), NOW, 0),
        (Stock(BROKEN, 0.0), NOW, 0),
    ],
)
def test_what_is_asked_for_in_the_background(stock: Stock, calm_at: float, asked: int) -> None:
    assert in_background(stock, 4, calm_at, NOW) == asked


@pytest.mark.parametrize(
    ("stock", "due"),
    [
        (Stock(LOADING, NOW), NOW + LOADING_S),
        (Stock(READY, NOW, ready=1, coming=2, asked_at=NOW + 3), NOW + 3 + FORKING_S),
        (Stock(READY, NOW, ready=1, asked_at=NOW), None),
        (Stock(BROKEN, NOW, coming=2, asked_at=NOW), None),
    ],
)
def test_a_process_hangs_from_the_instant_that_was_given_before(stock: Stock, due: float | None) -> None:
    assert due_at(stock) == due
    if due is None:
        assert overdue(stock, NOW + 1e6) == ""
    else:
        assert overdue(stock, due - 0.001) == ""
        assert overdue(stock, due) != ""


def test_the_pauses_between_attempts_grow_to_the_last_one() -> None:
    assert [pause_s(failures) for failures in range(1, len(RETRY_S) + 3)] == [
        *RETRY_S,
        RETRY_S[-1],
        RETRY_S[-1],
    ]
