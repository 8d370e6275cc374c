"""Who keeps the last step of a failed generation: the decisions."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_agent.agent.workers.stopping import JustInTimeState, Orders
from elastic_agent.worker.wire.messages import (
    Broken,
    FromGuard,
    Go,
    Guarding,
    Held,
    Hold,
    Keep,
    Kept,
    ToGuard,
)

GRACE_S = 2.0


def guarded(*local_ranks: int, grace_s: float = GRACE_S) -> JustInTimeState:
    state = JustInTimeState(7, grace_s, lambda: 5)
    for local_rank in local_ranks:
        assert state.received(local_rank, Guarding(7, local_rank), 0.0) == []
    return state


def told(orders: Orders) -> dict[int, type[ToGuard]]:
    return {local_rank: type(message) for local_rank, message in orders}


# --- Decisions


def test_the_newest_whole_step_is_kept_by_one_and_then_all_go() -> None:
    state = guarded(0, 1, 2)
    assert state.begin(10.0) == [(0, Hold(1.0, 5)), (1, Hold(1.0, 5)), (2, Hold(1.0, 5))]
    assert state.under_way
    assert state.received(0, Held(4), 10.01) == []
    assert state.received(1, Held(5), 10.02) == []
    ((keeper, order),) = state.received(2, Held(5), 10.5)
    assert (keeper, order) == (1, Keep())
    assert told(state.received(1, Kept(5), 10.6)) == {0: Go, 1: Go, 2: Go}
    assert state.over
    assert not state.under_way


def test_without_guards_there_is_no_wait() -> None:
    state = JustInTimeState(7, GRACE_S, lambda: None)
    assert state.begin(10.0) == []
    assert not state.under_way
    assert state.over


def test_no_grace_no_waiting() -> None:
    state = guarded(0, grace_s=0.0)
    assert told(state.begin(10.0)) == {0: Go}
    assert not state.under_way


def test_nobody_is_whole() -> None:
    state = guarded(0, 1)
    state.begin(10.0)
    state.received(0, Held(None), 10.0)
    assert told(state.received(1, Held(None), 10.1)) == {0: Go, 1: Go}
    assert state.over


def test_one_that_does_not_answer_is_waited_for_half_of_the_grace() -> None:
    state = guarded(0, 1)
    state.begin(10.0)
    assert state.received(0, Held(4), 10.1) == []
    assert state.wake_at() == 11.0
    assert state.turn(10.99) == []
    assert told(state.turn(11.0)) == {0: Keep}
    assert state.wake_at() == 12.0
    assert told(state.turn(12.0)) == {0: Go, 1: Go}


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_another_one_keeps_it_when_the_first_cannot(how: str) -> None:
    state = guarded(0, 1)
    state.begin(10.0)
    state.received(0, Held(5), 10.0)
    assert told(state.received(1, Held(4), 10.0)) == {0: Keep}
    orders = state.received(0, Kept(None), 10.1) if how == "fails" else state.gone(0, 10.1)
    assert told(orders) == {1: Keep}
    assert told(state.received(1, Kept(4), 10.2)) == ({0: Go, 1: Go} if how == "fails" else {1: Go})


def test_the_last_that_could_be_waited_for_dies() -> None:
    state = guarded(0, 1)
    state.begin(10.0)
    state.received(0, Held(5), 10.0)
    assert told(state.gone(1, 10.1)) == {0: Keep}
    assert state.gone(0, 10.2) == []
    assert state.over


def test_a_broken_collective_begins_it_and_who_comes_late_goes_at_once() -> None:
    state = guarded(0, 1)
    assert told(state.received(1, Broken(), 10.0)) == {0: Hold, 1: Hold}
    assert state.begin(10.1) == [], "the generation's failure comes to be known meanwhile"
    assert state.received(0, Broken(), 10.1) == []
    state.received(0, Held(5), 10.2)
    state.received(1, Held(5), 10.2)
    state.received(0, Kept(5), 10.3)
    assert told(state.received(0, Broken(), 10.4)) == {0: Go}
    assert told(state.received(2, Guarding(7, 2), 10.4)) == {2: Go}
    assert state.begin(10.5) == []


@settings(max_examples=300, deadline=None)
@given(
    guards=st.integers(1, 4),
    happens=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.one_of(
                st.just("gone"),
                st.just(Broken()),
                st.builds(Held, st.none() | st.integers(3, 5)),
                st.builds(Kept, st.none() | st.integers(3, 5)),
            ),
            st.floats(0.0, 0.5),
        ),
        max_size=20,
    ),
)
@example(guards=1, happens=[(0, Held(3), 0.0), (0, Held(3), 0.0), (0, Kept(None), 0.0)])
def test_whatever_happens_it_ends_in_time_and_all_are_let_go(
    guards: int, happens: list[tuple[int, FromGuard | str, float]]
) -> None:
    state = guarded(*range(guards))
    alive, now = set(range(guards)), 0.0
    gone: set[int] = set()
    orders = state.begin(now)
    for local_rank, what, pause in happens:
        now += pause
        orders += state.turn(now)
        if what == "gone":
            alive.discard(local_rank)
            gone.add(local_rank)
            orders += state.gone(local_rank, now)
        elif local_rank in alive:
            orders += state.received(local_rank, what, now)  # type: ignore[arg-type]
        assert state.over or state.wake_at() is not None
    orders += state.turn(max(now, GRACE_S))
    assert state.over
    assert alive <= {local_rank for local_rank, message in orders if isinstance(message, Go)}
    keeps = [local_rank for local_rank, message in orders if isinstance(message, Keep)]
    assert len(keeps) == len(set(keeps)), "nobody is asked twice"
