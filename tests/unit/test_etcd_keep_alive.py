"""How long a keep-alive waits for a member of etcd before it asks the next one."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace
from typing import Any

from elastic_agent.rendezvous.etcd.access import EtcdAccess
from elastic_agent.rendezvous.etcd.addresses import Address
from elastic_agent.rendezvous.etcd.channel import LEASE_KEEP_ALIVE, TXN, Connection

TIMEOUT_S = 60.0
FIRST_S = 30.0
NEXT_S = 15.0
THREE = (("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", 3))


class Members(Connection):
    """Each call runs into its deadline, without the time that this takes; the one after `silent` is answered."""

    def __init__(self, silent: int) -> None:
        super().__init__(EtcdAccess(THREE), TIMEOUT_S, random.Random(1))
        self.asked: list[tuple[int, float]] = []
        """The port, and how long it was given."""
        self._silent = silent

    def answered(self) -> None:
        self._answered_at = time.monotonic()

    def _made(self, address: Address) -> Any:
        def call(_method: object, _request: object, timeout_s: float, _metadata: object) -> str:
            self.asked.append((address.port, timeout_s))
            if len(self.asked) > self._silent:
                return "answer"
            raise self._deadline_exceeded()

        return SimpleNamespace(address=address, made_at=-math.inf, call=call, close=lambda: None)

    def _deadline_exceeded(self) -> Exception:
        error: Exception = self.rpc.grpc.RpcError()
        error.code = lambda: SimpleNamespace(name="DEADLINE_EXCEEDED")  # type: ignore[attr-defined]
        error.details = lambda: ""  # type: ignore[attr-defined]
        return error


def test_a_keep_alive_hurries_from_member_to_member() -> None:
    members = Members(silent=7)
    members.answered()
    assert members.call(LEASE_KEEP_ALIVE, None, hedged=True) == "answer"
    ports = [port for port, _ in members.asked]
    assert ports == [*ports[:3], *ports[:3], *ports[:2]]
    assert set(ports[:3]) == {1, 2, 3}
    assert [timeout_s for _, timeout_s in members.asked] == [FIRST_S, *[NEXT_S] * 7]


def test_when_its_lease_is_past_saving_it_takes_its_time() -> None:
    members = Members(silent=2)
    assert members.call(LEASE_KEEP_ALIVE, None, hedged=True) == "answer"
    assert [timeout_s > FIRST_S for _, timeout_s in members.asked] == [False, True, True]


def test_other_calls_have_all_their_time_at_one_member() -> None:
    members = Members(silent=1)
    members.answered()
    members.call(TXN, None, repeatable=True)
    assert [timeout_s > FIRST_S for _, timeout_s in members.asked] == [True, True]
