"""Which steps are new, which are lost, how long one takes: from looks now and then at the newest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.agent.observability.training_account import Counted, StepCount


def train(count: StepCount, *steps: int, at: float = 0.0) -> Counted:
    """What these looks, one a second, add in all."""
    counted = [count.done(step, at + second) for second, step in enumerate(steps)]
    return Counted(sum(each.new for each in counted), sum(each.lost for each in counted))


def begun(highest: int = 0) -> StepCount:
    count = StepCount()
    count.begin(highest)
    return count


def test_a_look_stands_for_all_steps_since_the_one_before() -> None:
    assert train(begun(), 1, 2, 9, 10) == Counted(new=10)


def test_steps_of_an_earlier_run_are_not_this_ones() -> None:
    count = begun()
    assert count.resumed(500) == Counted()
    assert train(count, 501, 502) == Counted(new=2)


def test_without_a_load_the_first_step_counts_for_itself() -> None:
    assert train(begun(), 501, 503) == Counted(new=3)


@pytest.mark.parametrize("says_so", [True, False], ids=["Checkpointer", "own checkpoints"])
def test_what_lies_between_the_checkpoint_and_the_last_step_is_lost_and_not_new_again(says_so: bool) -> None:
    count = begun()
    train(count, *range(1, 18))
    count.begin(17)
    lost = count.resumed(10).lost if says_so else 0
    counted = train(count, *range(11, 21))
    assert (lost + counted.lost, counted.new) == (7, 3)


def test_no_step_is_lost_where_the_checkpoint_is_newer_than_the_last_look() -> None:
    count = begun()
    train(count, 1, 8)
    assert count.saved(10) == Counted(new=2)
    count.begin(10)
    assert count.resumed(10) == Counted()
    assert train(count, 11) == Counted(new=1)


def test_steps_lost_twice_count_twice_and_those_never_redone_do_not() -> None:
    count = begun()
    train(count, *range(1, 18))
    count.begin(17)
    assert count.resumed(10) == Counted(lost=7)
    train(count, 11, 12, 13)
    count.begin(17)
    assert count.resumed(10) == Counted(lost=3)
    count.begin(17)
    assert count.resumed(10) == Counted()


def test_a_node_that_came_later_counts_what_is_new_to_the_job() -> None:
    count = begun(highest=17)
    assert count.resumed(10) == Counted()
    assert train(count, *range(11, 20)) == Counted(new=2)


@pytest.mark.parametrize(
    ("first", "then", "caught_up_at"),
    [
        pytest.param((11, 100.0), (20, 109.0), 101.0, id="in between"),
        pytest.param((11, 100.0), (12, 101.0), None, id="with the look"),
        pytest.param((12, 100.0), (20, 108.0), None, id="before"),
    ],
)
def test_the_instant_when_the_highest_step_was_done_again(
    first: tuple[int, float], then: tuple[int, float], caught_up_at: float | None
) -> None:
    count = begun(highest=12)
    count.resumed(10)
    assert count.done(*first).caught_up_at is None
    assert count.done(*then).caught_up_at == caught_up_at
    assert not count.catching_up


def test_it_is_catching_up_until_the_highest_step_is_done_again() -> None:
    count = begun(highest=12)
    count.resumed(10)
    assert count.catching_up
    count.done(11, 0.0)
    assert count.catching_up
    count.done(12, 1.0)
    assert not count.catching_up


def test_the_ranks_of_a_node_do_the_same_steps() -> None:
    count = begun()
    assert [count.done(step, 0.0).new for step in (1, 1, 3, 2, 3, 4)] == [1, 0, 2, 0, 0, 1]


def test_every_rank_reports_the_load_and_it_counts_once() -> None:
    count = begun()
    train(count, 1, 2, 3)
    count.begin(3)
    assert [count.resumed(1), count.resumed(1), count.done(2, 0.0)] == [
        Counted(lost=2),
        Counted(),
        Counted(new=0),
    ]


def test_each_step_but_the_first_takes_the_mean_since_the_look_before() -> None:
    count = begun()
    assert count.done(1, 10.0).timed == 0
    assert count.done(5, 12.0) == Counted(new=4, timed=4, mean_s=0.5)
    assert count.done(5, 12.5).timed == 0
    assert count.done(6, 13.0) == Counted(new=1, timed=1, mean_s=1.0)
    count.begin(6)
    assert count.done(7, 60.0).timed == 0


def test_saves_count_no_steps_where_none_is_done() -> None:
    count = begun()
    assert count.saved(100) == Counted()
    assert not count.stepped


@given(st.lists(st.lists(st.integers(1, 4), min_size=1), min_size=1), st.data())
def test_new_steps_add_up_to_the_highest_and_lost_ones_to_what_is_redone(
    generations: list[list[int]], data: st.DataObject
) -> None:
    """Each generation goes on from a step that was done; every so many of its steps are seen, always the first."""
    count = StepCount()
    new = lost = done = highest = 0
    redone = 0
    for strides in generations:
        count.begin(highest)
        start = data.draw(st.integers(0, done))
        redone += done - start
        lost += count.resumed(start).lost
        done = start
        for stride in (1, *strides):
            done += stride
            counted = count.done(done, 0.0)
            new, lost = new + counted.new, lost + counted.lost
        highest = max(highest, done)
        assert (new, lost) == (highest, redone)
        assert not count.catching_up or done < highest
