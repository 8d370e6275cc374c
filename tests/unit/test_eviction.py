"""Nodes that are found to be gone by asking their agents (see `bench`): who is asked, when, and who is evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_agent.rendezvous.liveness import (
    ASK_AFTER_S,
    ASK_AGAIN_S,
    ASK_IN_TURN_S,
    TURNS,
    ProbeFailure,
    ProbeResult,
    slow_to_go_on,
)
from elastic_agent.rendezvous.node.node_actions import Leave, Start, Stop
from elastic_agent.rendezvous.node.transactions import WriteWorld
from elastic_agent.rendezvous.records import (
    Condition,
    Endpoint,
    Failure,
    NodeRecord,
    PeerStatus,
    Phase,
    World,
)

from .bench import POLICY, TICK_S, Bench, Peer
from .test_decide import stopping


@pytest.fixture
def bench() -> Bench:
    return Bench()


def http(name: str) -> Endpoint:
    return Endpoint(f"host-{name}", 80)


def ask(peer: Peer, *findings: ProbeResult) -> list[str]:
    """Let `peer` ask whom it wants to, and give it these answers in turn; returns who was asked."""
    asked = [*peer.probes, *peer.part.probes(peer.bench.now)]
    peer.probes.clear()
    for target, finding in zip(asked, findings, strict=False):
        peer.part.probed(target, finding, peer.bench.now, peer.bench.now)
    return [target.incarnation for target in asked]


def test_no_node_is_asked_while_all_is_well(bench: Bench) -> None:
    peers = bench.joined("a", "b", "c")
    bench.after(10.0)
    assert [ask(peer) for peer in peers] == [[], [], []]


def fail(peer: Peer) -> None:
    """A worker of this node ends because a connection broke."""
    generation = peer.generation
    peer.part.workers_failed(Failure(generation, "reset", "connection reset by peer"))
    peer.part.workers_gone(generation)


def broken_world(bench: Bench, dead: str) -> list[Peer]:
    """Node `dead` has vanished, and on one of the others a worker failed because of it."""
    peers = bench.joined("a", "b", "c")
    victim = next(peer for peer in peers if peer.name == dead)
    bench.kill(victim)
    living = [peer for peer in peers if peer is not victim]
    fail(living[-1])
    return living


def test_a_member_whose_agent_has_ended_is_evicted_with_the_next_world(bench: Bench) -> None:
    a, b = broken_world(bench, dead="c")
    bench.settle()
    assert ask(a) == [], "it is given a moment"
    bench.now += ASK_AFTER_S
    assert ask(a, ProbeFailure.REFUSED) == ["c-1"]
    bench.settle()
    assert bench.members() == ["a", "b"]
    assert "c" not in bench.records(), "its record went with the new world"
    world = bench.world()
    assert world is not None
    assert world.cause.detail == "node c is gone: its agent has ended"
    assert a.generation == b.generation == world.generation == 3


def test_a_node_that_all_wait_for_gets_its_name_back_as_soon_as_its_old_agent_is_found_to_be_gone(
    bench: Bench,
) -> None:
    """A service manager has started it again at once. Its lease would have gone on for seconds."""
    everybody = replace(POLICY, min_nodes=3)
    a, b, c = bench.joined("a", "b", "c", policy=everybody)
    bench.kill(c)
    fail(b)
    again = bench.join("c", everybody, life=2)
    bench.settle()
    bench.now += ASK_AFTER_S
    ask(a, ProbeFailure.REFUSED)
    bench.settle()
    assert "c" not in bench.records(), "no world can be closed without it, and still it is evicted"
    bench.after(TICK_S)
    assert bench.members() == ["a", "b", "c"]
    assert a.generation == b.generation == again.generation > 1
    world = bench.world()
    assert world is not None
    assert world.cause.detail == "node c is gone: its agent has ended"
    assert world.restarts.failures == 0, "lost nodes cost no budget"


@pytest.mark.parametrize("finding", [ProbeFailure.SILENT, PeerStatus("c", "c-1", 1)])
def test_a_member_that_is_silent_or_answers_keeps_its_place_and_is_asked_again(
    bench: Bench, finding: ProbeResult
) -> None:
    a, _ = broken_world(bench, dead="c")
    bench.settle()
    bench.now += ASK_AFTER_S
    assert ask(a, finding) == ["c-1"]
    bench.settle()
    assert bench.phase() is Phase.STOPPING
    assert ask(a) == []
    bench.now += ASK_AGAIN_S
    assert ask(a) == ["c-1"]


def test_another_life_behind_the_port_means_that_this_one_has_ended(bench: Bench) -> None:
    a, _ = broken_world(bench, dead="c")
    bench.settle()
    bench.now += ASK_AFTER_S
    ask(a, PeerStatus("c", "c-2", 0))
    bench.settle()
    assert bench.members() == ["a", "b"]


def test_a_dead_coordinator_is_evicted_by_the_first_member_that_waits_for_it(bench: Bench) -> None:
    b, c = broken_world(bench, dead="a")
    fail(b)
    bench.settle()
    assert bench.phase() is Phase.RUNNING, "no node is left to stop it"
    bench.now += ASK_AFTER_S
    assert (ask(b, ProbeFailure.REFUSED), ask(c)) == (["a-1"], []), "one after the other"
    bench.settle()
    assert bench.members() == ["c", "b"]
    assert "a" not in bench.records()
    assert b.snapshot.coordinates


def test_who_has_found_a_coordinator_gone_asks_the_next_one_at_once(bench: Bench) -> None:
    """The oldest records may all be of one rack, which is lost."""
    a, b, c = bench.joined("a", "b", "c")
    bench.kill(a)
    bench.kill(b)
    fail(c)
    bench.settle()
    bench.now += ASK_AFTER_S + ASK_IN_TURN_S
    assert ask(c, ProbeFailure.REFUSED) == ["a-1"]
    bench.settle()
    assert ask(c, ProbeFailure.REFUSED) == ["b-1"]
    bench.settle()
    assert c.snapshot.coordinates


def asks_after(world: World, mine: str) -> float | None:
    """How long this node waits for `n0`, which coordinates, before it asks it."""
    n0, me = (
        NodeRecord(name, name, "", 0, 1, http(name)).having(4, Condition.STOPPED) for name in ("n0", mine)
    )
    return next((after_s for _, after_s in slow_to_go_on(world, n0, me).values()), None)


@pytest.mark.parametrize("size", [3, 4, 9, 100, 1000])
def test_whatever_half_of_a_world_is_lost_one_of_the_other_soon_asks_the_coordinator(size: int) -> None:
    """The nodes of a rack stand side by side. The first node coordinates, as it mostly does."""
    names = [f"n{number}" for number in range(size)]
    world = stopping(*(NodeRecord(name, name, "", 0, 1) for name in names))
    asks = {name: after_s for name in names if (after_s := asks_after(world, name)) is not None}
    turns = [ASK_AFTER_S + turn * ASK_IN_TURN_S for turn in range(min(size - 1, len(TURNS)))]
    assert "n0" not in asks
    assert sorted(asks.values()) == turns
    half = size // 2
    for first in range(size - half + 1):
        left = {*names[:first], *names[first + half :]}
        assert (
            min(after_s for name, after_s in asks.items() if name in left) <= ASK_AFTER_S + 3 * ASK_IN_TURN_S
        )


def test_a_coordinator_that_has_not_failed_is_left_in_peace_by_those_who_train(bench: Bench) -> None:
    _, b, _ = bench.joined("a", "b", "c")
    bench.now += 60.0
    assert ask(b) == []


def eviction_of_c(bench: Bench) -> tuple[Peer, Peer, WriteWorld]:
    """The coordinator, the other survivor, and what the coordinator asks of the store, not carried out."""
    a, b = broken_world(bench, dead="c")
    bench.settle()
    bench.now += ASK_AFTER_S
    ask(a, ProbeFailure.REFUSED)
    request = a.part.request(bench.now)
    assert isinstance(request, WriteWorld)
    assert [gone.key for gone in request.evicted] == ["nodes/c"]
    return a, b, request


def test_a_record_that_changed_meanwhile_is_not_evicted(bench: Bench) -> None:
    """The coordinator's view is old: the node that refused has come back as another life."""
    a, _, request = eviction_of_c(bench)
    bench.put("nodes/c", NodeRecord("c", "c-2", "host-c", 7, 2, http("c"), ready=True).to_json())
    a.serve(request)
    assert bench.phase() is Phase.STOPPING, "all of the transaction or nothing"
    bench.settle()
    assert bench.members() == ["a", "b", "c"]
    assert bench.records()["c"].incarnation == "c-2"


def test_an_evicted_node_that_lives_stops_first_and_comes_back_as_another(bench: Bench) -> None:
    a, b, c = bench.joined("a", "b", "c")
    c.connected = False
    fail(b)
    bench.settle()
    bench.now += ASK_AFTER_S
    assert ask(a, ProbeFailure.REFUSED) == ["c-1"]
    bench.settle()
    assert bench.members() == ["a", "b"]
    c.connected = True
    bench.settle()
    assert [type(order) for order in c.orders[:2]] == [Start, Stop]
    assert c.part.incarnation == "c-1.1"
    assert bench.members() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "touch", [lambda bench: bench.delete("nodes/b"), lambda bench: bench.put("nodes/b", "x")]
)
def test_a_node_notices_that_another_writer_touched_its_record(
    bench: Bench, touch: Callable[[Bench], None]
) -> None:
    """Also one that stands by and writes nothing: it would wait for ever."""
    b = bench.joined("a", "b", policy=replace(POLICY, min_nodes=1, max_nodes=1))[1]
    assert b.generation == 0
    touch(bench)
    bench.settle()
    assert b.part.incarnation == "b-1.1" or isinstance(b.order, Leave)


def test_a_finding_that_comes_after_the_node_has_settled_is_ignored(bench: Bench) -> None:
    a, b, c = bench.joined("a", "b", "c")
    c.obedient = False
    fail(b)
    bench.settle()
    bench.now += ASK_AFTER_S
    (asked,) = a.part.probes(bench.now)
    c.obedient = True
    bench.settle()
    assert bench.members() == ["a", "b", "c"]
    a.part.probes(bench.now)
    a.part.probed(asked, ProbeFailure.REFUSED, bench.now, bench.now)
    bench.settle()
    assert "c" in bench.records()
    assert a.generation == b.generation == c.generation == 3
