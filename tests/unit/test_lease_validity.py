"""Why a node may go on: its lease for a part of its time to live, then a whole world without a store, if allowed."""

from __future__ import annotations

import itertools
import math

import pytest

from elastic_agent.rendezvous.liveness import (
    BACK_MARGIN,
    LEASE_MARGIN,
    MOST_MEMBERS,
    QUIET_MARGIN,
    WHOLE_FRESH_S,
    FailureDetector,
    LeaseValidity,
    Peer,
    ProbeFailure,
    ProbeResult,
)
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, PeerStatus, Phase, World

TTL_S, GRACE_S = 10.0, 30.0
LATE = LEASE_MARGIN * TTL_S + 0.5
"""The lease alone is no proof any more."""


def peer(name: str) -> Peer:
    return Peer(f"{name}-1", Endpoint(name, 80))


def world(*names: str, generation: int = 3) -> World:
    members = tuple(Member(name, f"{name}-1", 1, rank, Endpoint(name, 80)) for rank, name in enumerate(names))
    return World("job", generation, Phase.RUNNING, members, Endpoint("a", 1), Cause(CauseKind.START))


def proof(name: str, *names: str, grace_s: float = GRACE_S) -> LeaseValidity:
    """Of node `name`, confirmed at 0, running the world of `names`."""
    made = LeaseValidity(TTL_S, grace_s)
    made.confirmed_at = 0.0
    made.runs(world(*names), f"{name}-1")
    return made


def runs(
    name: str, generation: int = 3, confirmed_s: float | None = LATE, whole_s: float | None = None
) -> ProbeResult:
    return PeerStatus(name, f"{name}-1", generation, confirmed_s, whole_s)


def test_a_lease_holds_for_its_margin_and_no_longer() -> None:
    node = proof("a", "a", "b", grace_s=0.0)
    end = LEASE_MARGIN * TTL_S
    assert node.holds(end - 0.001)
    assert not node.holds(end)
    assert not LeaseValidity(TTL_S, GRACE_S).holds(0.0), "nothing was ever confirmed"
    assert list(node.instants()) == [end]
    assert not node.suspects(1e9), "none is asked unless the operator allows it"


def test_a_lease_without_end_holds_from_its_first_confirmation_on() -> None:
    node = LeaseValidity(math.inf, 0.0)
    assert not node.holds(0.0)
    assert node.proven_until == -math.inf
    node.confirmed_at = 0.0
    node.runs(world("a"), "a-1")
    assert node.holds(1e9)
    assert node.lease_proven(1e9)


@pytest.mark.parametrize(("name", "asked"), [("a", {"b-1", "c-1"}), ("b", {"a-1"}), ("c", {"a-1"})])
def test_the_first_member_asks_all_and_the_others_ask_it(name: str, asked: set[str]) -> None:
    node = proof(name, "a", "b", "c")
    assert not node.suspects(QUIET_MARGIN * TTL_S - 0.001)
    assert set(node.suspects(QUIET_MARGIN * TTL_S)) == asked


def test_the_first_member_goes_on_while_all_others_run_its_generation_without_the_store() -> None:
    node = proof("a", "a", "b", "c")
    node.found(peer("b"), runs("b"), LATE)
    assert not node.holds(LATE), "nothing is known of c"
    node.found(peer("c"), runs("c", confirmed_s=None), LATE - 0.5)
    assert node.holds(LATE)
    assert LATE - node.whole_at == 0.5
    assert not node.holds(LATE - 0.5 + WHOLE_FRESH_S), "old news"


@pytest.mark.parametrize(
    "finding",
    [runs("c", generation=0), runs("c", generation=2), PeerStatus("c", "c-2", 3, LATE), ProbeFailure.REFUSED],
    ids=["stopped", "another generation", "another life", "refused"],
)
def test_one_member_that_does_not_go_on_ends_it_at_once(finding: ProbeResult) -> None:
    node = proof("a", "a", "b", "c")
    for name in ("b", "c"):
        node.found(peer(name), runs(name), LATE)
    assert node.holds(LATE)
    node.found(peer("c"), finding, LATE)
    assert not node.holds(LATE)
    assert node.whole_at == -math.inf


@pytest.mark.parametrize(("name", "other"), [("a", "b"), ("b", "a")])
def test_when_the_store_is_back_for_one_member_the_others_have_a_moment_to_reach_it(
    name: str, other: str
) -> None:
    """A keep-alive that is answered 10 ms later is soon enough; one that never is changes nothing."""
    node = proof(name, "a", "b")
    node.found(peer(other), runs(other, whole_s=0.0), LATE)
    back_at = LATE + 0.5
    node.found(peer(other), runs(other, confirmed_s=0.01), back_at)
    assert node.holds(back_at + 0.01)
    over_at = back_at + BACK_MARGIN * TTL_S
    assert any(at == pytest.approx(over_at) for at in node.instants()), "it looks again by itself"
    for again_at in (back_at + 0.5, back_at + 0.9):
        node.found(peer(other), runs(other, confirmed_s=0.01), again_at)
    assert node.holds(over_at - 0.01)
    assert not node.holds(over_at)


def test_the_moment_is_no_longer_than_the_proof_and_none_without_one() -> None:
    known, unknown = proof("a", "a", "b"), proof("a", "a", "b")
    known.found(peer("b"), runs("b"), LATE)
    for node in (known, unknown):
        node.found(peer("b"), runs("b", confirmed_s=0.01), LATE + WHOLE_FRESH_S - 0.1)
    assert known.holds(LATE + WHOLE_FRESH_S - 0.01)
    assert not known.holds(LATE + WHOLE_FRESH_S)
    assert not unknown.holds(LATE)


def test_silence_ends_it_when_the_last_answer_is_old() -> None:
    node = proof("a", "a", "b")
    node.found(peer("b"), runs("b"), LATE)
    node.found(peer("b"), ProbeFailure.SILENT, LATE + 1.0)
    assert node.holds(LATE + WHOLE_FRESH_S - 0.001)
    assert not node.holds(LATE + WHOLE_FRESH_S)


def test_another_member_relies_on_what_the_first_has_seen() -> None:
    node = proof("b", "a", "b", "c")
    node.found(peer("a"), runs("a", whole_s=None), LATE)
    assert not node.holds(LATE)
    node.found(peer("a"), runs("a", whole_s=1.5), LATE)
    assert node.holds(LATE)
    assert not node.holds(LATE - 1.5 + WHOLE_FRESH_S)
    node.found(peer("c"), runs("c", generation=0), LATE)
    assert node.holds(LATE), "what c says is for the first member to judge"


def test_the_grace_ends() -> None:
    node = proof("a", "a", "b")
    end = LEASE_MARGIN * TTL_S + GRACE_S
    node.found(peer("b"), runs("b"), end - 0.5)
    assert node.holds(end - 0.001)
    assert not node.holds(end)


@pytest.mark.parametrize(
    ("nodes", "may"), [(1, False), (2, True), (MOST_MEMBERS, True), (MOST_MEMBERS + 1, False)]
)
def test_a_world_of_one_node_or_of_very_many_proves_nothing(nodes: int, may: bool) -> None:
    """One has no peers, and the first of very many would do nothing but ask and answer."""
    node = proof("n0", *(f"n{number}" for number in range(nodes)))
    assert bool(node.suspects(LATE)) is may
    assert may or not node.holds(LATE)


def test_without_workers_there_is_nothing_to_go_on_with() -> None:
    node = proof("a", "a")
    node.runs(None, "a-1")
    assert not node.holds(LATE)
    assert node.whole_at == -math.inf


def test_a_member_that_cannot_be_asked_proves_nothing() -> None:
    node = LeaseValidity(TTL_S, GRACE_S)
    node.confirmed_at = 0.0
    members = (Member("a", "a-1", 1, 0), Member("b", "b-1", 1, 1, http=None))
    node.runs(World("job", 3, Phase.RUNNING, members, Endpoint("a", 1), Cause(CauseKind.START)), "a-1")
    assert not node.suspects(LATE)
    assert not node.holds(LATE)


def test_the_margins_leave_room_for_one_keep_alive() -> None:
    """The first node to run out of its margin must find that the others count as cut off."""
    interval = 1 / 5
    assert LEASE_MARGIN - interval > QUIET_MARGIN
    assert math.isfinite(WHOLE_FRESH_S)


INTERVAL_S = TTL_S / 5
"""Between keep-alives."""
ROUND_TRIP_S = TTL_S / 50


@pytest.mark.parametrize("ages", list(itertools.product((0.0, 0.35, 0.7, 0.99), repeat=3)), ids=str)
def test_a_world_that_loses_the_store_as_one_is_known_to_be_whole_in_time(ages: tuple[float, ...]) -> None:
    """Whatever part of an interval has passed since each node's last keep-alive."""
    names = ("a", "b", "c")
    nodes = {name: proof(name, *names) for name in names}
    for node, age in zip(nodes.values(), ages, strict=True):
        node.confirmed_at = -age * INTERVAL_S
    peers = {name: FailureDetector() for name in names}
    on_the_way: list[tuple[float, str, Peer, ProbeResult, float]] = []
    for now in (tick * 0.05 for tick in range(int(2 * LATE / 0.05))):
        for answer in [answer for answer in on_the_way if answer[0] <= now]:
            on_the_way.remove(answer)
            _, name, asked, finding, asked_at = answer
            nodes[name].found(asked, finding, asked_at)
            peers[name].found(asked, finding, now, nodes[name].ask_again_s(finding, asked_at, now))
        for name, node in nodes.items():
            assert node.holds(now), f"{name} stops at {now:.2f}"
            for asked in peers[name].suspect(node.suspects(now), now):
                other = nodes[asked.http.address]
                finding = runs(
                    asked.http.address,
                    confirmed_s=now - other.confirmed_at,
                    whole_s=now - other.whole_at if other.whole_at > -math.inf else None,
                )
                on_the_way.append((now + ROUND_TRIP_S, name, asked, finding, now))
