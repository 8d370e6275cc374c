"""The rendezvous thread under torchrun, without the thread."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_agent.agent.common.ports import OfferedPort
from elastic_agent.agent.torchrun.membership import Membership
from elastic_agent.rendezvous.records import NodeRecord
from elastic_agent.rendezvous.store.memory import MemoryStore
from tests.policies import PLAIN_POLICY


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
    membership._driver = cast(Any, SimpleNamespace(turn=lambda now: None))
    membership._turn()
    assert said == [{"passed": True, "summary": ""}]
