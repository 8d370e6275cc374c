"""The process of the memory server as the agent keeps it: started when there is work, and anew when it was killed."""

from __future__ import annotations

import logging
import os
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_agent.agent.checkpoints import processes
from elastic_agent.agent.checkpoints.folder import MemoryFolder
from elastic_agent.agent.checkpoints.processes import KEY, MemoryServer, NoKey, ServerPlace, key_of_job
from elastic_agent.agent.common.events import Event
from elastic_agent.rendezvous.errors import StoreUnavailable
from elastic_agent.rendezvous.store.interface import Delete, Put, Snapshot
from elastic_agent.rendezvous.store.memory import MemoryStore
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.replication.client import MemoryClient, order
from elastic_agent.worker.storage.replication.key_file import read_key
from elastic_agent.worker.storage.replication.messages import Replicate
from elastic_agent.worker.wire.messages import MAX_BYTES, REPORTS, ReplicationReport
from tests.io_threads import settle_io, started_io
from tests.memory_servers import DIRECTORY, Node, header_of, wait_for

PATIENCE_S = 20.0


class Agent:
    """The agent's side, in the thread of the test."""

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        self.memory = folder / "memory"
        self.memory.mkdir(0o700)
        self.reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.reports.bind(str(folder / "reports"))
        self.reports.settimeout(PATIENCE_S)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.orders = str(folder / "orders")
        place = ServerPlace(
            MemoryFolder(self.memory, 1 << 30), "x", folder / "orders", str(folder / "reports"), listener
        )
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.server = MemoryServer(place, store, dict(os.environ), started_io(), self.events.put)
        self.server.start()

    def turn(self, expected: Event) -> None:
        event = self.events.get(timeout=PATIENCE_S)
        assert event == expected
        assert callable(event)
        event()

    def close(self) -> None:
        self.server.close()
        settle_io()
        self.reports.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def agent(tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(processes, "PAUSE_S", 0.0)
    agent = Agent(tmp_path, store)
    yield agent
    agent.close()


def test_a_server_is_there_when_it_is_needed_and_ends_with_the_agent(agent: Agent, tmp_path: Path) -> None:
    key = read_key(str(agent.memory), PATIENCE_S)
    assert agent.server.pids == ()
    with ThreadPoolExecutor() as pool, MemoryClient(agent.address, key, PATIENCE_S) as client:
        found = pool.submit(client.copies, DIRECTORY)
        agent.turn(agent.server.wanted)
        assert found.result() == ()
    [pid] = agent.server.pids
    for file in ("cmdline", "environ"):
        content = Path(f"/proc/{pid}/{file}").read_bytes()
        assert key not in content
        assert key.hex().encode() not in content
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10
    agent.server.close()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_killed_server_goes_on_with_its_orders(
    agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    key = read_key(str(agent.memory), PATIENCE_S)
    partner = Node(tmp_path, "b", key=key)
    try:
        assert order(agent.orders, Replicate(DIRECTORY, 1, (0, 0), (partner.partner,)))
        agent.turn(agent.server.wanted)
        kept = agent.memory / f"{SlotFolder.of(DIRECTORY).directory}.replicate"
        wait_for(kept.exists, "the order to be kept")
        [pid] = agent.server.pids
        os.kill(pid, 9)
        agent.turn(agent.server.ended)
        agent.turn(agent.server.wanted)
        assert agent.server.pids not in ((), (pid,))
        source = Node.__new__(Node)
        source.memory = str(agent.memory)
        source.fill(header_of(3, 100), b"x" * 100)
        report = REPORTS.decode(agent.reports.recv(MAX_BYTES))
        assert isinstance(report, ReplicationReport)
        assert (report.step, report.unreachable) == (3, ())
        assert partner.replica("x", 3) == b"x" * 100
    finally:
        partner.close()
    assert "the memory server has ended, another is started: killed by SIGKILL" in caplog.text
    assert key.hex() not in caplog.text


def test_agents_of_one_job_have_one_key_and_those_of_another_another(
    tmp_path: Path, store: MemoryStore
) -> None:
    first = key_of_job(store)
    assert key_of_job(store) == key_of_job(store, bytes(32)) == first
    assert len(first) == 32
    assert key_of_job(MemoryStore()) != first
    store.transact((), (Put(KEY, "no key"),))
    with pytest.raises(NoKey, match="delete it") as refused:
        key_of_job(store)
    assert "no key'" not in str(refused.value)


def test_a_store_that_has_forgotten_the_key_is_told_it_and_one_with_another_is_believed(
    agent: Agent, store: MemoryStore
) -> None:
    """The c10d store of a job whose host has begun anew."""
    memory = str(agent.memory)
    key = read_key(memory, PATIENCE_S)
    store.transact((), (Delete(KEY),))
    agent.server.renew_key()
    wait_for(lambda: store.read((KEY,)).entries, "the key")
    assert key_of_job(store) == key
    store.transact((), (Put(KEY, bytes(range(32)).hex()),))
    agent.server.renew_key()
    wait_for(lambda: read_key(memory) == bytes(range(32)), "the other key")


def test_a_store_that_is_away_is_asked_again(tmp_path: Path) -> None:
    class Away(MemoryStore):
        asked = 0

        def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
            self.asked += 1
            if self.asked < 3:
                raise StoreUnavailable("away")
            return super().read(scopes, oldest_under)

    agent = Agent(tmp_path, Away())
    read_key(str(agent.memory), PATIENCE_S)
    agent.close()
