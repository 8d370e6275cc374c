"""A node that its own checks keep out of the job takes no lease, and ends with the job or after the join timeout."""

from __future__ import annotations

import pytest

from elastic_agent.rendezvous.node.node_actions import Refusal, Stay
from elastic_agent.rendezvous.records import WORLD_KEY, Condition, Phase, Result
from elastic_agent.rendezvous.store.interface import Grant, Read

from .bench import ALONE, POLICY, TICK_S, Bench, Peer

UNFIT = "gpu-ecc: 3 errors"
LOOK = Read((WORLD_KEY,))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def _held(bench: Bench, name: str = "b", *, hosts_store: bool = False) -> Peer:
    peer = bench.join(name, ALONE, held_back="the checks", hosts_store=hosts_store)
    bench.settle()
    return peer


def test_it_asks_the_store_for_nothing_until_it_may_join(bench: Bench) -> None:
    b = _held(bench)
    bench.after(5.0)
    assert b.asked == []
    assert b.part.held_back == b.part.waiting_for == "the checks"
    b.part.hold_back("")
    bench.settle()
    assert b.generation == 1
    assert b.part.held_back == ""


def test_it_looks_at_the_world_once_after_each_reason(bench: Bench) -> None:
    b = _held(bench)
    for count in (1, 2):
        b.part.hold_back(UNFIT)
        bench.after(3.0)
        assert b.asked == [LOOK] * count
    assert b.part.waiting_for == UNFIT
    assert b.order == Stay()


def test_a_job_trains_without_it_and_takes_it_in_when_it_is_fit(bench: Bench) -> None:
    b = _held(bench)
    bench.joined("a", policy=ALONE)
    b.part.hold_back(UNFIT)
    bench.after(3.0)
    assert bench.members() == ["a"]
    b.part.hold_back("")
    bench.after(3.0)
    assert bench.members() == ["a", "b"]


def test_it_gives_up_after_the_join_timeout(bench: Bench) -> None:
    b = _held(bench)
    b.part.hold_back(UNFIT)
    bench.after(POLICY.join_timeout_s - TICK_S)
    assert b.order == Stay()
    bench.after(TICK_S)
    assert b.left().why is Refusal.UNFIT
    assert b.left().reason == f"no world within 60 s of --join-timeout: {UNFIT}"


def test_it_ends_with_the_job(bench: Bench) -> None:
    b = _held(bench)
    (a,) = bench.joined("a", policy=ALONE)
    b.part.hold_back(UNFIT)
    bench.settle()
    a.part.workers_are(Condition.SUCCEEDED, 1)
    bench.settle()
    assert bench.phase() is Phase.ENDED
    assert b.order == Stay()
    b.part.hold_back(UNFIT)
    bench.settle()
    assert b.left().why is Result.SUCCEEDED


def test_a_job_that_had_ended_before_does_not_end_it(bench: Bench) -> None:
    """It may be here to run it again."""
    (a,) = bench.joined("a", policy=ALONE)
    a.part.workers_are(Condition.SUCCEEDED, 1)
    bench.settle()
    bench.kill(a)
    b = _held(bench)
    for _ in range(3):
        b.part.hold_back(UNFIT)
        bench.settle()
        assert b.order == Stay()


def test_a_host_of_the_store_stays_for_those_who_train(bench: Bench) -> None:
    b = _held(bench, hosts_store=True)
    (a,) = bench.joined("a", policy=ALONE)
    b.part.hold_back(UNFIT)
    bench.after(POLICY.join_timeout_s * 2)
    assert b.order == Stay()
    a.part.workers_are(Condition.SUCCEEDED, 1)
    bench.settle()
    b.part.hold_back(UNFIT)
    bench.settle()
    assert b.left().why is Result.SUCCEEDED


def test_it_is_checked_again_before_it_joins_anew(bench: Bench) -> None:
    b = _held(bench)
    b.part.hold_back("")
    bench.settle()
    assert b.generation == 1
    bench.kv.revoke(b.part.lease or 0)
    bench.settle()
    assert b.part.incarnation == "b-1.1"
    assert b.part.held_back == "the checks"
    assert b.count(Grant) == 1
    b.part.hold_back("")
    bench.after(TICK_S)
    assert b.count(Grant) == 2
    assert bench.members() == ["b"]
