"""One node's part in the rendezvous (see `bench`): joining, coordinating, stopping, leaving, and what may break."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest

from elastic_agent.rendezvous.coordinator.restarts import RestartPolicy
from elastic_agent.rendezvous.coordinator.view import Policy, Publish
from elastic_agent.rendezvous.errors import LeaseExpired, StoreMismatch, StoreUnavailable
from elastic_agent.rendezvous.liveness import LEASE_MARGIN
from elastic_agent.rendezvous.node.deadlines import LEAVE_TOGETHER_S, LINGER_S
from elastic_agent.rendezvous.node.node_actions import Action, Drain, Leave, Refusal, Start, Stay, Stop
from elastic_agent.rendezvous.node.participant import DUPLICATE_TTLS, Participant
from elastic_agent.rendezvous.node.transactions import RetryPolicy, WriteRecord, WriteWorld
from elastic_agent.rendezvous.records import (
    MAX_SEEN,
    NODES_PREFIX,
    SCHEMA,
    WORLD_KEY,
    CauseKind,
    Condition,
    Failure,
    GenerationProgress,
    NodeRecord,
    Phase,
    Result,
    World,
    node_key,
)
from elastic_agent.rendezvous.store.interface import Change, Grant, Outcome, Read, Request

from .bench import ALONE, POLICY, TICK_S, TTL_S, Bench, Peer

UNCONFIRMED = "the rendezvous store does not confirm this node's lease"
WORLD_LOST = "the rendezvous store has lost the world that runs here"
ASKED = "this node was asked to stop"
B_LEAVES = "node b was asked to stop"
CRASH = Failure(1, "crash", "rank 2 raised ValueError")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def world_of(bench: Bench) -> World:
    world = bench.world()
    assert world is not None
    return world


def record_of(peer: Peer) -> NodeRecord:
    assert peer.record is not None
    return peer.record


def ask(part: Participant, now: float) -> Request:
    request = part.request(now)
    assert request is not None
    return request


def gone(bench: Bench, *peers: Peer) -> None:
    """Their agents have ended, and their leases with them."""
    for peer in peers:
        bench.kv.revoke(peer.part.lease or 0)
        bench.kill(peer)


# ---------------------------------------------------------------- joining

JOINING_B = Read((WORLD_KEY, "nodes/b"), oldest_under=NODES_PREFIX)


def test_nodes_meet_by_one_write_each_and_the_oldest_coordinates(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    world = world_of(bench)
    assert (world.generation, world.phase, bench.members()) == (1, Phase.RUNNING, ["a", "b"])
    assert [a.orders, b.orders] == [[Start(world, member)] for member in world.members]
    assert (world.master.address, world.master.port) == ("host-a", 1000)
    assert (a.snapshot.coordinates, b.snapshot.coordinates) == (True, False)
    assert [node.node for node in a.snapshot.known_nodes] == ["a", "b"]
    assert a.part.subscription is not None
    assert b.part.subscription is not None
    assert a.part.subscription.scopes == (WORLD_KEY, NODES_PREFIX)
    assert b.part.subscription.scopes == (WORLD_KEY, "nodes/a", "nodes/b")
    assert b.count(WriteWorld) == 0
    assert [request for request in b.asked if isinstance(request, Read)] == [JOINING_B]
    for peer in (a, b):
        entry = bench.entry(node_key(peer.name))
        assert entry is not None
        assert entry.create_revision == entry.mod_revision
        assert peer.count(WriteRecord) == peer.count(Grant) == 1


def test_one_question_at_a_time_and_late_answers_do_nothing(bench: Bench) -> None:
    part = bench.join("a").part
    first = ask(part, bench.now)
    assert part.request(bench.now + 3600) is None
    part.failed(first, StoreUnavailable("timeout"), bench.now)
    second = ask(part, bench.now)
    assert isinstance(second, Grant)
    part.answered(first, 77, bench.now)
    part.failed(first, LeaseExpired("late"), bench.now)
    assert part.lease is None
    assert part.request(bench.now) is None, "the second question is still open"
    part.answered(second, 78, bench.now)
    assert part.lease == 78


def test_a_spare_stands_by_without_a_join_timeout_and_takes_a_free_place(bench: Bench) -> None:
    policy = replace(POLICY, max_nodes=2)
    _, b = bench.joined("a", "b", policy=policy)
    spare = bench.join("spare", policy)
    bench.after(policy.join_timeout_s * 2)
    assert spare.orders == []
    assert spare.part.waiting_for == (
        "generation 1 runs without this node, which stands by: the world has all 2 nodes of --max-nodes; a coordinates"
    )
    bench.kill(b)
    bench.after(TTL_S + 1)
    assert (bench.members(), spare.generation) == (["a", "spare"], 2)


# ---------------------------------------------------------------- lost replies and refused writes


def test_a_write_with_a_lost_reply_is_read_back_not_repeated(bench: Bench) -> None:
    a = bench.join("a", ALONE)
    a.replies_to_lose = [WriteRecord]
    bench.settle()
    assert Read(("nodes/a",)) in a.asked
    assert (a.count(WriteRecord), a.generation) == (1, 1)


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("what", ["replaced", "deleted", "deleted, and it writes"])
def test_a_record_that_is_no_more_ours_means_that_the_lease_is_gone(
    bench: Bench, victim: str, what: str
) -> None:
    a, b = bench.joined("a", "b")
    peer = a if victim == "a" else b
    if what == "replaced":
        bench.put(node_key(victim), NodeRecord(victim, f"{victim}-9", "elsewhere", 1, 1).to_json())
    else:
        bench.delete(node_key(victim))
    if what != "deleted":
        peer.part.workers_are(Condition.STABLE, 1)
    bench.settle()
    assert peer.stops()[0] == Stop(1, False, UNCONFIRMED)
    assert peer.part.incarnation == f"{victim}-1.1"
    if what == "replaced":
        assert peer.generation == 0, "the other has its name"
    else:
        assert record_of(peer).incarnation == f"{victim}-1.1"
        assert {one.generation for one in (a, b)} == {2}


def test_who_has_known_the_highest_generation_joins_again_with_a_record_that_others_read(
    bench: Bench,
) -> None:
    a, _ = bench.joined("a", "b")
    bench.put(WORLD_KEY, replace(world_of(bench), generation=MAX_SEEN + 1).to_json())
    bench.settle()
    bench.delete(node_key("a"))
    bench.settle()
    assert (record_of(a).incarnation, record_of(a).seen) == ("a-1.1", MAX_SEEN)


def test_unanswered_requests_are_repeated_after_a_growing_random_wait() -> None:
    retry, rng = RetryPolicy(first_wait_s=0.1, max_wait_s=1.0), random.Random(0)
    for attempt, longest in enumerate([0.1, 0.2, 0.4, 0.8, 1.0, 1.0]):
        waits = [retry.wait_s(attempt, rng) for _ in range(200)]
        assert 0.9 * longest < max(waits) <= longest
        assert 0 <= min(waits) < 0.1 * longest
    assert retry.wait_s(10**9, rng) <= 1.0


def test_after_a_failed_request_nothing_is_asked_until_the_wait_is_over() -> None:
    identity = NodeRecord("a", "a-1", "host-a", 1, 1)
    retry = RetryPolicy(0.1, 60.0)
    part = Participant(identity, POLICY, lease_ttl_s=TTL_S, rng=random.Random(1), now=0.0, retry=retry)

    def fail(now: float) -> float:
        part.failed(ask(part, now), StoreUnavailable("down"), now)
        wake_at = part.wake_at(now)
        assert wake_at is not None
        assert part.request((now + wake_at) / 2) is None
        return wake_at

    woken = [0.0]
    for _ in range(10):
        woken.append(fail(woken[-1]))
    assert woken[10] - woken[5] > woken[5] - woken[0]
    now = woken[-1]
    part.answered(ask(part, now), Bench().kv.grant(TTL_S, now), now)
    assert fail(now) <= now + 0.1, "an answer starts the waits again"


# ---------------------------------------------------------------- leases


def test_workers_stop_before_the_lease_can_be_given_away(bench: Bench) -> None:
    a, _ = bench.joined("a", "b")
    a.obedient = False
    a.part.lease_confirmed(a.part.lease or 0, bench.now)
    good_until = bench.now + LEASE_MARGIN * TTL_S
    assert a.part.wake_at(bench.now) == good_until
    assert a.part.action(good_until - 0.01) == Stay()
    assert a.part.action(good_until) == Stop(1, False, UNCONFIRMED)


def test_a_lease_counts_from_when_it_was_asked_for(bench: Bench) -> None:
    part = bench.join("a").part
    bench.now += 10
    part.answered(ask(part, bench.now), 1, bench.now + 2)
    for asked_at in (bench.now, bench.now + 2):
        assert part.lease_good(asked_at + LEASE_MARGIN * TTL_S - 0.01)
        assert not part.lease_good(asked_at + LEASE_MARGIN * TTL_S)
        for lease, confirmed in ((1, bench.now + 2), (1, bench.now + 1), (2, bench.now + 9)):
            part.lease_confirmed(lease, confirmed)


def test_a_node_whose_lease_has_no_end_goes_on_after_it_stood_still() -> None:
    bench = Bench(lease_ttl_s=math.inf)
    (a,) = bench.joined("a", policy=ALONE)
    bench.now += 3600.0
    assert a.order == Stay(), "before any other thread has confirmed the lease"
    bench.after(1.0)
    assert (a.generation, a.stops()) == (1, [])
    assert a.part.good_until(bench.now) == math.inf


@pytest.mark.parametrize(("victim", "others"), [("a", ["c", "b"]), ("b", ["a", "c"])])
def test_a_node_that_was_cut_off_comes_back_as_a_new_incarnation_with_a_fresh_port(
    bench: Bench, victim: str, others: list[str]
) -> None:
    peers = bench.joined("a", "b", "c")
    lost = next(peer for peer in peers if peer.name == victim)
    old_port = lost.ports
    lost.connected = False
    bench.after(TTL_S + 1)
    assert (lost.generation, bench.members()) == (0, others)
    lost.connected = True
    bench.after(1)
    assert (record_of(lost).incarnation, record_of(lost).generation) == (f"{victim}-1.1", 0)
    assert record_of(lost).port > old_port
    assert bench.members() == [*others, victim]
    assert {peer.generation for peer in peers} == {lost.generation}


@pytest.mark.parametrize("told", ["by its keep-alive", "by a write"])
def test_no_new_lease_is_asked_for_while_workers_are_alive(bench: Bench, told: str) -> None:
    a, b = bench.joined("a", "b")
    b.obedient = False
    bench.kv.revoke(b.part.lease or 0)
    if told == "by a write":
        b.part.workers_are(Condition.STABLE, 1)
        b.part.failed(ask(b.part, bench.now), LeaseExpired("gone"), bench.now)
    b.part.lease_gone(b.part.lease)
    assert b.part.lease is None
    grants = b.count(Grant)
    bench.settle()
    assert (b.count(Grant), b.part.incarnation, b.order) == (grants, "b-1", Stop(1, False, UNCONFIRMED))
    b.part.workers_gone(1)
    b.obedient = True
    bench.settle()
    assert (b.count(Grant), b.part.incarnation) == (grants + 1, "b-1.1")
    assert (a.generation, b.generation) == (2, 2)


def test_a_lost_lease_of_a_node_without_workers_only_means_to_join_again(bench: Bench) -> None:
    a = bench.join("a")
    bench.settle()
    bench.kv.revoke(a.part.lease or 0)
    a.part.lease_gone(99)
    assert a.part.incarnation == "a-1", "that was not our lease"
    a.part.lease_gone(a.part.lease)
    bench.settle()
    assert (record_of(a).incarnation, a.orders) == ("a-1.1", [])
    a.part.lease_gone(a.part.lease)
    assert a.part.incarnation == "a-1.2"


def test_joining_again_waits_for_no_answer_to_an_old_question(bench: Bench) -> None:
    part = bench.join("a").part
    part.answered(ask(part, bench.now), 1, bench.now)
    open_question = ask(part, bench.now)
    assert isinstance(open_question, WriteRecord)
    part.lease_gone(1)
    part.offer_port(2)
    assert isinstance(part.request(bench.now), Grant)
    part.answered(open_question, Outcome(True, 9, (None,)), bench.now)
    assert part.request(bench.now) is None, "the grant is still open"


# ---------------------------------------------------------------- the coordinator


def test_when_the_leader_vanishes_the_next_oldest_takes_over_and_reads_about_all(bench: Bench) -> None:
    a, b, c = bench.joined("a", "b", "c")
    asked = len(b.asked)
    bench.kill(a)
    bench.after(TTL_S + 1)
    assert (b.snapshot.coordinates, c.snapshot.coordinates) == (True, False)
    assert [node.node for node in b.snapshot.known_nodes] == ["b", "c"]
    assert [request for request in b.asked[asked:] if isinstance(request, Read)] == [
        JOINING_B,
        Read((WORLD_KEY, NODES_PREFIX)),
    ]
    assert bench.members() == ["c", "b"], "b keeps its place"
    assert b.stops()[-1] == c.stops()[-1] == Stop(2, False, "node a is gone: its lease ended")
    world = world_of(bench)
    assert (world.master.address, world.cause.kind) == ("host-c", CauseKind.LOST)


def test_only_a_younger_record_makes_a_node_look_for_the_leader(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    asked = len(b.asked)
    a.part.workers_are(Condition.STABLE, 1)
    bench.settle()
    assert record_of(a).has(Condition.STABLE, 1)
    assert len(b.asked) == asked, "it stays the leader: nothing has to be found or read again"
    entry = bench.entry("nodes/a")
    assert entry is not None
    younger = replace(entry, create_revision=98, mod_revision=98)
    b.part.changed((Change(98, "nodes/a", younger),), bench.now)
    assert b.part.request(bench.now) == JOINING_B


def test_the_last_call_ends_on_time_whatever_the_newcomers_write(bench: Bench) -> None:
    policy = replace(POLICY, last_call_s=2.0)
    a, b = bench.join("a", policy), bench.join("b", policy)
    bench.settle()
    assert a.part.waiting_for.startswith("last call")
    assert a.part.wake_at(bench.now) == bench.now + 2
    bench.after(1)
    b.part.offer_port(4999)
    bench.after(0.75)
    assert record_of(b).port == 4999
    assert (a.generation, b.generation) == (0, 0)
    bench.after(0.25)
    assert (a.generation, b.generation) == (1, 1)


def test_the_back_off_counts_from_the_stop(bench: Bench) -> None:
    policy = replace(POLICY, restarts=RestartPolicy(first_backoff_s=8.0))
    a, b = bench.joined("a", "b", policy=policy)
    bench.after(100)
    b.part.workers_failed(CRASH)
    bench.settle()
    assert (a.generation, b.generation) == (2, 2), "the first try comes at once"
    b.part.workers_failed(replace(CRASH, generation=2))
    bench.after(4 - TICK_S)
    assert a.part.waiting_for.startswith("backing off")
    assert 4.0 <= a.part.backoff_s <= 8.0
    assert (a.generation, b.generation) == (0, 0)
    bench.after(4 + TICK_S)
    assert (a.generation, b.generation) == (3, 3)


def test_no_world_is_written_that_no_transition_leads_to(bench: Bench) -> None:
    a, _ = bench.joined("a", "b")
    world = replace(world_of(bench), phase=Phase.LAST_STEP)
    a.part._decide = lambda view, policy, now: Publish(world, "not announced")
    with pytest.raises(AssertionError, match=r"no world goes from Phase\.RUNNING to Phase\.LAST_STEP"):
        bench.settle()


# ---------------------------------------------------------------- who may not take part


def test_a_second_agent_of_the_same_name_is_refused_when_the_first_lives(bench: Bench) -> None:
    first, _ = bench.joined("a", "b")
    second = bench.join("a", life=2)
    bench.after(DUPLICATE_TTLS * TTL_S - TICK_S)
    assert second.orders == []
    bench.after(1)
    refusal = second.left()
    assert refusal.why is Refusal.DUPLICATE_NODE
    assert re.search("already called 'a'.*--node-id", refusal.reason)
    assert (first.generation, first.stops()) == (1, [])


def test_an_agent_waits_for_its_own_earlier_life_to_be_forgotten_the_whole_time_at_each_join(
    bench: Bench,
) -> None:
    a, b = bench.joined("a", "b")
    bench.kill(b)
    again = bench.join("b", life=2)
    bench.settle()
    assert again.part.waiting_for.startswith("another agent is registered as 'b': if it runs, ")
    bench.after(DUPLICATE_TTLS * TTL_S * 2)
    assert (record_of(again).incarnation, a.generation, again.generation) == ("b-2", 2, 2)
    bench.put("nodes/b", NodeRecord("b", "b-9", "elsewhere", 1, 1).to_json())
    again.part.workers_are(Condition.STABLE, 2)
    bench.after(DUPLICATE_TTLS * TTL_S - 1)
    assert again.order == Stay()
    bench.delete("nodes/b")
    bench.after(1)
    assert record_of(again).incarnation == "b-2.1"


def mismatch(peer: Peer) -> str:
    refusal = peer.left()
    assert refusal.why is Refusal.STORE_MISMATCH
    return refusal.reason


@pytest.mark.parametrize("version", [SCHEMA - 1, SCHEMA + 1])
def test_agents_of_two_versions_refuse_each_other_by_name(bench: Bench, version: int) -> None:
    """The newcomer of a mixed pair leaves, whichever version it has, and the job goes on without it."""
    a, b = bench.joined("a", "b")

    def of_version(key: str) -> str:
        (entry,) = bench.kv.read((key,), bench.now).entries
        return entry.value.replace(f'"v":{SCHEMA}', f'"v":{version}', 1)

    bench.put("nodes/z", of_version("nodes/a").replace('"a"', '"z"'))
    bench.settle()
    assert [node.node for node in a.snapshot.known_nodes] == ["a", "b"]
    assert a.stops() == []
    world, leader = of_version(WORLD_KEY), of_version("nodes/a")
    gone(bench, a, b)
    newcomer = bench.join("c")
    bench.put("nodes/a", leader)
    bench.put(WORLD_KEY, world)
    bench.settle()
    assert f"text of version {version}, this process reads {SCHEMA}" in mismatch(newcomer)


def test_another_jobs_store_in_the_place_of_ours_is_refused_and_the_workers_end(bench: Bench) -> None:
    """Whether an answer to a request says so, or another of the threads at the store."""
    a, b = bench.joined("a", "b")
    error = StoreMismatch("it is that of job 'other'")
    a.part.workers_are(Condition.STABLE, 1)
    a.part.failed(ask(a.part, bench.now), error, bench.now)
    b.part.store_mismatched(str(error))
    for peer in (a, b):
        assert peer.part.action(bench.now) == Stop(1, False, str(error))
        assert peer.part.request(bench.now) is None
        peer.part.workers_gone(1)
        assert mismatch(peer) == str(error)
    stranger = bench.join("c", replace(POLICY, job="other"))
    bench.settle()
    assert re.search("holds job 'job', not 'other'.*--rdzv-id", mismatch(stranger))


@pytest.mark.parametrize("garbage", ["", "{}", "[1]"])
def test_a_world_that_cannot_be_read_is_refused_and_stops_the_workers_first(
    bench: Bench, garbage: str
) -> None:
    a, b = bench.joined("a", "b")
    b.obedient = False
    bench.put(WORLD_KEY, garbage)
    bench.put(WORLD_KEY, "later garbage")
    bench.settle()
    stop = b.order
    assert isinstance(stop, Stop)
    assert (stop.generation, stop.planned) == (1, False)
    assert "'world'" in stop.reason
    b.part.workers_gone(1)
    assert mismatch(b) == mismatch(a) == stop.reason, "only the first refusal counts"
    assert a.part.request(bench.now) is None, "nothing is written by a node that was refused"


@pytest.mark.parametrize("garbage", ["", "garbage", '{"v": 2}', NodeRecord("x", "x-1", "", 1, 1).to_json()])
def test_a_node_record_that_cannot_be_read_is_passed_over_and_one_that_became_so_is_gone(
    bench: Bench, garbage: str
) -> None:
    a, b = bench.joined("a", "b")
    bench.put("nodes/c", garbage)
    bench.settle()
    assert [node.node for node in a.snapshot.known_nodes] == ["a", "b"]
    assert (a.stops(), b.stops()) == ([], [])
    bench.put("nodes/b", garbage)
    bench.settle()
    assert a.stops()[-1].reason == "node b is gone: its lease ended"


@pytest.mark.parametrize("key", ["nodes/junk", "nodes/a"], ids=["the oldest's", "ours"])
def test_garbage_under_a_key_that_matters_is_refused(bench: Bench, key: str) -> None:
    bench.put(key, "garbage")
    a = bench.join("a")
    bench.settle()
    assert repr(key) in mismatch(a)


# ---------------------------------------------------------------- failures, success, steps


def test_a_failure_restarts_everybody_and_a_node_names_the_one_that_its_others_follow_from(
    bench: Bench,
) -> None:
    a, b = bench.joined("a", "b")
    b.part.workers_advanced(5)
    for failure in (replace(CRASH, collateral=True), CRASH, replace(CRASH, summary="late")):
        b.part.workers_failed(failure)
    bench.settle()
    assert a.stops() == b.stops() == [Stop(1, False, CRASH.summary)]
    world = world_of(bench)
    assert (world.generation, world.cause.failure, world.step) == (2, CRASH, 5)
    assert (world.restarts.failures, world.restarts.without_progress) == (1, 0)
    assert (a.generation, b.generation) == (2, 2)
    b.part.workers_failed(replace(CRASH, generation=2, summary="crash of 2"))
    bench.settle()
    assert b.stops()[-1].reason == "crash of 2"


def test_steps_alone_are_not_written(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
    writes = b.count(WriteRecord)
    b.part.workers_advanced(5)
    b.part.workers_advanced(4)
    bench.settle()
    assert b.count(WriteRecord) == writes
    b.part.workers_are(Condition.STABLE, 1)
    bench.settle()
    assert b.count(WriteRecord) == writes + 1
    assert (record_of(b).step, record_of(b).has(Condition.STABLE, 1)) == (5, True)


def test_a_failure_tells_how_far_its_generation_had_come_and_no_other(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
    b.part.workers_load(3)
    b.part.workers_advanced(5)
    for generation, loads, progress in (
        (1, (), GenerationProgress(1, loaded=3, reached=5)),
        (2, (5,), GenerationProgress(2, loaded=5)),
        (3, (7, None), GenerationProgress(3)),  # the load was refused
    ):
        for step in loads:
            b.part.workers_load(step)
        b.part.workers_failed(replace(CRASH, generation=generation))
        bench.settle()
        assert record_of(b).progress == progress


def finish(*peers: Peer) -> None:
    for peer in peers:
        generation = peer.generation
        peer.part.workers_are(Condition.SUCCEEDED, generation)
        peer.part.workers_gone(generation)
        peer.bench.settle()


def test_when_all_workers_succeed_everybody_leaves_with_success(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    spare = bench.join("spare", replace(POLICY, max_nodes=2))
    finish(a, b)
    for peer in (a, b, spare):
        assert peer.left() == Leave(Result.SUCCEEDED, "every worker ended with success")
        assert peer.stops() == []


# ---------------------------------------------------------------- settling a generation


def test_a_node_starts_a_generation_once_and_no_two_at_once(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    a.obedient = b.obedient = False
    world = world_of(bench)
    with pytest.raises(AssertionError, match="I1"):
        a.part.workers_started(replace(world, generation=2))
    with pytest.raises(AssertionError, match="not started"):
        a.part.workers_gone(2)
    a.part.workers_gone(1)
    assert a.order == Stay(), "its workers have ended; the others decide what comes next"
    with pytest.raises(AssertionError, match="I4"):
        a.part.workers_started(world)


def test_a_member_that_never_started_a_stopped_generation_settles_it(bench: Bench) -> None:
    a, b = bench.join("a"), bench.join("b")
    b.obedient = False
    bench.settle()
    assert isinstance(b.order, Start)
    a.part.workers_failed(CRASH)
    a.part.workers_advanced(1)
    bench.settle()
    assert (b.generation, b.stops(), record_of(b).has_stopped(1)) == (0, [], True)
    b.obedient = True
    bench.settle()
    assert (a.generation, b.generation) == (2, 2)


def test_only_the_master_needs_a_fresh_port_and_settles_with_it(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    a.obedient = b.obedient = False
    a.part.workers_failed(CRASH)
    bench.settle()
    a.part.workers_gone(1)
    b.part.workers_gone(1)
    assert (a.part.wants_port, b.part.wants_port) == (True, False)
    assert a.part.request(bench.now) is None, "it has not settled before it has a port"
    a.part.offer_port(4711)
    a.obedient = b.obedient = True
    bench.after(1)
    assert (world_of(bench).generation, world_of(bench).master.port) == (2, 4711)


def test_workers_of_a_world_that_is_no_more_are_stopped_and_it_is_replaced(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    bench.delete(WORLD_KEY)
    bench.settle()
    assert a.stops()[0] == b.stops()[0] == Stop(1, False, WORLD_LOST)
    assert a.generation == b.generation > 1
    b.obedient = False
    bench.put(WORLD_KEY, replace(world_of(bench), generation=7).to_json())
    b.watch()
    assert b.order == Stop(b.generation, False, "generation 7 has replaced it")


def test_an_older_world_never_replaces_a_newer_one(bench: Bench) -> None:
    a, _ = bench.joined("a", "b")
    old = bench.entry(WORLD_KEY)
    bench.joined("c")
    assert old is not None
    before = a.part.world
    a.part.changed((Change(old.mod_revision, WORLD_KEY, old),), bench.now)
    assert (a.part.world, a.order) == (before, Stay())


# ---------------------------------------------------------------- leaving, and draining


def test_a_leaving_node_without_an_answer_stops_alone(bench: Bench) -> None:
    a, b, c = bench.joined("a", "b", "c")
    bench.kill(a)
    b.part.leave(bench.now)
    b.part.leave(bench.now + 1)  # asked again: the wait does not start anew
    alone_at = bench.now + LEAVE_TOGETHER_S
    bench.after(LEAVE_TOGETHER_S - 0.5)
    assert (b.generation, b.order) == (2, Stay())
    wake_at = b.part.wake_at(bench.now)
    assert wake_at is not None
    assert wake_at <= alone_at
    bench.after(0.5)
    assert b.stops()[-1] == Stop(2, True, ASKED)
    assert (b.left().why, c.generation) == (Refusal.ASKED, 2)


@pytest.fixture
def listeners(bench: Bench) -> list[Peer]:
    """Three nodes whose workers end by themselves."""
    peers = bench.joined("a", "b", "c")
    for peer in peers:
        peer.listens = True
    return peers


def notify(bench: Bench, *peers: Peer) -> None:
    """All of their workers listen, and know."""
    for peer in peers:
        peer.part.workers_are(Condition.NOTIFIED, 2)
        peer.part.workers_are(Condition.POLLING, 2)
    bench.settle()


def test_workers_that_listen_are_told_and_never_signalled(bench: Bench, listeners: list[Peer]) -> None:
    a, b, c = listeners
    signalled = [peer.stops() for peer in listeners]
    b.part.leave(bench.now)
    bench.settle()
    assert [peer.stops() for peer in listeners] == signalled
    for peer in listeners:
        drains = [order for order in peer.orders if isinstance(order, Drain) and order.generation == 2]
        assert drains == [Drain(2, False, B_LEAVES), Drain(2, True, B_LEAVES)]
    assert (bench.members(), a.generation, c.generation) == (["a", "c"], 3, 3)
    assert b.left() == Leave(Refusal.ASKED, ASKED)


def test_no_node_stops_before_all_know_and_none_leaves_before_the_others_go_on(
    bench: Bench, listeners: list[Peer]
) -> None:
    a, b, c = listeners
    c.obedient = False
    b.part.leave(bench.now)
    bench.settle()
    assert bench.phase() is Phase.DRAINING
    assert c.order == Drain(2, False, B_LEAVES)
    assert record_of(a).conditions == {Condition.NOTIFIED, Condition.POLLING}
    c.part.workers_are(Condition.NOTIFIED, 2)
    bench.settle()
    assert bench.phase() is Phase.DRAINING, "its workers may not have heard of it"
    notify(bench, c)
    assert world_of(bench).phase is Phase.LAST_STEP
    assert (b.generation, b.order) == (0, Stay())
    c.obedient = True
    bench.settle()
    assert (bench.members(), b.left().why) == (["a", "c"], Refusal.ASKED)


def test_a_drain_ends_in_time(bench: Bench, listeners: list[Peer]) -> None:
    """Workers that listen and never come to the agreed step are signalled, and no node waits for them any longer."""
    a, b, c = listeners
    c.obedient = a.obedient = False
    b.part.leave(bench.now)
    bench.settle()
    notify(bench, a, c)
    assert c.part.wake_at(bench.now) is not None
    bench.after(POLICY.drain_timeout_s - TICK_S)
    assert isinstance(c.order, Drain)
    bench.after(TICK_S)
    late = f"{B_LEAVES}; the workers did not end by themselves in time"
    assert c.order == a.order == Stop(2, True, late)
    assert b.order == Stay()
    c.part.workers_gone(2)
    bench.settle()
    assert a.order == Stop(2, True, B_LEAVES), "c has ended its workers: none comes to the step"
    a.part.workers_gone(2)
    bench.settle()
    assert bench.members() == ["a", "c"]


@pytest.mark.parametrize("coordinator_lives", [True, False])
def test_a_drain_ends_on_all_nodes_at_once_where_a_machine_goes_away(
    bench: Bench, listeners: list[Peer], coordinator_lives: bool
) -> None:
    """None of the others' collectives breaks before they know why; and the machine waits for no coordinator."""
    a, b, c = listeners
    for peer in listeners:
        peer.obedient = False
    b.part.leave(bench.now, bench.now + 6.0)
    bench.settle()
    if not coordinator_lives:
        bench.kill(a)
    bench.after(4.0 - TICK_S)
    assert isinstance(b.order, Drain)
    bench.after(TICK_S)
    if coordinator_lives:
        assert {peer.order for peer in (a, b, c)} == {Stop(2, True, B_LEAVES)}
        assert b.generation == 2, "it has killed none yet"
    else:
        bench.after(0.5)
        late: Action = b.order
        assert late == Stop(2, True, f"{B_LEAVES}; the workers did not end by themselves in time")


@pytest.fixture
def with_memory(bench: Bench) -> list[Peer]:
    """Two nodes that can hand over what is in their memory, and whose workers end by themselves."""
    peers = []
    for name in "ab":
        peers.append(bench.join(name, ALONE, memory=7000))
        peers[-1].listens = True
        bench.settle()
    bench.after(ALONE.last_call_s + TICK_S)
    assert bench.members() == ["a", "b"]
    return peers


@pytest.mark.parametrize("dies", [False, True])
def test_the_next_world_waits_for_what_a_leaving_node_hands_over_and_for_no_dead_one(
    bench: Bench, with_memory: list[Peer], dies: bool
) -> None:
    a, b = with_memory
    generation = b.generation
    b.part.leave(bench.now)
    bench.settle()
    assert (a.part.hands_over, b.part.hands_over) == (False, True)
    assert b.part.has(Condition.STATE_SAVED, generation)
    assert (record_of(b).has(Condition.STATE_SAVED, generation), record_of(b).has_stopped(generation)) == (
        True,
        False,
    )
    if dies:
        bench.kill(b)
        bench.after(TTL_S + 1.0)
    else:
        bench.after(ALONE.drain_timeout_s + 5.0)
        assert b.order == Stay(), "it does not leave meanwhile, either"
        assert bench.phase() is Phase.LAST_STEP
        b.part.handed_over()
        bench.settle()
        assert b.left().why is Refusal.ASKED
    assert (bench.phase(), bench.members(), a.generation) == (Phase.RUNNING, ["a"], generation + 1)


# ---------------------------------------------------------------- join timeout

NO_ANSWER = "the rendezvous store: no answer from store:2379"


def timed_out(peer: Peer) -> str:
    refusal = peer.left()
    assert refusal.why is (Refusal.STORE_AWAY if "no answer" in refusal.reason else Refusal.JOIN_TIMEOUT)
    begin = "no world within 60 s of --join-timeout, waiting: "
    assert refusal.reason.startswith(begin)
    return refusal.reason.removeprefix(begin)


@pytest.mark.parametrize(
    ("names", "least", "cut_off", "reason"),
    [
        ("a", 2, False, "1 more of at least 2 nodes (here: a)"),
        ("ab", 3, False, "a coordinates; no new world from it yet"),
        ("a", 2, True, NO_ANSWER),
    ],
)
def test_the_join_timeout_says_what_was_waited_for(
    bench: Bench, names: str, least: int, cut_off: bool, reason: str
) -> None:
    *_, last = (bench.join(name, replace(POLICY, min_nodes=least)) for name in names)
    last.connected = not cut_off
    bench.after(POLICY.join_timeout_s - TICK_S)
    assert last.orders == []
    assert last.part.wake_at(bench.now) is not None
    bench.after(TICK_S)
    assert timed_out(last) == reason


def test_survivors_below_the_minimum_time_out_and_say_what_happened(bench: Bench) -> None:
    """Each wait has the whole timeout, however long the first one was, and however slowly workers stop."""
    a = bench.join("a")
    bench.after(POLICY.join_timeout_s - 1)
    (b,) = bench.joined("b")
    bench.after(POLICY.join_timeout_s * 3)
    assert (a.generation, b.generation, a.order) == (1, 1, Stay())
    a.obedient = False
    bench.kill(b)
    bench.after(TTL_S + POLICY.join_timeout_s)
    assert a.stops()
    a.part.workers_gone(1)
    bench.settle()
    bench.after(POLICY.join_timeout_s - 1)
    assert a.order == Stay()
    bench.after(1)
    assert timed_out(a).startswith("1 more of at least 2 nodes (here: a; last: node b is gone")


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("b", NO_ANSWER),
        ("spare", "which stands by: the world has all 2 nodes of --max-nodes; a coordinates"),
    ],
)
def test_a_node_cut_off_for_good_times_out_too(bench: Bench, victim: str, reason: str) -> None:
    """The last that it saw is a running world; it is not waiting for that one to end."""
    policy = replace(POLICY, max_nodes=2)
    peers = [*bench.joined("a", "b", policy=policy), bench.join("spare", policy)]
    bench.settle()
    lonely = next(peer for peer in peers if peer.name == victim)
    lonely.connected = False
    bench.after(POLICY.join_timeout_s)
    assert lonely.order == Stay()
    bench.after(TTL_S)
    assert timed_out(lonely).endswith(reason)


WITHOUT_END = {
    ("b", Phase.RUNNING, "trains"),
    ("b", Phase.RUNNING, "has succeeded"),
    ("b", Phase.DRAINING, "has succeeded"),
    ("spare", Phase.RUNNING, "idle"),
    ("spare", Phase.DRAINING, "idle"),
}
"""Training may last for ever, and so may the wait for the ranks that still train."""


@pytest.mark.parametrize("leaves", [False, True], ids=["", "leaves"])
@pytest.mark.parametrize("phase", [None, *Phase], ids=lambda phase: phase.value if phase else "no world")
@pytest.mark.parametrize(
    ("name", "does"), [("b", "trains"), ("b", "idle"), ("b", "has succeeded"), ("spare", "idle")]
)
def test_no_state_of_an_agent_lasts_for_ever(
    bench: Bench, name: str, does: str, phase: Phase | None, leaves: bool
) -> None:
    """The coordinator lives, and decides nothing any more: nothing happens but that time passes."""
    policy = replace(POLICY, max_nodes=2)
    peers = [*bench.joined("a", "b", policy=policy), bench.join("spare", policy)]
    bench.settle()
    bench.peers[0].turn = lambda: False  # type: ignore[method-assign]
    peer = next(peer for peer in peers if peer.name == name)
    if does != "trains" and peer.generation:
        if does == "has succeeded":
            peer.part.workers_are(Condition.SUCCEEDED, 1)
        peer.part.workers_gone(1)
    world = world_of(bench)
    if phase is None:
        bench.delete(WORLD_KEY)
    elif phase is not Phase.RUNNING:
        result = Result.SUCCEEDED if phase is Phase.ENDED else None
        bench.put(WORLD_KEY, replace(world, phase=phase, result=result).to_json())
    bench.settle()
    if leaves:
        peer.part.leave(bench.now)
    bench.after(policy.join_timeout_s + policy.drain_timeout_s + LEAVE_TOGETHER_S + LINGER_S + TICK_S)
    if (name, phase, does) in WITHOUT_END and not leaves:
        assert peer.order == Stay()
    else:
        peer.left()


# ---------------------------------------------------------------- a job of the same name again

LASTING = replace(POLICY, max_nodes=2, store_outlives_job=True)
LONELY = replace(LASTING, min_nodes=1)
AGAIN = replace(LASTING, runs_again=True)


def test_who_comes_after_the_end_begins_anew_once_all_others_have_left(bench: Bench) -> None:
    a, b = bench.joined("a", "b", policy=AGAIN)
    first = a.generation
    finish(a, b)
    assert a.left().why is b.left().why is Result.SUCCEEDED
    again = [bench.join(name, AGAIN, life=2) for name in ("c", "d")]
    bench.settle()
    assert [peer.generation for peer in again] == [0, 0], "those of the old run are still here"
    assert not [peer for peer in again if isinstance(peer.order, Leave)]
    gone(bench, a, b)
    bench.settle()
    assert [peer.generation for peer in again] == [first + 1] * 2


@pytest.mark.parametrize("policy", [LONELY, POLICY], ids=["the store lasts", "it ends with the job"])
@pytest.mark.parametrize("all_have_left", [True, False])
def test_a_finished_job_does_not_begin_anew_because_an_agent_comes_late(
    bench: Bench, all_have_left: bool, policy: Policy
) -> None:
    """A node that lost its power at the end, and whose unit is enabled."""
    a, b = bench.joined("a", "b", policy=policy)
    finish(a, b)
    if all_have_left:
        gone(bench, a, b)
    late = bench.join("c", policy)
    bench.settle()
    order = late.left()
    assert order.why is Result.SUCCEEDED
    came_after = re.match(
        "job .* had ended before this agent came: .*etcdctl del --prefix /elastic-agent/job/", order.reason
    )
    assert bool(came_after) is (policy is LONELY)


def test_a_job_that_has_failed_begins_anew_when_it_is_started_again(bench: Bench) -> None:
    hopeless = replace(LONELY, max_nodes=1, restarts=RestartPolicy(max_failures=0))
    (a,) = bench.joined("a", policy=hopeless)
    first = a.generation
    a.part.workers_failed(replace(CRASH, generation=first))
    bench.settle()
    assert a.left().why is Result.RESTARTS_EXHAUSTED
    gone(bench, a)
    again = bench.join("a", hopeless, life=2)
    bench.settle()
    assert again.generation == first + 1


def test_who_was_there_at_the_end_and_joins_again_ends_as_the_others_did(bench: Bench) -> None:
    """Its lease had ended: it may have been cut off while the others finished."""
    a, b = bench.joined("a", "b", policy=LONELY)
    b.connected = False
    bench.after(TTL_S + 1)
    finish(a)
    gone(bench, a)
    b.connected = True
    bench.after(1)
    assert (b.part.incarnation, b.left().why) == ("b-1.1", Result.SUCCEEDED)
