"""One node's part in the rendezvous (see `bench`): joining, coordinating, stopping, leaving, and what may break."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_agent.rendezvous.coordinator.restarts import RestartPolicy
from elastic_agent.rendezvous.coordinator.view import Publish
from elastic_agent.rendezvous.errors import LeaseExpired, StoreMismatch, StoreUnavailable
from elastic_agent.rendezvous.liveness import LEASE_MARGIN
from elastic_agent.rendezvous.node.deadlines import LEAVE_TOGETHER_S, LINGER_S
from elastic_agent.rendezvous.node.node_actions import Drain, Leave, Refusal, Start, Stay, Stop
from elastic_agent.rendezvous.node.participant import DUPLICATE_TTLS, Participant
from elastic_agent.rendezvous.node.transactions import Forget, RetryPolicy, WriteRecord, WriteWorld
from elastic_agent.rendezvous.records import (
    MAX_SEEN,
    NODES_PREFIX,
    SCHEMA,
    WORLD_KEY,
    CauseKind,
    Condition,
    DrainRequest,
    Failure,
    GenerationProgress,
    NodeRecord,
    Phase,
    Result,
    node_key,
)
from elastic_agent.rendezvous.store.interface import Change, Grant, Outcome, Read, Request
from elastic_agent.rendezvous.store.kv_state import KvState

from .bench import ALONE, POLICY, TICK_S, TTL_S, Bench, Peer


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ---------------------------------------------------------------- joining


def test_nodes_meet_and_start_one_world(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    world = bench.world()
    assert world is not None
    assert (world.generation, world.phase, bench.members()) == (1, Phase.RUNNING, ["a", "b"])
    assert a.orders == [Start(world, world.members[0])]
    assert b.orders == [Start(world, world.members[1])]
    assert (world.master.address, world.master.port) == ("host-a", 1000)


JOINING_B = Read((WORLD_KEY, "drain/b", "nodes/b"), oldest_under=NODES_PREFIX)


def test_the_oldest_record_coordinates_and_the_others_watch_only_it(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    assert (a.snapshot.coordinates, b.snapshot.coordinates) == (True, False)
    assert a.part.subscription is not None
    assert b.part.subscription is not None
    assert a.part.subscription.scopes == (WORLD_KEY, "drain/a", NODES_PREFIX)
    assert b.part.subscription.scopes == (WORLD_KEY, "drain/b", "nodes/a", "nodes/b")
    assert [node.node for node in a.snapshot.known_nodes] == ["a", "b"]
    assert b.count(WriteWorld) == 0


def test_a_join_is_one_write_to_the_nodes_own_record(bench: Bench) -> None:
    for peer in bench.joined("a", "b"):
        entry = bench.entry(node_key(peer.name))
        assert entry is not None
        assert entry.create_revision == entry.mod_revision
        assert peer.count(WriteRecord) == peer.count(Grant) == 1


def test_one_question_at_a_time_and_late_answers_do_nothing(bench: Bench) -> None:
    part = bench.join("a").part
    first = part.request(bench.now)
    assert isinstance(first, Grant)
    assert part.request(bench.now + 3600) is None
    part.failed(first, StoreUnavailable("timeout"), bench.now)
    second = part.request(bench.now)
    assert isinstance(second, Grant)
    part.answered(first, 77, bench.now)
    part.failed(first, LeaseExpired("late"), bench.now)
    assert part.lease is None
    assert part.request(bench.now) is None, "the second question is still open"
    part.answered(second, 78, bench.now)
    assert part.lease == 78


def test_a_third_node_is_taken_in_by_a_planned_stop(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    (c,) = bench.joined("c")
    assert bench.members() == ["a", "b", "c"]
    assert [peer.generation for peer in (a, b, c)] == [2, 2, 2]
    assert a.stops() == b.stops() == [Stop(1, True, "c joining")]
    assert c.stops() == []


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
    assert bench.members() == ["a", "spare"]
    assert spare.generation == 2


# ---------------------------------------------------------------- lost replies and refused writes


@pytest.mark.parametrize(
    ("victim", "kind"),
    [(name, kind) for name in ("a", "b") for kind in (Grant, WriteRecord, Read)] + [("a", WriteWorld)],
)
def test_a_lost_reply_costs_time_and_nothing_else(bench: Bench, victim: str, kind: type[Request]) -> None:
    peers = [bench.join("a"), bench.join("b")]
    unlucky = peers[0] if victim == "a" else peers[1]
    unlucky.replies_to_lose = [kind]
    bench.settle()
    assert unlucky.replies_to_lose == []
    assert [peer.generation for peer in peers] == [1, 1]
    assert sorted(bench.members()) == ["a", "b"]
    assert {record.incarnation for record in bench.records().values()} == {"a-1", "b-1"}


def test_a_write_with_a_lost_reply_is_read_back_not_repeated(bench: Bench) -> None:
    a = bench.join("a", ALONE)
    a.replies_to_lose = [WriteRecord]
    bench.settle()
    entry = bench.entry("nodes/a")
    assert entry is not None
    assert entry.create_revision == entry.mod_revision
    assert a.count(WriteRecord) == 1
    assert Read(("nodes/a",)) in a.asked
    assert a.generation == 1


def test_a_write_that_never_arrived_is_repeated(bench: Bench) -> None:
    a = bench.join("a", ALONE)
    while not isinstance(request := a.part.request(bench.now), WriteRecord):
        assert request is not None
        a.serve(request)
    a.part.failed(request, StoreUnavailable("cut"), bench.now)
    bench.settle()
    assert a.count(WriteRecord) == 1
    assert a.generation == 1


def test_a_record_replaced_behind_our_back_means_that_the_lease_is_gone(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    bench.put("nodes/b", NodeRecord("b", "b-9", "elsewhere", 1, 1).to_json())
    b.part.workers_are(Condition.STABLE, 1)
    bench.settle()
    assert b.stops()[0] == Stop(1, False, "the rendezvous store does not confirm this node's lease")
    assert b.part.incarnation == "b-1.1"
    assert b.generation == 0
    assert a.stops()[0].reason == "node b is gone: its lease ended"


def test_a_node_that_has_known_the_highest_generation_joins_again_with_a_record_that_others_read(
    bench: Bench,
) -> None:
    a, _ = bench.joined("a", "b")
    world = bench.world()
    assert world is not None
    bench.put(WORLD_KEY, replace(world, generation=MAX_SEEN + 1).to_json())
    bench.settle()
    bench.delete(node_key("a"))
    bench.settle()
    assert a.record is not None
    assert (a.record.incarnation, a.record.seen) == ("a-1.1", MAX_SEEN)


@pytest.mark.parametrize("asked", [True, False], ids=["by its own write", "by its watch"])
def test_a_record_deleted_behind_our_back_means_the_same(bench: Bench, asked: bool) -> None:
    a, b = bench.joined("a", "b")
    victim = b if asked else a
    bench.delete(node_key(victim.name))
    if asked:
        b.part.workers_are(Condition.STABLE, 1)
    bench.settle()
    assert victim.stops()[0] == Stop(1, False, "the rendezvous store does not confirm this node's lease")
    assert victim.part.incarnation == f"{victim.name}-1.1"
    assert {peer.generation for peer in (a, b)} == {2}
    assert victim.record is not None
    assert victim.record.incarnation == f"{victim.name}-1.1"


def test_of_two_coordinators_only_one_publishes(bench: Bench) -> None:
    a = bench.join("a", ALONE)
    while not isinstance(request := a.part.request(bench.now), WriteWorld):
        assert request is not None
        a.serve(request)
    member = replace(request.world.members[0], node="x", incarnation="x-1")
    winner = replace(request.world, members=(member,))
    bench.put(WORLD_KEY, winner.to_json())
    a.serve(request)
    assert a.part.world == winner
    assert bench.world() == winner


def test_unanswered_requests_are_repeated_after_a_growing_random_wait() -> None:
    retry, rng = RetryPolicy(first_wait_s=0.1, max_wait_s=1.0), random.Random(0)
    for attempt, longest in enumerate([0.1, 0.2, 0.4, 0.8, 1.0, 1.0]):
        waits = [retry.wait_s(attempt, rng) for _ in range(200)]
        assert 0.9 * longest < max(waits) <= longest
        assert 0 <= min(waits) < 0.1 * longest
    assert retry.wait_s(10**9, rng) <= 1.0


def test_after_a_failed_request_nothing_is_asked_until_the_wait_is_over() -> None:
    bench = Bench()
    identity = NodeRecord("a", "a-1", "host-a", 1, 1)
    part = Participant(
        identity, POLICY, lease_ttl_s=TTL_S, rng=random.Random(1), now=0.0, retry=RetryPolicy(0.1, 60.0)
    )
    now, waits = 0.0, []
    for _ in range(10):
        request = part.request(now)
        assert request is not None
        part.failed(request, StoreUnavailable("down"), now)
        wake_at = part.wake_at(now)
        assert wake_at is not None
        assert part.request((now + wake_at) / 2) is None
        waits.append(wake_at - now)
        now = wake_at
    assert sum(waits[5:]) > sum(waits[:5])
    request = part.request(now)
    assert request is not None
    part.answered(request, bench.kv.grant(TTL_S, now), now)
    request = part.request(now)
    assert request is not None
    part.failed(request, StoreUnavailable("down"), now)
    wake_at = part.wake_at(now)
    assert wake_at is not None
    assert wake_at <= now + 0.1, "an answer starts the waits again"


# ---------------------------------------------------------------- leases


def test_workers_stop_before_the_lease_can_be_given_away(bench: Bench) -> None:
    a, _ = bench.joined("a", "b")
    a.obedient = False
    a.part.lease_confirmed(a.part.lease or 0, bench.now)
    good_until = bench.now + LEASE_MARGIN * TTL_S
    assert a.part.wake_at(bench.now) == good_until
    assert a.part.action(good_until - 0.01) == Stay()
    assert a.part.action(good_until) == Stop(
        1, False, "the rendezvous store does not confirm this node's lease"
    )


def test_a_confirmation_counts_from_when_it_was_asked_for(bench: Bench) -> None:
    a, _ = bench.joined("a", "b")
    lease, part = a.part.lease or 0, a.part
    part.lease_confirmed(lease, bench.now + 2)
    part.lease_confirmed(lease, bench.now + 1)
    part.lease_confirmed(lease + 1, bench.now + 9)
    assert part.lease_good(bench.now + 2 + LEASE_MARGIN * TTL_S - 0.01)
    assert not part.lease_good(bench.now + 2 + LEASE_MARGIN * TTL_S)


def test_a_grant_counts_from_when_it_was_asked_for(bench: Bench) -> None:
    part = bench.join("a").part
    bench.now += 10
    request = part.request(bench.now)
    assert request is not None
    part.answered(request, 1, bench.now + 2)
    assert part.lease_good(bench.now + LEASE_MARGIN * TTL_S - 0.01)
    assert not part.lease_good(bench.now + LEASE_MARGIN * TTL_S)


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
    assert lost.generation == 0
    assert bench.members() == others
    lost.connected = True
    bench.after(1)
    assert lost.record is not None
    assert (lost.record.incarnation, lost.record.generation) == (f"{victim}-1.1", 0)
    assert lost.record.port > old_port
    assert bench.members() == [*others, victim]
    assert {peer.generation for peer in peers} == {lost.generation}


def test_a_short_cut_that_stopped_the_workers_is_reported_as_withdrawn(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    b.connected = False
    bench.after(LEASE_MARGIN * TTL_S)
    assert b.generation == 0
    b.connected = True
    bench.after(TICK_S)
    assert a.stops() == [Stop(1, False, "node b stopped its workers because it could not confirm its lease")]
    assert b.part.incarnation == "b-1"
    assert (a.generation, b.generation) == (2, 2)


def test_no_new_lease_is_asked_for_while_workers_are_alive(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    b.obedient = False
    bench.kv.revoke(b.part.lease or 0)
    b.part.lease_gone(b.part.lease)
    grants = b.count(Grant)
    bench.settle()
    assert (b.count(Grant), b.part.incarnation, b.generation) == (grants, "b-1", 1)
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
    assert a.record is not None
    assert (a.record.incarnation, a.orders) == ("a-1.1", [])
    bench.kv.revoke(a.part.lease or 0)
    a.part.lease_gone(a.part.lease)
    assert a.part.incarnation == "a-1.2"


def test_a_write_under_an_expired_lease_is_the_end_of_that_lease(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    bench.kv.revoke(b.part.lease or 0)
    b.part.workers_are(Condition.STABLE, 1)
    request = b.part.request(bench.now)
    assert isinstance(request, WriteRecord)
    b.part.failed(request, LeaseExpired("gone"), bench.now)
    assert b.part.lease is None
    assert isinstance(b.order, Stop)
    bench.settle()
    assert (a.generation, b.generation, b.part.incarnation) == (2, 2, "b-1.1")


def test_joining_again_waits_for_no_answer_to_an_old_question(bench: Bench) -> None:
    part = bench.join("a").part
    grant = part.request(bench.now)
    assert grant is not None
    part.answered(grant, 1, bench.now)
    open_question = part.request(bench.now)
    assert isinstance(open_question, WriteRecord)
    part.lease_gone(1)
    part.offer_port(2)
    assert isinstance(part.request(bench.now), Grant)
    part.answered(open_question, Outcome(True, 9, (None,)), bench.now)
    assert part.request(bench.now) is None, "the grant is still open"


def test_nodes_of_a_store_that_came_back_empty_meet_again(bench: Bench) -> None:
    """Its revisions begin anew, too: what was known of the old world must not outrank the new one."""
    for i in range(100):
        bench.put("other", str(i))
    peers = bench.joined("a", "b", "c")
    old = bench.world().generation
    bench.kv = KvState(base=10)  # so that no lease of the new store has the number of an old one
    late = peers[2]
    late.connected = False
    bench.after(1)
    assert sorted(bench.members()) == ["a", "b"]
    late.connected = True
    bench.after(1)
    assert sorted(bench.members()) == ["a", "b", "c"]
    assert [peer.part.world for peer in peers] == [bench.world()] * 3
    assert [peer.generation for peer in peers] == [old + 2] * 3, "no number is used twice"


# ---------------------------------------------------------------- the coordinator


def test_when_the_leader_vanishes_the_next_oldest_takes_over(bench: Bench) -> None:
    a, b, c = bench.joined("a", "b", "c")
    bench.kill(a)
    bench.after(TTL_S + 1)
    assert (b.snapshot.coordinates, c.snapshot.coordinates) == (True, False)
    assert [node.node for node in b.snapshot.known_nodes] == ["b", "c"]
    assert bench.members() == ["c", "b"], "b keeps its place"
    assert b.stops()[-1] == c.stops()[-1]
    assert b.stops()[-1].reason == "node a is gone: its lease ended"
    world = bench.world()
    assert world is not None
    assert (world.master.address, world.cause.kind) == ("host-c", CauseKind.LOST)


def test_a_younger_record_under_the_old_leaders_key_does_not_lead(bench: Bench) -> None:
    """The leader's agent came back so fast that the others only see its key change hands."""
    a, b, c = bench.joined("a", "b", "c")
    bench.kill(a)
    bench.kv.revoke(a.part.lease or 0)
    again = bench.join("a", life=2)
    while again.record is None:
        again.turn()
    bench.settle()
    assert [peer.snapshot.coordinates for peer in (b, c, again)] == [True, False, False]
    assert bench.members() == ["c", "b", "a"]
    assert {peer.generation for peer in (b, c, again)} == {b.generation}


def test_one_question_tells_a_node_the_world_and_who_coordinates(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
    assert [request for request in b.asked if isinstance(request, Read)] == [JOINING_B]


def test_a_node_that_finds_itself_the_oldest_reads_about_all(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    asked = len(b.asked)
    bench.kill(a)
    bench.after(TTL_S + 1)
    reads = [request for request in b.asked[asked:] if isinstance(request, Read)]
    assert reads == [JOINING_B, Read((WORLD_KEY, "drain/b", NODES_PREFIX))]


def test_a_watch_that_missed_changes_reads_everything_again() -> None:
    bench = Bench(history=4)
    a, b, c = bench.joined("a", "b", "c")
    bench.kv.revoke(c.part.lease or 0)
    bench.kill(c)
    for i in range(10):
        bench.put("other", str(i))
    bench.settle()
    assert [node.node for node in a.snapshot.known_nodes] == ["a", "b"]
    assert bench.members() == ["a", "b"]
    assert a.generation == b.generation > 2


def test_a_leader_that_writes_again_stays_the_leader(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    asked = len(b.asked)
    a.part.workers_are(Condition.STABLE, 1)
    bench.settle()
    assert a.record is not None
    assert a.record.has(Condition.STABLE, 1)
    assert len(b.asked) == asked, "nothing has to be found or read again"


def test_a_younger_record_is_not_the_leaders_even_if_its_end_was_missed(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
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
    assert b.record is not None
    assert b.record.port == 4999
    assert (a.generation, b.generation) == (0, 0)
    bench.after(0.25)
    assert (a.generation, b.generation) == (1, 1)


def test_the_back_off_counts_from_the_stop(bench: Bench) -> None:
    policy = replace(POLICY, restarts=RestartPolicy(first_backoff_s=8.0))
    a, b = bench.joined("a", "b", policy=policy)
    bench.after(100)
    b.part.workers_failed(Failure(1, "crash", "rank 2 raised"))
    bench.settle()
    assert (a.generation, b.generation) == (2, 2), "the first try comes at once"
    b.part.workers_failed(Failure(2, "crash", "rank 2 raised"))
    bench.after(4 - TICK_S)
    assert a.part.waiting_for.startswith("backing off")
    assert 4.0 <= a.part.backoff_s <= 8.0
    assert (a.generation, b.generation) == (0, 0)
    bench.after(4 + TICK_S)
    assert (a.generation, b.generation) == (3, 3)


def test_a_world_that_was_deleted_is_replaced(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    bench.delete(WORLD_KEY)
    bench.settle()
    assert (
        a.stops()[0].reason == b.stops()[0].reason == "the rendezvous store has lost the world that runs here"
    )
    assert a.generation == b.generation > 1


# ---------------------------------------------------------------- who may not take part


def test_a_second_agent_of_the_same_name_is_refused_when_the_first_lives(bench: Bench) -> None:
    first, _ = bench.joined("a", "b")
    second = bench.join("a", life=2)
    bench.after(DUPLICATE_TTLS * TTL_S - TICK_S)
    assert second.orders == []
    bench.after(1)
    refusal = second.left()
    assert refusal.why is Refusal.DUPLICATE_NODE
    assert "already called 'a'" in refusal.reason
    assert "--node-id" in refusal.reason
    assert first.generation == 1
    assert first.stops() == []


def test_an_agent_waits_for_its_own_earlier_life_to_be_forgotten(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    bench.kill(b)
    again = bench.join("b", life=2)
    bench.settle()
    assert again.part.waiting_for.startswith("another agent is registered as 'b': if it runs, ")
    bench.after(TTL_S + 1)
    assert again.record is not None
    assert again.record.incarnation == "b-2"
    assert (a.generation, again.generation) == (2, 2)


def test_each_join_has_the_whole_wait_for_an_earlier_life(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
    bench.kill(b)
    again = bench.join("b", life=2)
    bench.after(DUPLICATE_TTLS * TTL_S * 2)
    assert again.generation == 2
    bench.put("nodes/b", NodeRecord("b", "b-9", "elsewhere", 1, 1).to_json())
    again.part.workers_are(Condition.STABLE, 2)
    bench.after(DUPLICATE_TTLS * TTL_S - 1)
    assert again.order == Stay()
    bench.delete("nodes/b")
    bench.after(1)
    assert again.record is not None
    assert again.record.incarnation == "b-2.1"


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
    bench.kill(a)
    bench.kill(b)
    bench.after(TTL_S + 1)
    newcomer = bench.join("c")
    bench.put("nodes/a", leader)
    bench.put(WORLD_KEY, world)
    bench.settle()
    assert f"text of version {version}, this process reads {SCHEMA}" in mismatch(newcomer)


def test_no_world_is_written_that_no_transition_leads_to(bench: Bench) -> None:
    a, _ = bench.joined("a", "b")
    world = bench.world()
    assert world is not None
    a.part._decide = lambda view, policy, now: Publish(replace(world, phase=Phase.LAST_STEP), "not announced")
    with pytest.raises(AssertionError, match=r"no world goes from Phase\.RUNNING to Phase\.LAST_STEP"):
        bench.settle()


def test_another_jobs_store_in_the_place_of_ours_is_refused_and_the_workers_end(bench: Bench) -> None:
    """Whether an answer to a request says so, or another of the threads at the store."""
    a, b = bench.joined("a", "b")
    error = StoreMismatch("it is that of job 'other'")
    a.part.workers_are(Condition.STABLE, 1)
    request = a.part.request(bench.now)
    assert request is not None
    a.part.failed(request, error, bench.now)
    b.part.store_mismatched(str(error))
    for peer in (a, b):
        assert peer.part.action(bench.now) == Stop(1, False, str(error))
        assert peer.part.request(bench.now) is None
        peer.part.workers_gone(1)
        assert mismatch(peer) == str(error)


def test_another_jobs_world_is_refused(bench: Bench) -> None:
    bench.joined("a", "b")
    stranger = bench.join("c", replace(POLICY, job="other"))
    bench.settle()
    reason = mismatch(stranger)
    assert "holds job 'job', not 'other'" in reason
    assert "--rdzv-id" in reason


@pytest.mark.parametrize("garbage", ["", "garbage", "{}", '{"v": 2}', "[1]"])
def test_a_world_that_cannot_be_read_is_refused_and_stops_the_workers_first(
    bench: Bench, garbage: str
) -> None:
    a, b = bench.joined("a", "b")
    b.obedient = False
    bench.put(WORLD_KEY, garbage)
    bench.settle()
    stop = b.order
    assert isinstance(stop, Stop)
    assert (stop.generation, stop.planned) == (1, False)
    assert "'world'" in stop.reason
    b.part.workers_gone(1)
    assert mismatch(b) == stop.reason
    assert mismatch(a) == stop.reason
    assert a.part.request(bench.now) is None, "nothing is written by a node that was refused"


def test_only_the_first_refusal_counts(bench: Bench) -> None:
    a = bench.join("a")
    bench.settle()
    bench.put(WORLD_KEY, "[]")
    bench.put(WORLD_KEY, "{}")
    bench.settle()
    assert "text is a JSON list" in mismatch(a)


@pytest.mark.parametrize("garbage", ["", "garbage", '{"v": 2}', NodeRecord("x", "x-1", "", 1, 1).to_json()])
def test_a_node_record_that_cannot_be_read_is_passed_over(bench: Bench, garbage: str) -> None:
    a, b = bench.joined("a", "b")
    bench.put("nodes/c", garbage)
    bench.settle()
    assert [node.node for node in a.snapshot.known_nodes] == ["a", "b"]
    assert (a.stops(), b.stops()) == ([], [])


def test_a_record_that_became_unreadable_counts_as_gone(bench: Bench) -> None:
    a, _, _ = bench.joined("a", "b", "c")
    bench.put("nodes/c", "garbage")
    bench.settle()
    assert a.stops()[-1].reason == "node c is gone: its lease ended"
    assert bench.members() == ["a", "b"]


def test_garbage_where_the_oldest_node_should_be_is_refused(bench: Bench) -> None:
    bench.put("nodes/junk", "garbage")
    a = bench.join("a")
    bench.settle()
    assert "'nodes/junk'" in mismatch(a)


def test_garbage_under_our_own_name_is_refused(bench: Bench) -> None:
    bench.put("nodes/a", "garbage")
    a = bench.join("a")
    bench.settle()
    assert "'nodes/a'" in mismatch(a)


# ---------------------------------------------------------------- failures, success, steps


def test_a_node_names_the_failure_that_its_others_follow_from(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
    root = Failure(1, "crash", "rank 2 raised ValueError")
    for failure in (
        replace(root, collateral=True),
        root,
        replace(root, collateral=True),
        replace(root, summary="late"),
    ):
        b.part.workers_failed(failure)
    bench.settle()
    world = bench.world()
    assert world is not None
    assert world.cause.failure == root


def test_a_failure_restarts_everybody_in_the_next_generation(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    failure = Failure(1, "crash", "rank 2 raised ValueError")
    b.part.workers_advanced(5)
    b.part.workers_failed(failure)
    b.part.workers_failed(replace(failure, summary="a later one of the same generation"))
    bench.settle()
    assert a.stops() == b.stops() == [Stop(1, False, "rank 2 raised ValueError")]
    world = bench.world()
    assert world is not None
    assert (world.generation, world.cause.failure, world.step) == (2, failure, 5)
    assert (world.restarts.failures, world.restarts.without_progress) == (1, 0)
    assert (a.generation, b.generation) == (2, 2)


def test_a_later_generations_failure_replaces_the_first(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
    for generation in (1, 2):
        b.part.workers_advanced(generation)
        b.part.workers_failed(Failure(generation, "crash", f"crash of {generation}"))
        bench.settle()
    assert [stop.reason for stop in b.stops()] == ["crash of 1", "crash of 2"]
    assert b.generation == 3


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
    assert b.record is not None
    assert (b.record.step, b.record.has(Condition.STABLE, 1)) == (5, True)


def test_a_failure_tells_how_far_its_generation_had_come_and_no_other(bench: Bench) -> None:
    _, b = bench.joined("a", "b")
    b.part.workers_load(3)
    b.part.workers_advanced(5)
    b.part.workers_failed(Failure(1, "crash", "rank 2 raised ValueError"))
    bench.settle()
    assert b.record is not None
    assert b.record.progress == GenerationProgress(1, loaded=3, reached=5)
    b.part.workers_load(5)
    b.part.workers_failed(Failure(2, "crash", "rank 2 raised ValueError"))
    bench.settle()
    assert b.record.progress == GenerationProgress(2, loaded=5)
    b.part.workers_load(7)
    b.part.workers_load(None)
    b.part.workers_failed(Failure(3, "crash", "rank 2 raised OtherRun"))
    bench.settle()
    assert b.record.progress == GenerationProgress(3), "the load was refused"


def test_when_all_workers_succeed_everybody_leaves_with_success(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    spare = bench.join("spare", replace(POLICY, max_nodes=2))
    for peer in (a, b):
        peer.part.workers_are(Condition.SUCCEEDED, 1)
        peer.part.workers_gone(1)
        bench.settle()
    for peer in (a, b, spare):
        assert peer.left() == Leave(Result.SUCCEEDED, "every worker ended with success")
        assert peer.stops() == []


# ---------------------------------------------------------------- settling a generation


def test_a_node_starts_a_generation_once(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    a.obedient = b.obedient = False
    world = a.part.world
    assert world is not None
    a.part.workers_gone(1)
    assert a.order == Stay(), "its workers have ended; the others decide what comes next"
    with pytest.raises(AssertionError, match="I4"):
        a.part.workers_started(world)


def test_two_generations_at_once_are_refused(bench: Bench) -> None:
    a, _ = bench.joined("a", "b")
    world = a.part.world
    assert world is not None
    with pytest.raises(AssertionError, match="I1"):
        a.part.workers_started(replace(world, generation=2))
    with pytest.raises(AssertionError, match="not started"):
        a.part.workers_gone(2)


def test_a_member_that_never_started_a_stopped_generation_settles_it(bench: Bench) -> None:
    a, b = bench.join("a"), bench.join("b")
    b.obedient = False
    bench.settle()
    assert isinstance(b.order, Start)
    a.part.workers_failed(Failure(1, "crash", "rank 0 raised"))
    a.part.workers_advanced(1)
    bench.settle()
    assert b.generation == 0
    assert b.stops() == []
    assert b.record is not None
    assert b.record.has_stopped(1)
    b.obedient = True
    bench.settle()
    assert (a.generation, b.generation) == (2, 2)


def test_only_the_master_needs_a_fresh_port_and_settles_with_it(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    a.obedient = b.obedient = False
    a.part.workers_failed(Failure(1, "crash", "rank 0 raised"))
    bench.settle()
    a.part.workers_gone(1)
    b.part.workers_gone(1)
    assert (a.part.wants_port, b.part.wants_port) == (True, False)
    assert a.part.request(bench.now) is None, "it has not settled before it has a port"
    a.part.offer_port(4711)
    a.obedient = b.obedient = True
    bench.after(1)
    world = bench.world()
    assert world is not None
    assert (world.generation, world.master.port) == (2, 4711)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda bench: bench.delete(WORLD_KEY), "the rendezvous store has lost the world that runs here"),
        (
            lambda bench: bench.put(WORLD_KEY, replace(bench.world(), generation=7).to_json()),
            "generation 7 has replaced it",
        ),
    ],
    ids=["deleted", "replaced"],
)
def test_workers_of_a_world_that_is_no_more_are_stopped(
    bench: Bench, change: Callable[[Bench], None], reason: str
) -> None:
    _, b = bench.joined("a", "b")
    b.obedient = False
    change(bench)
    b.watch()
    assert b.order == Stop(1, False, reason)


def test_an_older_world_never_replaces_a_newer_one(bench: Bench) -> None:
    a, _ = bench.joined("a", "b")
    old = bench.entry(WORLD_KEY)
    bench.joined("c")
    assert old is not None
    before = a.part.world
    a.part.changed((Change(old.mod_revision, WORLD_KEY, old),), bench.now)
    assert a.part.world == before
    assert a.order == Stay()


# ---------------------------------------------------------------- leaving


def test_a_leaving_node_stops_together_with_the_others(bench: Bench) -> None:
    a, b, c = bench.joined("a", "b", "c")
    asked_at = bench.now
    b.part.leave(bench.now)
    bench.settle()
    assert bench.now == asked_at
    assert {peer.stops()[-1] for peer in (a, b, c)} == {Stop(2, True, "node b was asked to stop")}
    assert b.left() == Leave(Refusal.ASKED, "this node was asked to stop")
    bench.kill(b)
    bench.kv.revoke(b.part.lease or 0)
    bench.settle()
    assert bench.members() == ["a", "c"]
    assert (a.generation, c.generation) == (3, 3)


def test_a_leaving_node_without_an_answer_stops_alone(bench: Bench) -> None:
    a, b, c = bench.joined("a", "b", "c")
    bench.kill(a)
    b.part.leave(bench.now)
    b.part.leave(bench.now + 1)  # asked again: the wait does not start anew
    alone_at = bench.now + LEAVE_TOGETHER_S
    bench.settle()
    bench.after(LEAVE_TOGETHER_S - 0.5)
    assert b.generation == 2
    assert b.order == Stay()
    wake_at = b.part.wake_at(bench.now)
    assert wake_at is not None
    assert wake_at <= alone_at
    bench.after(0.5)
    assert b.stops()[-1] == Stop(2, True, "this node was asked to stop")
    assert b.left().why is Refusal.ASKED
    assert c.generation == 2


def test_a_node_without_workers_leaves_at_once(bench: Bench) -> None:
    a = bench.join("a")
    bench.settle()
    a.part.leave(bench.now)
    assert a.left() == Leave(Refusal.ASKED, "this node was asked to stop")


# ---------------------------------------------------------------- draining


@pytest.fixture
def listeners(bench: Bench) -> list[Peer]:
    """Three nodes whose workers end by themselves."""
    peers = bench.joined("a", "b", "c")
    for peer in peers:
        peer.listens = True
    return peers


def test_workers_that_listen_are_told_and_never_signalled(bench: Bench, listeners: list[Peer]) -> None:
    a, b, c = listeners
    signalled = [peer.stops() for peer in listeners]
    b.part.leave(bench.now)
    bench.settle()
    assert [peer.stops() for peer in listeners] == signalled
    why = "node b was asked to stop"
    for peer in listeners:
        drains = [order for order in peer.orders if isinstance(order, Drain) and order.generation == 2]
        assert drains == [Drain(2, False, why), Drain(2, True, why)]
    assert (bench.members(), a.generation, c.generation) == (["a", "c"], 3, 3)
    assert b.left() == Leave(Refusal.ASKED, "this node was asked to stop")


def test_no_node_stops_before_all_have_notified_their_workers(bench: Bench, listeners: list[Peer]) -> None:
    a, b, c = listeners
    c.obedient = False
    b.part.leave(bench.now)
    bench.settle()
    assert (bench.phase(), c.order) == (Phase.DRAINING, Drain(2, False, "node b was asked to stop"))
    assert a.record is not None
    assert a.record.conditions == {Condition.NOTIFIED, Condition.POLLING}
    c.part.workers_are(Condition.NOTIFIED, 2)
    bench.settle()
    assert bench.phase() is Phase.DRAINING, "its workers may not have heard of it"
    c.part.workers_are(Condition.POLLING, 2)
    bench.settle()
    world = bench.world()
    assert world is not None
    assert world.phase is Phase.LAST_STEP


def test_a_node_that_leaves_stays_until_the_others_have_what_they_go_on_with(
    bench: Bench, listeners: list[Peer]
) -> None:
    _, b, c = listeners
    c.obedient = False
    b.part.leave(bench.now)
    bench.settle()
    c.part.workers_are(Condition.NOTIFIED, 2)
    c.part.workers_are(Condition.POLLING, 2)
    bench.settle()
    assert b.generation == 0
    assert b.order == Stay()
    c.obedient = True
    bench.settle()
    assert bench.members() == ["a", "c"]
    assert b.left().why is Refusal.ASKED


def test_a_drain_ends_in_time(bench: Bench, listeners: list[Peer]) -> None:
    """Workers that listen and never come to the agreed step are signalled, and no node waits for them any longer."""
    a, b, c = listeners
    c.obedient = a.obedient = False
    b.part.leave(bench.now)
    bench.settle()
    for peer in (a, c):
        peer.part.workers_are(Condition.NOTIFIED, 2)
        peer.part.workers_are(Condition.POLLING, 2)
    bench.settle()
    wake_at = c.part.wake_at(bench.now)
    bench.after(POLICY.drain_timeout_s - TICK_S)
    assert wake_at is not None
    assert isinstance(c.order, Drain)
    bench.after(TICK_S)
    late = "node b was asked to stop; the workers did not end by themselves in time"
    assert c.order == a.order == Stop(2, True, late)
    assert b.order == Stay()
    c.part.workers_gone(2)
    bench.settle()
    assert a.order == Stop(2, True, "node b was asked to stop"), (
        "c has ended its workers: nobody comes to the step"
    )
    a.part.workers_gone(2)
    bench.settle()
    assert bench.members() == ["a", "c"]


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


def test_the_next_world_waits_for_what_a_leaving_node_hands_over(
    bench: Bench, with_memory: list[Peer]
) -> None:
    a, b = with_memory
    generation = b.generation
    b.part.leave(bench.now)
    bench.settle()
    assert b.part.hands_over
    assert not a.part.hands_over, "it stays"
    assert b.part.has(Condition.STATE_SAVED, generation)
    record = b.record
    assert record is not None
    assert (record.has(Condition.STATE_SAVED, generation), record.has_stopped(generation)) == (True, False)
    bench.after(ALONE.drain_timeout_s + 5.0)
    assert b.order == Stay(), "it does not leave meanwhile, either"
    assert bench.phase() is Phase.LAST_STEP
    b.part.handed_over()
    bench.settle()
    assert (bench.phase(), bench.members()) == (Phase.RUNNING, ["a"])
    assert b.left().why is Refusal.ASKED


def test_a_leaving_node_hands_over_also_where_its_workers_end_before_the_world_knows(
    bench: Bench, with_memory: list[Peer]
) -> None:
    """As they do beside a node that is lost at the same time."""
    b = with_memory[1]
    b.part.leave(bench.now)
    b.part.workers_gone(b.generation)
    assert bench.phase() is Phase.RUNNING
    assert b.part.hands_over


def test_a_node_whose_handover_is_cut_short_by_its_death_is_not_waited_for(
    bench: Bench, with_memory: list[Peer]
) -> None:
    a, b = with_memory
    generation = b.generation
    b.part.leave(bench.now)
    bench.settle()
    bench.kill(b)
    bench.after(TTL_S + 1.0)
    assert bench.members() == ["a"]
    assert a.generation == generation + 1


def test_nothing_is_handed_over_where_training_is_over(bench: Bench, with_memory: list[Peer]) -> None:
    for peer in with_memory:
        peer.part.leave(bench.now)
        peer.part.workers_are(Condition.SUCCEEDED, peer.generation)
        peer.part.workers_gone(peer.generation)
    bench.settle()
    assert not any(peer.part.hands_over for peer in with_memory)
    assert bench.phase() is Phase.ENDED


def test_a_drain_ends_on_all_nodes_at_once_where_a_machine_goes_away(
    bench: Bench, listeners: list[Peer]
) -> None:
    """None of the others' collectives breaks before they know why."""
    a, b, c = listeners
    for peer in listeners:
        peer.obedient = False
    b.part.leave(bench.now, bench.now + 6.0)
    bench.settle()
    assert isinstance(b.order, Drain)
    bench.after(4.0 - TICK_S)
    assert isinstance(a.order, Drain)
    bench.after(TICK_S)
    assert {peer.order for peer in (a, b, c)} == {Stop(2, True, "node b was asked to stop")}
    assert b.generation == 2, "it has killed none yet"


def test_a_machine_that_goes_away_waits_for_no_coordinator(bench: Bench, listeners: list[Peer]) -> None:
    a, b, _c = listeners
    for peer in listeners:
        peer.obedient = False
    b.part.leave(bench.now, bench.now + 6.0)
    bench.settle()
    bench.kill(a)
    bench.after(4.0)
    assert isinstance(b.order, Drain)
    bench.after(0.5)
    late = "node b was asked to stop; the workers did not end by themselves in time"
    assert b.order == Stop(2, True, late)


@pytest.mark.parametrize("last_step", [False, True], ids=["draining", "last step"])
def test_a_failure_during_a_drain_is_a_failure_at_once(
    bench: Bench, listeners: list[Peer], last_step: bool
) -> None:
    a, b, c = listeners
    a.obedient = c.obedient = False
    b.part.leave(bench.now)
    bench.settle()
    for peer in (a, c) if last_step else (c,):
        peer.part.workers_are(Condition.NOTIFIED, 2)
        peer.part.workers_are(Condition.POLLING, 2)
    bench.settle()
    assert bench.phase() is (Phase.LAST_STEP if last_step else Phase.DRAINING)
    c.part.workers_failed(Failure(2, "crash", "rank 4 raised"))
    bench.settle()
    assert a.order == c.order == Stop(2, False, "rank 4 raised")
    assert b.left().why is Refusal.ASKED


def test_a_node_lost_during_a_drain_ends_it(bench: Bench, listeners: list[Peer]) -> None:
    a, b, c = listeners
    a.obedient = False
    b.part.leave(bench.now)
    bench.settle()
    a.part.workers_are(Condition.NOTIFIED, 2)
    a.part.workers_are(Condition.POLLING, 2)
    bench.settle()
    bench.kill(c)
    bench.kv.revoke(c.part.lease or 0)
    bench.settle()
    assert a.order == Stop(2, False, "node c is gone: its lease ended")


def test_a_cold_node_is_not_waited_for(bench: Bench) -> None:
    bench.joined("a", "b")
    d = bench.join("d", ready=False)
    bench.settle()
    assert (bench.members(), d.generation) == (["a", "b"], 0)
    d.part.became_ready()
    bench.settle()
    assert bench.members() == ["a", "b", "d"]


def test_one_of_those_who_all_leave_brings_the_state_to_disk(bench: Bench, listeners: list[Peer]) -> None:
    for peer in listeners:
        peer.part.leave(bench.now)
    bench.join("d")
    bench.settle()
    world = bench.world()
    assert world is not None
    assert (world.phase, world.final_saver) == (Phase.STOPPING, "a-1")
    bench.after(1.0)
    assert bench.world() == world, "the state is still in the memory of those who leave"
    for peer in listeners:
        assert peer.left().why is Refusal.ASKED
        bench.kill(peer)
        bench.kv.revoke(peer.part.lease or 0)
    (_,) = bench.joined("e")
    assert bench.members() == ["d", "e"]


# ---------------------------------------------------------------- a wish that a node leaves


def test_a_node_hears_that_it_is_to_leave_and_takes_the_wish_away(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    for peer in (a, b):
        assert not peer.part.wanted_to_leave
    bench.put("drain/b", DrainRequest("b-1").to_json())
    bench.settle()
    assert (a.part.wanted_to_leave, b.part.wanted_to_leave) == (False, True)
    assert bench.entry("drain/b") is None
    assert b.count(Forget) == 1


def test_a_wish_that_came_before_the_node_joined_is_heard(bench: Bench) -> None:
    bench.put("drain/a", DrainRequest("a-1").to_json())
    (a,) = bench.joined("a", policy=ALONE)
    assert a.part.wanted_to_leave
    assert bench.entry("drain/a") is None


@pytest.mark.parametrize("text", [DrainRequest("a-0").to_json(), "{", '{"v": 1}'])
def test_a_wish_for_another_life_of_the_agent_is_only_taken_away(bench: Bench, text: str) -> None:
    bench.put("drain/a", text)
    (a,) = bench.joined("a", policy=ALONE)
    assert not a.part.wanted_to_leave
    assert bench.entry("drain/a") is None


def test_a_wish_for_a_node_that_has_joined_again_is_for_its_agent(bench: Bench) -> None:
    (a,) = bench.joined("a", policy=ALONE)
    bench.kv.revoke(a.part.lease or 0)
    bench.settle()
    assert a.part.incarnation == "a-1.1"
    bench.put("drain/a", DrainRequest("a-1").to_json())
    bench.settle()
    assert a.part.wanted_to_leave


# ---------------------------------------------------------------- join timeout


def timed_out(bench: Bench, peer: Peer) -> str:
    bench.after(POLICY.join_timeout_s - TICK_S)
    assert peer.orders == []
    assert peer.part.wake_at(bench.now) is not None
    bench.after(TICK_S)
    refusal = peer.left()
    assert refusal.why is (Refusal.STORE_AWAY if "no answer" in refusal.reason else Refusal.JOIN_TIMEOUT)
    assert refusal.reason.startswith("no world within 60 s of --join-timeout, waiting: ")
    return refusal.reason


def test_the_join_timeout_says_how_many_nodes_are_missing(bench: Bench) -> None:
    reason = timed_out(bench, bench.join("a"))
    assert reason.endswith(": 1 more of at least 2 nodes (here: a)")


def test_the_join_timeout_says_who_coordinates(bench: Bench) -> None:
    policy = replace(POLICY, min_nodes=3)
    bench.join("a", policy)
    b = bench.join("b", policy)
    assert timed_out(bench, b).endswith("a coordinates; no new world from it yet")


def test_the_join_timeout_says_that_the_store_does_not_answer(bench: Bench) -> None:
    a = bench.join("a")
    a.connected = False
    assert timed_out(bench, a).endswith("the rendezvous store: no answer from store:2379")


def test_survivors_below_the_minimum_time_out_and_say_what_happened(bench: Bench) -> None:
    """Each wait has the whole timeout, however long the first one was."""
    a = bench.join("a")
    bench.after(POLICY.join_timeout_s - 1)
    (b,) = bench.joined("b")
    bench.kill(b)
    bench.after(POLICY.join_timeout_s)
    assert a.order == Stay()
    bench.after(TTL_S + 1)
    refusal = a.left()
    assert refusal.why is Refusal.JOIN_TIMEOUT
    assert "waiting: 1 more of at least 2 nodes (here: a; last: node b is gone" in refusal.reason


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("b", "the rendezvous store: no answer from store:2379"),
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
    refusal = lonely.left()
    assert refusal.why is (Refusal.STORE_AWAY if "no answer" in refusal.reason else Refusal.JOIN_TIMEOUT)
    assert refusal.reason.endswith(reason)


def test_workers_that_stop_slowly_use_up_no_join_timeout(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    a.obedient = False
    bench.kill(b)
    bench.after(TTL_S + POLICY.join_timeout_s)
    assert a.stops()
    a.part.workers_gone(1)
    bench.settle()
    bench.after(POLICY.join_timeout_s - 1)
    assert a.order == Stay()
    bench.after(1)
    assert a.left().why is Refusal.JOIN_TIMEOUT


def test_no_join_timeout_runs_while_workers_do(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    bench.after(POLICY.join_timeout_s * 3)
    assert (a.generation, b.generation) == (1, 1)
    assert (a.order, b.order) == (Stay(), Stay())


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
    world = bench.world()
    assert world is not None
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
AGAIN = replace(LASTING, runs_again=True)


def finish(*peers: Peer) -> None:
    for peer in peers:
        generation = peer.generation
        peer.part.workers_are(Condition.SUCCEEDED, generation)
        peer.part.workers_gone(generation)
    peers[0].bench.settle()


def test_who_comes_after_the_end_begins_anew_once_all_others_have_left(bench: Bench) -> None:
    a, b = bench.joined("a", "b", policy=AGAIN)
    first = a.generation
    finish(a, b)
    assert a.left().why is b.left().why is Result.SUCCEEDED
    again = [bench.join(name, AGAIN, life=2) for name in ("c", "d")]
    bench.settle()
    assert [peer.generation for peer in again] == [0, 0], "those of the old run are still here"
    assert not [peer for peer in again if isinstance(peer.order, Leave)]
    for peer in (a, b):
        bench.kv.revoke(peer.part.lease or 0)
        bench.kill(peer)
    bench.settle()
    assert [peer.generation for peer in again] == [first + 1] * 2


@pytest.mark.parametrize("all_have_left", [True, False])
def test_a_finished_job_does_not_begin_anew_because_an_agent_comes_late(
    bench: Bench, *, all_have_left: bool
) -> None:
    """A node that lost its power at the end, and whose unit is enabled."""
    lonely = replace(LASTING, min_nodes=1)
    a, b = bench.joined("a", "b", policy=lonely)
    finish(a, b)
    for peer in (a, b) if all_have_left else ():
        bench.kv.revoke(peer.part.lease or 0)
        bench.kill(peer)
    late = bench.join("c", lonely)
    bench.settle()
    order = late.left()
    assert order.why is Result.SUCCEEDED
    assert re.match("job .* had ended before this agent came: .*elastic-agent forget", order.reason)


def test_a_job_that_has_failed_begins_anew_when_it_is_started_again(bench: Bench) -> None:
    hopeless = replace(LASTING, max_nodes=1, min_nodes=1, restarts=RestartPolicy(max_failures=0))
    (a,) = bench.joined("a", policy=hopeless)
    first = a.generation
    a.part.workers_failed(Failure(first, "crash", "rank 0 raised"))
    bench.settle()
    assert a.left().why is Result.RESTARTS_EXHAUSTED
    bench.kv.revoke(a.part.lease or 0)
    bench.kill(a)
    again = bench.join("a", hopeless, life=2)
    bench.settle()
    assert again.generation == first + 1


def test_who_was_there_at_the_end_and_joins_again_ends_as_the_others_did(bench: Bench) -> None:
    """Its lease had ended: it may have been cut off while the others finished."""
    a, b = bench.joined("a", "b", policy=replace(LASTING, min_nodes=1))
    b.connected = False
    bench.after(TTL_S + 1)
    finish(a)
    bench.kv.revoke(a.part.lease or 0)
    bench.kill(a)
    b.connected = True
    bench.after(1)
    assert b.part.incarnation == "b-1.1"
    assert b.left().why is Result.SUCCEEDED


def test_where_the_store_ends_with_the_job_who_comes_late_ends_at_once(bench: Bench) -> None:
    a, b = bench.joined("a", "b")
    finish(a, b)
    late = bench.join("c")
    bench.settle()
    assert late.left().why is Result.SUCCEEDED
