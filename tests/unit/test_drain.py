"""What a rank is told that asks at a step's end: every row of the rule, and a model of what must follow from it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from elastic_agent.rendezvous.node.drain import (
    Answer,
    Ask,
    Beyond,
    End,
    GoOn,
    concerns,
    judge,
    stranded,
    written,
)
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.node.transactions import WriteStop
from elastic_agent.rendezvous.records import (
    STOP_KEY,
    WORLD_KEY,
    Cause,
    CauseKind,
    Endpoint,
    NodeRecord,
    Phase,
    StopAt,
    World,
    assign_ranks,
)
from elastic_agent.rendezvous.store.interface import Compare, Entry

NODE = NodeRecord("a", "a-1", "host-a", 4001, slots=2)
RUNNING = World(
    "job", 4, Phase.RUNNING, assign_ranks((NODE,)), Endpoint("host-a", 4001), Cause(CauseKind.START)
)
DRAINING = replace(RUNNING, phase=Phase.DRAINING, cause=Cause(CauseKind.JOIN))
DRAINED = replace(DRAINING, phase=Phase.LAST_STEP)
PLAIN = replace(DRAINED, phase=Phase.STOPPING)
NEXT = replace(RUNNING, generation=5)
ZERO = Ask(4, rank=0, step=7)
OTHER = Ask(4, rank=3, step=7)
IN_EVALUATION = replace(ZERO, pausing=True)


def present(world: World | None) -> NodeSnapshot:
    return NodeSnapshot("a", "a-1", world=world, world_revision=30)


def stands(step: int, generation: int = 4, paused: bool = False) -> Entry:
    return Entry(STOP_KEY, StopAt(generation, step, paused).to_json(), 11, 22)


def write(step: int, revision: int = 0, paused: bool = False) -> WriteStop:
    return WriteStop(Compare(WORLD_KEY, 30), Compare(STOP_KEY, revision), StopAt(4, step, paused))


@pytest.mark.parametrize("world", [None, RUNNING, DRAINING, PLAIN, NEXT, replace(DRAINED, generation=3)])
def test_rank_0_goes_on_unasked_until_all_flags_are_up(world: World | None) -> None:
    assert not concerns(ZERO, present(world))
    assert concerns(ZERO, present(DRAINED))


@pytest.mark.parametrize(
    ("world", "asks"),
    [(None, True), (RUNNING, True), (DRAINING, True), (DRAINED, True), (PLAIN, True), (NEXT, False)],
)
def test_the_others_ask_whatever_their_node_has_heard(world: World | None, asks: bool) -> None:
    assert concerns(OTHER, present(world)) == asks


@pytest.mark.parametrize(
    ("ask", "world", "entry", "verdict"),
    [
        # the others: what stands counts, and only for their generation
        (OTHER, DRAINED, None, GoOn()),
        (OTHER, DRAINED, stands(7, generation=3), GoOn()),
        (OTHER, DRAINED, stands(8), GoOn()),
        (OTHER, DRAINED, stands(7), End(7)),
        (OTHER, RUNNING, stands(7), End(7)),
        (OTHER, DRAINED, stands(6), Beyond(6)),
        (replace(OTHER, pausing=True), DRAINED, None, GoOn()),
        (replace(OTHER, pausing=True), DRAINED, stands(7), End(7)),
        (OTHER, DRAINED, stands(7, paused=True), End(7, alone=True)),
        # rank 0 names the next step, over what a past generation left, and while the world waits for it
        (ZERO, DRAINED, None, write(8)),
        (ZERO, DRAINED, stands(99, generation=3), write(8, revision=22)),
        (ZERO, PLAIN, None, GoOn()),
        (ZERO, DRAINED, stands(8), GoOn()),
        (ZERO, DRAINED, stands(7), End(7)),
        (ZERO, DRAINED, stands(5), Beyond(5)),
        # and in evaluation the one that it has finished, also where it had named the next
        (IN_EVALUATION, DRAINED, None, write(7, paused=True)),
        (IN_EVALUATION, DRAINED, stands(8), write(7, revision=22, paused=True)),
        (IN_EVALUATION, PLAIN, stands(8), GoOn()),
        (IN_EVALUATION, DRAINED, stands(7, paused=True), End(7, alone=True)),
    ],
)
def test_what_an_asking_rank_is_told(
    ask: Ask, world: World, entry: Entry | None, verdict: Answer | WriteStop
) -> None:
    assert judge(ask, present(world), entry) == verdict


def test_once_it_is_written_rank_0_goes_on_to_that_step_or_ends() -> None:
    assert written(ZERO, write(8)) == GoOn()
    assert written(IN_EVALUATION, write(7, paused=True)) == End(7, alone=True)


@pytest.mark.parametrize(
    ("step", "stop", "waits"),
    [
        (None, StopAt(4, 7, True), False),
        (7, None, False),
        (6, StopAt(4, 7, True), False),
        (7, StopAt(4, 7), False),
        (7, StopAt(4, 7, True), True),
        (8, StopAt(4, 7, True), True),
        (7, StopAt(3, 7, True), False),
    ],
)
def test_who_waits_for_ranks_that_have_ended(step: int | None, stop: StopAt | None, waits: bool) -> None:
    assert stranded(step, stop, 4) == waits


def test_in_every_order_of_lockstep_all_end_at_the_same_step() -> None:
    """Three ranks, and at any moment one of those moves that may: enter the next step, finish it and ask.

    The world becomes drained before any of the moves. Ranks that are told to go on enter the next step, which nobody
    finishes before all have entered it.
    """
    for drained_at, order in itertools.product(range(8), itertools.product(range(3), repeat=6)):
        finished, entered, ended = [0, 0, 0], [1, 1, 1], [False, False, False]
        entry: Entry | None = None
        moves = iter(itertools.cycle(order))
        for turn in itertools.count():
            rank = next(moves)
            ready = [r for r in range(3) if not ended[r] and min(entered) > finished[r]]
            if not ready or turn > 60:
                break
            rank = rank if rank in ready else ready[0]
            finished[rank] += 1
            ask = Ask(4, rank, finished[rank])
            world = DRAINED if turn >= drained_at else DRAINING
            verdict: Answer | WriteStop = GoOn()
            if concerns(ask, present(world)):
                verdict = judge(ask, present(world), entry)
            if isinstance(verdict, WriteStop):
                entry = Entry(STOP_KEY, verdict.stop.to_json(), 1, 1)
                verdict = written(ask, verdict)
            assert not isinstance(verdict, Beyond)
            if isinstance(verdict, End):
                ended[rank] = True
            else:
                entered[rank] += 1
        assert all(ended), (drained_at, order)
        assert len(set(finished)) == 1, (drained_at, order)
