"""The rendezvous thread under torchrun, without the thread: what a turn leaves for the one that watches it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

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


def test_a_turn_after_which_the_workers_must_end_counts_before_the_thread_waits() -> None:
    """torchrun's agent ends them. The thread waits for that, and does not stand still."""
    membership = Membership(
        MemoryStore(),
        NodeRecord("a", "a-1", "10.0.0.1", 29000, slots=1),
        PLAIN_POLICY,
        cast(OfferedPort, None),
        lease_ttl_s=5.0,
        clock=lambda: 100.0,
        rng=random.Random(1),
    )
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
