"""The test for slow ranks: one that is slow is named soon, and none is named in an even job, whatever the jitter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace

import pytest

from elastic_agent.agent.main.loop import HEARTBEAT_S
from elastic_agent.agent.rendezvous_io.worker_links import PaceWatch, WorkerPages
from elastic_agent.health.stragglers import Paces, Watched
from elastic_agent.rendezvous.node.session import compared as compare
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    NodeRecord,
    Phase,
    World,
    assign_ranks,
)
from elastic_agent.worker.wire.shared_progress import KEPT_TIMES, OWN_COUNT, OWN_TIMES, STEP, STEPPED_AT

from .bench import Bench, Peer

SLOW = 1.4


def world_of(nodes: list[NodeRecord]) -> World:
    start = Cause(CauseKind.START)
    return World("job", 3, Phase.RUNNING, assign_ranks(tuple(nodes)), Endpoint("10.0.0.1", 29500), start)


def node(number: int, slots: int) -> NodeRecord:
    return NodeRecord(f"n{number}", f"life{number}", f"10.0.0.{number}", 29500, slots)


@dataclass
class Job:
    """A synchronous job whose ranks work for `own_s` in each step, with the jitter of real ones; each step of all ranks
    takes as long as the slowest one's, and `wait_s` for what they exchange."""

    seed: int
    own_s: float
    wait_s: float
    nodes: int = 2
    slots: int = 2
    jitter: float = 0.08
    rng: random.Random = field(init=False)
    now: float = field(init=False, default=100.0)
    step: int = field(init=False, default=0)
    watched: Watched = field(init=False, default_factory=Watched)
    reports: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.records = [node(number, self.slots) for number in range(self.nodes)]
        self.world = world_of(self.records)
        self.pages = [WorkerPages(3) for _ in self.records]
        for pages in self.pages:
            for local_rank in range(self.slots):
                pages.make(local_rank)
        self.watches = [PaceWatch(pages, 3, self.nodes) for pages in self.pages]
        self.turns_at = [self.now + self.rng.random() for _ in self.records]

    def work(self, rank: int) -> float:
        """Seconds: now and then something else keeps a rank busy for a step, and rank 0 saves a checkpoint."""
        busy = self.rng.choice((2.0, 5.0)) if self.rng.random() < 0.005 else 1.0
        saves = 3.0 if rank == 0 and self.step % 50 == 49 else 1.0
        return self.own_s * busy * saves * self.rng.lognormvariate(0.0, self.jitter)

    def train(self, steps: int, slow: dict[int, float] | None = None) -> frozenset[int]:
        """Who was named in these steps."""
        named: frozenset[int] = frozenset()
        for _ in range(steps):
            own = [self.work(rank) * (slow or {}).get(rank, 1.0) for rank in range(self.nodes * self.slots)]
            ends_at = self.now + max(own) + self.wait_s
            while (turn_at := min(self.turns_at)) < ends_at:
                named |= self.look(self.turns_at.index(turn_at), turn_at)
            self.now = ends_at
            self.step += 1
            for rank, own_s in enumerate(own):
                words = self.pages[rank // self.slots].by_rank[rank % self.slots].words
                count = words[OWN_COUNT]
                words[OWN_TIMES + count % KEPT_TIMES] = round(own_s * 1e9)
                words[STEPPED_AT], words[STEP], words[OWN_COUNT] = round(self.now * 1e9), self.step, count + 1
        return named

    def look(self, number: int, now: float) -> frozenset[int]:
        """One node's agent looks at its pages, and the coordinator reads what it reports."""
        paces = self.watches[number].turn(now)
        self.turns_at[number] = now + HEARTBEAT_S
        if paces is not None:
            self.reports += 1
            self.records[number] = replace(self.records[number], paces=paces)
            self.watched = compare(self.watched, self.world, self.records)
        return self.watched.named

    def steps_until(self, change: bool, slow: dict[int, float], rank: int, most: int) -> int:
        for step in range(1, most + 1):
            self.train(1, slow)
            if (rank in self.watched.named) is change:
                return step
        raise AssertionError(f"not within {most} steps: {self.watched}")

    def close(self) -> None:
        for pages in self.pages:
            pages.close()


@contextmanager
def job(seed: int, own_s: float, wait_s: float, **more: int | float) -> Iterator[Job]:
    with closing(Job(seed, own_s, wait_s, **more)) as made:  # type: ignore[arg-type]
        yield made


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_slowed_by_40_percent_is_named_within_20_steps(seed: int) -> None:
    for own_s, wait_s in ((0.8, 0.3), (4.0, 1.0)):
        with job(seed, own_s, wait_s) as one:
            rank = seed % 4
            assert one.train(60) == frozenset()
            one.steps_until(True, {rank: SLOW}, rank, 20)
            assert one.watched.named == {rank}
            assert one.watched.comparison is not None
            [straggler] = one.watched.comparison.stragglers
            assert (straggler.node, straggler.rank) == (f"n{rank // 2}", rank)


@pytest.mark.parametrize("seed", range(4))
def test_short_steps_take_20_seconds_instead(seed: int) -> None:
    with job(seed, 0.015, 0.005) as one:
        assert one.train(1000) == frozenset()
        before = one.now
        one.steps_until(True, {2: SLOW}, 2, 1000)
        assert one.now - before < 20.0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("own_s", "wait_s"), [(0.015, 0.005), (0.25, 0.05), (2.0, 0.5)])
@pytest.mark.parametrize(("nodes", "slots"), [(2, 1), (2, 2)])
def test_no_rank_is_named_in_10000_even_steps(
    seed: int, own_s: float, wait_s: float, nodes: int, slots: int
) -> None:
    with job(seed, own_s, wait_s, nodes=nodes, slots=slots) as one:
        assert one.train(10_000) == frozenset()


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_recovers_is_no_straggler_any_more(seed: int) -> None:
    with job(seed, 1.0, 0.2) as one:
        one.train(60)
        one.steps_until(True, {3: 2.0}, 3, 20)
        one.train(100, {3: 2.0})
        one.steps_until(False, {}, 3, 60)
        assert one.train(500) == frozenset()


def test_a_slow_burst_of_a_few_steps_names_no_rank() -> None:
    with job(1, 1.0, 0.2) as one:
        one.train(60)
        assert one.train(6, {1: 5.0}) | one.train(60) == frozenset()


def test_large_jobs_look_less_often() -> None:
    with ExitStack() as stack:
        pages = WorkerPages(3)
        stack.callback(pages.close)
        pages.make(0)
        watch = PaceWatch(pages, 3, members=400)
        words = pages.by_rank[0].words
        reported = []
        for second in range(200):
            for step in range(10):
                count = words[OWN_COUNT]
                words[OWN_TIMES + count % KEPT_TIMES] = 10**8
                words[STEPPED_AT], words[STEP] = round((second + step / 10) * 1e9) + 1, count
                words[OWN_COUNT] = count + 1
            if watch.turn(float(second)) is not None:
                reported.append(second)
        assert len(reported) <= 200 / 20


# ---------------------------------------------------------------- the function itself


def records(*own_us: tuple[int, ...], step_us: int = 300_000, timed: int = 10) -> list[NodeRecord]:
    return [
        replace(node(number, len(own)), paces=Paces(3, timed, step_us, own))
        for number, own in enumerate(own_us)
    ]


def judged(*own_us: tuple[int, ...], step_us: int = 300_000, reports: int = 30) -> Watched:
    watched = Watched()
    for report in range(1, reports + 1):
        nodes = records(*own_us, step_us=step_us, timed=10 * report)
        watched = compare(watched, world_of(nodes), nodes)
    return watched


def test_of_two_ranks_the_slow_one_is_named() -> None:
    assert judged((200_000,), (280_000,)).named == {1}


def test_ranks_that_differ_by_themselves_are_not_named() -> None:
    """Stages of a pipeline."""
    assert judged((100_000, 150_000), (200_000, 250_000)).named == frozenset()


def test_what_costs_the_job_next_to_nothing_is_no_matter() -> None:
    assert judged((1_000, 1_000), (1_000, 5_000)).named == frozenset()


def test_one_report_alone_names_no_rank_however_slow_it_is() -> None:
    assert judged((200_000,), (20_000_000,), reports=2).named == frozenset()


def test_half_of_the_ranks_must_be_known() -> None:
    nodes = records((200_000, 900_000), (200_000, 200_000), (200_000, 200_000))
    known = [nodes[0], *(replace(one, paces=None) for one in nodes[1:])]
    assert compare(Watched(), world_of(nodes), known).comparison is None


def test_paces_of_another_generation_or_another_node_do_not_count() -> None:
    nodes = records((200_000,), (280_000,))
    stranger = replace(nodes[1], incarnation="other")
    old = replace(nodes[1], paces=Paces(2, 10, 300_000, (280_000,)))
    wrong = replace(nodes[1], paces=Paces(3, 10, 300_000, (280_000, 1)))
    for other in (stranger, old, wrong):
        assert compare(Watched(), world_of(nodes), [nodes[0], other]).comparison is None


def test_a_world_that_does_not_train_has_no_stragglers() -> None:
    watched = judged((200_000,), (280_000,))
    nodes = records((200_000,), (280_000,))
    assert compare(watched, replace(world_of(nodes), phase=Phase.STOPPING), nodes) == Watched()
    assert compare(watched, replace(world_of(nodes), generation=4), nodes).named == frozenset()


# ---------------------------------------------------------------- from node to node


def pace(bench: Bench, peers: list[Peer], slow_us: int, report: int) -> None:
    for peer in (one for one in peers if one.generation):
        own_us = slow_us if peer is peers[1] else 200_000
        peer.part.workers_paced(Paces(peer.generation, 10 * report, 300_000, (200_000, own_us)))
    bench.settle()


def named(peer: Peer) -> list[tuple[str, int]]:
    peer.part.take_snapshot(0, "", 0.0)
    comparison = peer.part.snapshot.comparison
    return [(one.node, one.rank) for one in comparison.stragglers] if comparison is not None else []


def test_every_node_learns_who_is_slow() -> None:
    bench = Bench()
    peers = bench.joined("a", "b")
    world = bench.world()
    assert world is not None
    rank = next(member.first_rank + 1 for member in world.members if member.node == "b")
    for report in range(1, 11):
        pace(bench, peers, 200_000, report)
    assert [named(peer) for peer in peers] == [[], []]
    for report in range(11, 21):
        pace(bench, peers, 280_000, report)
    assert [named(peer) for peer in peers] == [[("b", rank)]] * 2


def test_a_report_is_one_write_and_a_comparison_travels_with_the_coordinator_s() -> None:
    """But for a change of who is named."""
    bench = Bench()
    peers = bench.joined("a", "b")
    pace(bench, peers, 200_000, 1)
    before = [len(peer.asked) for peer in peers]
    for report in range(2, 12):
        pace(bench, peers, 200_000, report)
    assert [len(peer.asked) - one for peer, one in zip(peers, before, strict=True)] == [10, 10]
