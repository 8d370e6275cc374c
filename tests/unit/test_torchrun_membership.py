"""The rendezvous thread under torchrun, without the thread: what a turn leaves for the one that watches it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_agent.agent.common.ports import OfferedPort
from elastic_agent.agent.torchrun.membership import Membership, Place
from elastic_agent.rendezvous.node.node_actions import Stay, Stop
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, NodeRecord, Phase, World
from elastic_agent.rendezvous.store.memory import MemoryStore
from tests.policies import PLAIN_POLICY

WORLD = World(
    job="job",
    generation=1,
    phase=Phase.RUNNING,
    members=(Member("a", "a-1", 1, 0),),
    master=Endpoint("10.0.0.1", 29000),
    cause=Cause(CauseKind.START),
)


def made() -> Membership:
    return Membership(
        MemoryStore(),
        NodeRecord("a", "a-1", "10.0.0.1", 29000, slots=1),
        PLAIN_POLICY,
        cast(OfferedPort, None),
        lease_ttl_s=5.0,
        clock=lambda: 100.0,
        rng=random.Random(1),
    )


def test_an_excluded_node_comes_back_after_its_cool_down_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing here that could check it."""
    membership, said = made(), []
    participant = membership._participant
    monkeypatch.setattr(participant, "recheck_due", lambda now: True)
    monkeypatch.setattr(participant, "rechecked", lambda now, **found: said.append(found))
    membership._heartbeat = cast(Any, SimpleNamespace(turned=lambda at: None))
    membership._driver = cast(Any, SimpleNamespace(turn=lambda now: None))
    membership._turn()
    assert said == [{"passed": True, "summary": ""}]


def test_a_turn_after_which_the_workers_must_end_counts_before_the_thread_waits() -> None:
    """torchrun's agent ends them. The thread waits for that, and does not stand still."""
    membership = made()
    due: list[float | None] = []
    actions = iter((Stay(), Stop(1, False, "the lease is lost")))
    membership._place = Place(WORLD, 0, None)
    membership._heartbeat = cast(Any, SimpleNamespace(turned=due.append))
    membership._driver = cast(
        Any, SimpleNamespace(turn=lambda now: membership.carry_out(next(actions), now) or None)
    )
    membership._turn()
    membership._turn()
    assert due == [membership._participant.good_until(100.0), None]
