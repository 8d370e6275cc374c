"""How long a keep-alive waits for a member of etcd before it asks the next one, and what its answer proves."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.rendezvous.errors import StoreUnavailable
from elastic_agent.rendezvous.etcd.access import Address
from elastic_agent.rendezvous.etcd.channel import LEASE_KEEP_ALIVE, TXN, Connection, History, Seen
from elastic_agent.rendezvous.store.store_kind import KEEP_ALIVES_PER_TTL
from tests.etcd_servers import etcd_access

TIMEOUT_S = 60.0
FIRST_S = 30.0
NEXT_S = 15.0
THREE = (("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", 3))


class Members(Connection):
    """Each call runs into its deadline, without the time that this takes; the one after `silent` is answered."""

    def __init__(self, silent: int) -> None:
        super().__init__(etcd_access(THREE, ttl_s=TIMEOUT_S * KEEP_ALIVES_PER_TTL), random.Random(1))
        self.asked: list[tuple[int, float]] = []
        """The port, and how long it was given."""
        self._silent = silent
        self.local, self.common = (1, 5), (1, 5)
        """Cluster and revision: as the member in use has them, and as a majority does."""

    def answered(self) -> None:
        self._answered_at = time.monotonic()

    def _made(self, address: Address) -> Any:
        def call(method: object, _request: object, timeout_s: float, _metadata: object) -> Any:
            self.asked.append((address.port, timeout_s))
            if len(self.asked) > self._silent:
                return SimpleNamespace(
                    header=header(*self.local if method is LEASE_KEEP_ALIVE else self.common)
                )
            raise self.error()

        return SimpleNamespace(address=address, made_at=-math.inf, call=call, close=lambda: None)

    def error(self, code: str = "DEADLINE_EXCEEDED", detail: str = "") -> Exception:
        error: Exception = self.rpc.grpc.RpcError()
        error.code = lambda: SimpleNamespace(name=code)  # type: ignore[attr-defined]
        error.details = lambda: detail  # type: ignore[attr-defined]
        return error


def header(cluster: int, revision: int) -> Any:
    return SimpleNamespace(cluster_id=cluster, revision=revision)


def test_a_keep_alive_hurries_from_member_to_member() -> None:
    members = Members(silent=7)
    members.history.saw(header(1, 5), Seen())
    members.answered()
    members.call(LEASE_KEEP_ALIVE, None, hedged=True)
    ports = [port for port, _ in members.asked]
    assert ports == [*ports[:3], *ports[:3], *ports[:2]]
    assert set(ports[:3]) == {1, 2, 3}
    assert [timeout_s for _, timeout_s in members.asked] == [FIRST_S, *[NEXT_S] * 7]


def test_when_its_lease_is_past_saving_it_takes_its_time() -> None:
    members = Members(silent=2)
    members.history.saw(header(1, 5), Seen())
    members.call(LEASE_KEEP_ALIVE, None, hedged=True)
    assert [timeout_s > FIRST_S for _, timeout_s in members.asked] == [False, True, True]


def test_other_calls_have_all_their_time_at_one_member() -> None:
    members = Members(silent=1)
    members.answered()
    members.call(TXN, None, repeatable=True)
    assert [timeout_s > FIRST_S for _, timeout_s in members.asked] == [True, True]


def test_an_etcd_without_space_says_what_to_do() -> None:
    members = Members(silent=0)
    full = members.error("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded")
    problem = members.problem(members.channel(time.monotonic() + TIMEOUT_S), full, None)
    assert isinstance(problem, StoreUnavailable)
    assert "alarm disarm" in str(problem)
    assert "may have been done" not in str(problem)


@pytest.mark.parametrize(
    ("local", "common", "lives"),
    [
        pytest.param((1, 5), (1, 5), 0, id="nothing has changed"),
        pytest.param((1, 9), (1, 9), 0, id="all has gone on"),
        pytest.param((1, 3), (1, 5), 0, id="this member lags behind"),
        pytest.param((1, 3), (1, 3), 1, id="restored from a snapshot"),
        pytest.param((2, 5), (2, 5), 1, id="another cluster at the same revision"),
        pytest.param((2, 9), (2, 9), 1, id="another cluster that is further"),
    ],
)
def test_a_keep_alive_finds_out_that_the_store_has_gone_back(
    local: tuple[int, int], common: tuple[int, int], lives: int
) -> None:
    members = Members(silent=0)
    members.call(TXN, None)
    members.local, members.common = local, common
    for _ in range(3):
        members.call(LEASE_KEEP_ALIVE, None, hedged=True)
    assert members.history.seen == Seen(lives, *max(local, common))


def test_answers_that_overtake_each_other_are_no_store_that_goes_back() -> None:
    history = History()
    history.saw(header(1, 5), history.seen)
    asked = history.seen
    history.saw(header(1, 7), asked)
    history.saw(header(1, 6), asked)
    assert history.seen == Seen(0, 1, 7)
    early, late = asked, history.seen
    history.saw(header(1, 3), early)
    history.saw(header(1, 7), late)
    assert history.seen == Seen(1, 1, 3), "an answer of the store before says nothing of this one"
