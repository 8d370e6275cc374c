"""What torch may expect of the handler behind `--rdzv-backend=etcd-v3`, and what the nodes do to each other through it.

A `Node` calls its handler from one thread, as torchrun's agent does. The store is in memory where it does not matter.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.metadata import entry_points
from typing import TypeVar

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from elastic_agent.agent.torchrun.creator import create_handler, creator
from elastic_agent.agent.torchrun.handler import BACKEND, EtcdV3Handler, read_parameters
from elastic_agent.agent.torchrun.membership import TURNS_EVERY_S
from elastic_agent.rendezvous.errors import StoreRefused, StoreUnavailable
from elastic_agent.rendezvous.records import (
    NODES_PREFIX,
    WORLD_KEY,
    Condition,
    NodeRecord,
    Phase,
    Result,
    World,
)
from elastic_agent.rendezvous.store.interface import Put, Store
from elastic_agent.rendezvous.store.kv_state import KvState
from elastic_agent.rendezvous.store.memory import MemoryStore
from tests.etcd_servers import EtcdCluster

PATIENCE_S = 30.0

T = TypeVar("T")


class SharedStore(MemoryStore):
    """It stays open when a node leaves, and can be away for a while."""

    away = False

    def _open(self) -> KvState:
        if self.away:
            raise StoreUnavailable("the test has taken it away")
        return super()._open()

    def close(self) -> None:
        pass

    def world(self) -> World:
        (entry,) = self.read((WORLD_KEY,)).entries
        return World.from_json(entry.value)

    def nodes(self) -> list[NodeRecord]:
        return [NodeRecord.from_json(entry.key, entry.value) for entry in self.read((NODES_PREFIX,)).entries]


def parameters(nnodes: str = "1:3", endpoint: str = "127.0.0.1:1", **conf: object) -> RendezvousParameters:
    least, _, most = nnodes.partition(":")
    conf = {"timeout": 900, "last_call_timeout": 0, "local_addr": "127.0.0.1", **conf}
    return RendezvousParameters(BACKEND, endpoint, "job", int(least), int(most or least), **conf)


class Node:
    def __init__(self, store: Store, nnodes: str = "1:3", **conf: object) -> None:
        self.handler = EtcdV3Handler(read_parameters(parameters(nnodes, **conf)), lambda: store)
        self._thread = ThreadPoolExecutor(1)

    def do(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def meet(self) -> Future[RendezvousInfo]:
        return self.do(self.handler.next_rendezvous)

    def finish(self) -> Future[bool]:
        return self.do(self.handler.shutdown)

    def give_up(self) -> Future[None]:
        def fail() -> None:
            try:
                raise RuntimeError("no restart is left")
            finally:
                self.handler.shutdown()

        return self.do(fail)

    def await_stop(self) -> None:
        wait_for(lambda: self.handler.num_nodes_waiting() > 0)

    def close(self) -> None:
        self.handler._leave()
        self._thread.shutdown()


@pytest.fixture
def store() -> SharedStore:
    return SharedStore()


@pytest.fixture
def new_node(store: SharedStore) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def new(nnodes: str = "1:3", **conf: object) -> Node:
        nodes.append(Node(store, nnodes, **conf))
        return nodes[-1]

    yield new
    store.away = False
    for node in nodes:
        node.close()


def wait_for(condition: Callable[[], T], within_s: float = PATIENCE_S) -> T:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def met(*futures: Future[RendezvousInfo]) -> list[RendezvousInfo]:
    """What the nodes of one world were told, by rank."""
    infos = sorted((future.result(PATIENCE_S) for future in futures), key=lambda info: info.rank)
    assert [(info.rank, info.world_size) for info in infos] == [(n, len(infos)) for n in range(len(infos))]
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
    return infos


# --- Names and parameters


def test_torch_finds_the_handler_under_the_name_that_it_gives_itself() -> None:
    found = {point.name: point for point in entry_points(group="torchrun.handlers")}
    assert BACKEND in found, "the package was installed before it had this entry point: install it again"
    assert found[BACKEND].load() is creator
    assert creator() is create_handler
    handler = create_handler(parameters())
    assert (handler.get_backend(), handler.get_run_id()) == (BACKEND, "job")
    assert handler.use_agent_store
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()


# --- Worlds


def test_nodes_meet_at_a_store_that_their_workers_can_use_too(new_node: Callable[..., Node]) -> None:
    first, second = met(*(new_node("2").meet() for _ in range(2)))
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
    master = first.bootstrap_store_info
    worker = TCPStore(master.master_addr, master.master_port, is_master=False, wait_for_workers=False)
    assert worker.add("count", 1) == 1


def test_a_node_joins_and_nothing_of_the_old_world_is_left(new_node: Callable[..., Node]) -> None:
    a = new_node()
    (old,) = met(a.meet())
    old.store.set("key", "value")
    b = new_node()
    joining = b.meet()
    a.await_stop()
    new, _ = met(a.meet(), joining)
    assert new.bootstrap_store_info.master_port != old.bootstrap_store_info.master_port
    assert not new.store.check(["key"])
    assert a.handler.num_nodes_waiting() == b.handler.num_nodes_waiting() == 0


def test_who_comes_later_stands_behind_those_who_were_there_and_the_first_ones_address_is_the_masters(
    new_node: Callable[..., Node],
) -> None:
    """torchrun's own backends sort by address: there the one at 127.0.0.1 would become rank 0."""
    nodes: list[Node] = []
    for number in (3, 2, 1):
        newcomer = new_node("1:3", local_addr=f"127.0.0.{number}")
        joining = newcomer.meet()
        for node in nodes:
            node.await_stop()
        infos = [future.result(PATIENCE_S) for future in (*(node.meet() for node in nodes), joining)]
        nodes.append(newcomer)
        assert [info.rank for info in infos] == list(range(len(nodes)))
        assert {info.world_size for info in infos} == {len(nodes)}
        assert {info.bootstrap_store_info.master_addr for info in infos} == {"127.0.0.3"}
    again = {node: node.meet() for node in reversed(nodes)}
    assert [again[node].result(PATIENCE_S).rank for node in nodes] == [0, 1, 2]


def test_a_node_beyond_the_limit_stands_by_without_end_and_takes_the_first_free_place(
    new_node: Callable[..., Node],
) -> None:
    a, b, spare = (new_node("1:2", last_call_timeout=1, lease_ttl=1, join_timeout=2) for _ in range(3))
    met(a.meet(), b.meet())
    standing_by = spare.meet()
    wait([standing_by], 2.5)  # beyond its join timeout
    assert not standing_by.done()
    assert [node.handler.num_nodes_waiting() for node in (a, b, spare)] == [0, 0, 0]
    b.do(b.handler._leave)
    a.await_stop()
    met(a.meet(), standing_by)
    assert a.handler.num_nodes_waiting() == 0


def test_a_lost_worker_restarts_all_nodes_and_names_its_own(
    new_node: Callable[..., Node], store: SharedStore
) -> None:
    a, b = nodes = [new_node("2") for _ in range(2)]
    met(*(node.meet() for node in nodes))
    again = a.meet()
    b.await_stop()
    assert store.world().cause.node == a.handler._node
    met(again, b.meet())
    assert store.world().restarts.failures == 1


def test_a_node_that_had_to_stop_has_not_failed(new_node: Callable[..., Node], store: SharedStore) -> None:
    """Also when the reason is gone before it asks for the next world."""
    store._clock = lambda: 0.0  # its leases do not end
    node = new_node("1", lease_ttl=1)
    met(node.meet())
    store.away = True
    node.await_stop()
    store.away = False
    wait_for(lambda: not node.handler.num_nodes_waiting())
    met(node.meet())
    assert (store.world().generation, store.world().restarts.failures) == (2, 0)


def test_the_store_may_be_away_and_no_call_waits_or_fails(
    new_node: Callable[..., Node], store: SharedStore
) -> None:
    node = new_node("1", lease_ttl=2)
    met(node.meet())
    assert node.handler.num_nodes_waiting() == 0
    store.away = True
    node.await_stop()
    assert not node.handler.is_closed()
    again = node.meet()
    store.away = False
    met(again)
    assert node.handler.num_nodes_waiting() == 0


def test_a_node_that_dies_before_it_has_met_the_others_is_not_waited_for(
    new_node: Callable[..., Node], store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, dying = new_node("1:2", last_call_timeout=20), new_node("1:2", last_call_timeout=20)

    def die(membership: object, place: object) -> None:
        wait([info], 0.5)  # long enough for a node that does not wait for the others
        dying.handler._leave()
        raise SystemExit

    monkeypatch.setattr(dying.handler, "_meet", die)
    info = a.meet()
    wait_for(store.nodes)  # so that `a` serves the store, and finds it in order
    taken = dying.meet()
    assert isinstance(taken.exception(PATIENCE_S), SystemExit)
    met(info)
    assert store.world().generation == 2


# --- Endings


def test_who_finishes_first_waits_for_the_others_and_does_not_disturb_them(
    new_node: Callable[..., Node], store: SharedStore
) -> None:
    a, b = nodes = [new_node("2") for _ in range(2)]
    met(*(node.meet() for node in nodes))
    finished = a.finish()
    wait_for(lambda: any(Condition.SUCCEEDED in node.conditions for node in store.nodes()))
    assert b.handler.num_nodes_waiting() == 0
    assert not finished.done()
    assert b.finish().result(PATIENCE_S)
    assert finished.result(PATIENCE_S)
    world = store.world()
    assert (world.phase, world.result, world.generation) == (Phase.ENDED, Result.SUCCEEDED, 1)
    assert not store.nodes(), "they leave at once"


def test_a_node_that_gives_up_ends_the_job_everywhere(
    new_node: Callable[..., Node], store: SharedStore
) -> None:
    a, b = nodes = [new_node("1:2", last_call_timeout=5) for _ in range(2)]
    met(*(node.meet() for node in nodes))
    with pytest.raises(RuntimeError, match="no restart is left"):
        a.give_up().result(PATIENCE_S)
    b.await_stop()
    with pytest.raises(RendezvousClosedError, match=f"{a.handler._node} gave up"):
        b.meet().result(PATIENCE_S)
    assert b.handler.is_closed()
    assert store.world().result is Result.RESTARTS_EXHAUSTED


def test_who_stood_by_until_the_job_succeeded_exits_without_a_failure(new_node: Callable[..., Node]) -> None:
    a, spare = (new_node("1:1") for _ in range(2))
    met(a.meet())
    standing_by = spare.meet()
    wait([standing_by], 0.5)
    assert not standing_by.done()
    assert a.finish().result(PATIENCE_S)
    with pytest.raises(RendezvousGracefulExitError, match=r"the job has ended: .* success"):
        standing_by.result(PATIENCE_S)
    assert spare.finish().result(PATIENCE_S)


def test_a_job_that_has_ended_can_be_run_again_under_its_name(
    new_node: Callable[..., Node], store: SharedStore
) -> None:
    for generation in (1, 2):
        node = new_node("1")
        met(node.meet())
        assert store.world().generation == generation
        assert not node.handler.is_closed()
        assert node.finish().result(PATIENCE_S)
        assert node.handler.is_closed()


def test_a_shutdown_may_be_repeated_and_leaves_nothing_to_call(new_node: Callable[..., Node]) -> None:
    node = new_node("1")
    node.do(lambda: None).result()  # so that its own thread is there
    before = set(threading.enumerate())
    met(node.meet())
    assert len(set(threading.enumerate()) - before) > 1
    assert [node.finish().result(PATIENCE_S) for _ in range(2)] == [True, True]
    assert node.handler.is_closed()
    assert node.handler.num_nodes_waiting() == 0
    with pytest.raises(RendezvousClosedError, match="has left"):
        node.meet().result(PATIENCE_S)
    wait_for(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("error", [StoreRefused("the password"), StoreUnavailable("no etcd")])
def test_a_store_that_cannot_be_reached_is_a_connection_error(error: Exception) -> None:
    def connect() -> Store:
        raise error

    handler = EtcdV3Handler(read_parameters(parameters()), connect)
    with pytest.raises(RendezvousConnectionError, match=str(error)):
        handler.next_rendezvous()
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()


def test_too_few_nodes_are_a_timeout(new_node: Callable[..., Node]) -> None:
    with pytest.raises(RendezvousTimeoutError, match="--join-timeout"):
        new_node("2", join_timeout=2, lease_ttl=1).meet().result(PATIENCE_S)


def test_what_another_program_wrote_is_a_state_error(
    new_node: Callable[..., Node], store: SharedStore
) -> None:
    store.transact((), (Put(WORLD_KEY, "something else"),))
    with pytest.raises(RendezvousStateError, match="another program"):
        new_node().meet().result(PATIENCE_S)


def test_a_store_that_never_comes_back_stops_the_workers_and_is_an_error(
    new_node: Callable[..., Node], store: SharedStore
) -> None:
    node = new_node("1", join_timeout=3, lease_ttl=1)
    met(node.meet())
    MemoryStore.close(store)
    node.await_stop()
    with pytest.raises(RendezvousTimeoutError, match="the rendezvous store"):
        node.meet().result(PATIENCE_S)


# --- The thread that drives the rendezvous


def test_a_rendezvous_thread_that_dies_gives_up_its_place(
    new_node: Callable[..., Node], store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = new_node("1", lease_ttl=1)
    met(node.meet())
    membership = node.handler._membership
    assert membership is not None

    def die() -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(membership, "_turn", die)
    wait_for(lambda: not store.nodes())
    node.await_stop()
    with pytest.raises(RendezvousStateError, match="the rendezvous thread has failed"):
        node.meet().result(PATIENCE_S)


def test_a_rendezvous_thread_that_stands_still_gives_up_its_place(
    new_node: Callable[..., Node], store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_agent.agent.torchrun.membership.STUCK_AFTER_S", 2 * TURNS_EVERY_S)
    node = new_node("1", lease_ttl=1)
    met(node.meet())
    membership, go_on = node.handler._membership, threading.Event()
    assert membership is not None
    turn = membership._turn

    def stand_still() -> float | None:
        go_on.wait()
        return turn()

    monkeypatch.setattr(membership, "_turn", stand_still)
    try:
        wait_for(lambda: not store.nodes())
        node.await_stop()
        with pytest.raises(RendezvousStateError, match="stands still"):
            node.meet().result(PATIENCE_S)
    finally:
        go_on.set()


# --- In a process of its own, on etcd

MEET = """
import sys
{before}
from torch.distributed.elastic.rendezvous import RendezvousParameters
from elastic_agent.agent.torchrun import handler
from elastic_agent.agent.torchrun.creator import create_handler
handler = create_handler(RendezvousParameters("etcd-v3", sys.argv[1], sys.argv[2], 1, 1, lease_ttl=60, join_timeout=90))
print(handler.next_rendezvous().world_size, flush=True)
sys.exit(3)
"""


def run(cluster: EtcdCluster, job: str, before: str = "") -> subprocess.CompletedProcess[str]:
    endpoint = cluster.url(0).removeprefix("http://")
    command = [sys.executable, "-c", MEET.format(before=before), endpoint, job]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_process_that_ends_without_shutdown_leaves_at_once_and_the_job_goes_on(
    shared_etcd: EtcdCluster,
) -> None:
    job = uuid.uuid4().hex
    for _ in range(2):
        ended = run(shared_etcd, job)
        assert (ended.returncode, ended.stdout) == (3, "1\n"), ended.stderr
        assert '"kvs"' not in shared_etcd.ctl("get", "--prefix", f"/elastic-agent/{job}/nodes/")
