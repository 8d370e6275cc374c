"""A node joins with other options than the job's others: what it reports, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.rendezvous.messages import Limits, Program, Recheck, differences
from elastic_agent.rendezvous.node.deadlines import STANDSTILL_S
from elastic_agent.rendezvous.node.node_actions import Refusal
from elastic_agent.rendezvous.records import (
    Failure,
    Phase,
)

from .bench import POLICY, TTL_S, Bench, Peer

OURS = Program("train.py", "1" * 64, "aa", lease_ttl_s=5.0)
THEIRS = replace(OURS, digest="2" * 64)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("limits", "program", "said"),
    [
        (Limits(1, 4, 1.0, None), OURS, ()),
        (None, None, ()),
        (Limits(2, 4, 1.0, None), OURS, ("--min-nodes 2, where the job has 1",)),
        (
            Limits(1, 1, 2.5, 0),
            OURS,
            (
                "--max-nodes 1, where the job has 4",
                "--max-restarts 0, where the job has auto",
            ),
        ),
        (
            Limits(1, 4, 1.0, None),
            replace(OURS, arguments="bb"),
            ("other arguments for the script",),
        ),
        (Limits(1, 4, 1.0, None), replace(OURS, lease_ttl_s=9.0), ("--lease-ttl 9s, where the job has 5s",)),
        (Limits(1, 4, 1.0, None), THEIRS, ("another script, train.py (222222222222 for 111111111111)",)),
        (Limits(1, 4, 1.0, None), replace(THEIRS, digest=""), ()),
    ],
)
def test_every_difference_is_named(
    limits: Limits | None, program: Program | None, said: tuple[str, ...]
) -> None:
    assert tuple(differences(limits, program, Limits(1, 4, 1.0, None), OURS)) == said


def test_a_node_with_another_script_leaves_before_it_is_in_any_world(bench: Bench) -> None:
    bench.join("a", program=OURS)
    bench.join("b", program=OURS)
    bench.settle()
    stranger = bench.join("c", program=THEIRS)
    bench.settle()
    world = bench.world()
    assert world is not None
    assert (world.generation, len(world.members)) == (1, 2)
    refusal = stranger.left()
    assert refusal.why is Refusal.UNLIKE_THE_JOB
    assert "the job runs train.py (111111111111) as node a does" in refusal.reason


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (replace(OURS, lease_ttl_s=9.0), "--lease-ttl 9s, where the job has 5s, as node a was started"),
        (
            replace(OURS, outage_grace_s=60.0),
            "--store-outage-grace 60s, where the job has 0s",
        ),
    ],
)
def test_a_node_that_judges_by_other_times_leaves_before_it_is_in_any_world(
    bench: Bench, odd: Program, said: str
) -> None:
    """Of one with a longer lease its peers would say that it has lost the store (`liveness`)."""
    bench.join("a", program=OURS)
    bench.join("b", program=OURS)
    bench.settle()
    stranger = bench.join("c", program=odd)
    bench.settle()
    assert bench.members() == ["a", "b"]
    refusal = stranger.left()
    assert refusal.why is Refusal.UNLIKE_THE_JOB
    assert said in refusal.reason


def test_a_coordinator_with_other_limits_says_so_and_does_not_apply_them(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
    odd = bench.join("c", replace(POLICY, min_nodes=1, max_nodes=1))
    bench.settle()
    assert odd.part.differs_from_job == (
        "--min-nodes 1, where the job has 2",
        "--max-nodes 1, where the job has 3",
    )
    assert b.part.differs_from_job == ()
    # The others lose their leases, and join again: their records are younger than its.
    for name in ("a", "b"):
        bench.delete(f"nodes/{name}")
    bench.settle()
    assert odd.snapshot.coordinates
    world = bench.world()
    assert world is not None
    assert {member.node for member in world.members} == {"a", "b", "c"}
    assert (world.limits, world.limits_of) == (Limits(2, 3, 0.0, None), "a")


def excluded(bench: Bench) -> Peer:
    """The third of three, whose workers have failed twice."""
    bench.joined("a", "b")
    bad = bench.join("c")
    bench.settle()
    for generation in (2, 3):
        bad.part.workers_failed(Failure(generation, "crash", "rank 4 lacks a package"))
        bench.settle()
    world = bench.world()
    assert world is not None
    assert (world.generation, [member.node for member in world.members]) == (4, ["a", "b"])
    return bad


def test_an_excluded_node_comes_back_when_it_has_passed_its_check_after_the_cool_down(bench: Bench) -> None:
    bad = excluded(bench)
    for times in (1, 2):
        assert not bad.part.recheck_due(bench.now)
        cool_down_s = times * POLICY.cool_down_s
        assert bad.part.wake_at(bench.now) is not None
        bench.after(cool_down_s - 1.0)
        assert not bad.part.recheck_due(bench.now)
        bench.after(1.0)
        assert bad.part.recheck_due(bench.now)
        bad.part.recheck_begins()
        assert not bad.part.recheck_due(bench.now)
        bad.part.rechecked(bench.now, passed=False, summary="/dev/shm is full")
        bench.settle()
        bad.part.request(bench.now)
        assert bad.part.waiting_for.endswith("Its last check failed: /dev/shm is full")
        bench.after(2 * cool_down_s - 1.0)
        assert not bad.part.recheck_due(bench.now), "each failed check doubles it"
        bench.after(1.0)
        assert bad.part.recheck_due(bench.now)
        bad.part.recheck_begins()
        assert bench.members() == ["a", "b"]
        bad.part.rechecked(bench.now, passed=True, summary="")
        bench.settle()
        assert bench.members() == ["a", "b", "c"]
        world = bench.world()
        assert world is not None
        assert [(one.node, one.times, one.readmitted) for one in world.exclusions] == [("c", times, True)]
        for _ in range(2):
            assert bad.part.world is not None
            bad.part.workers_failed(Failure(bad.part.world.generation, "crash", "rank 4 lacks a package"))
            bench.settle()
        assert bench.members() == ["a", "b"]


def test_a_restarted_agent_of_an_excluded_node_checks_it_at_once(bench: Bench) -> None:
    bad = excluded(bench)
    bench.kill(bad)
    bench.after(2 * TTL_S)
    again = bench.join("c", life=2)
    bench.settle()
    assert bench.members() == ["a", "b"], "it has not been checked"
    assert again.part.recheck_due(bench.now)
    again.part.recheck_begins()
    again.part.rechecked(bench.now, passed=True, summary="")
    bench.settle()
    assert bench.members() == ["a", "b", "c"]


def test_a_node_that_joins_anew_keeps_its_cool_down_and_what_it_found(bench: Bench) -> None:
    bad = excluded(bench)
    bench.after(50.0)
    bench.delete("nodes/c")
    bench.settle()
    assert bad.part.incarnation == "c-1.1"
    assert not bad.part.recheck_due(bench.now)
    bench.after(10.0)
    assert bad.part.recheck_due(bench.now)
    bad.part.recheck_begins()
    bad.part.rechecked(bench.now, passed=False, summary="the disk is full")
    bench.delete("nodes/c")
    bench.settle()
    assert bad.record is not None
    assert bad.record.recheck == Recheck(1, False, "the disk is full")
    assert not bad.part.recheck_due(bench.now)


def test_a_job_that_stands_still_waits_for_no_cool_down(bench: Bench) -> None:
    bad = excluded(bench)
    (lost,) = (peer for peer in bench.peers if peer.name == "b")
    bench.kill(lost)
    bench.after(TTL_S + STANDSTILL_S - 2.0)
    assert bench.phase() is Phase.STOPPING
    assert not bad.part.recheck_due(bench.now)
    bench.after(4.0)
    assert bad.part.recheck_due(bench.now)
    bad.part.recheck_begins()
    bad.part.rechecked(bench.now, passed=True, summary="")
    bench.settle()
    assert bench.members() == ["a", "c"]
