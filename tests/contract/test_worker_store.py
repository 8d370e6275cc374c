"""The workers' stores as their clients see them, served by a real process; the test stands where the agent does."""

from __future__ import annotations

import errno
import os
import queue
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from torch.distributed import TCPStore

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.common.ports import bind_listener
from elastic_agent.agent.workers.processes import helper
from elastic_agent.agent.workers.processes.spares import Spares, WorkerStore
from tests.io_threads import started_io
from tests.spare_keeper import SpareKeeper, adopting

ADDRESS = "127.0.0.1"
PATIENCE_S = 60.0
"""Importing torch takes two seconds, and many more on a busy machine."""


class Node:
    """What is left of an agent when only its workers' store matters."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, keeper: SpareKeeper | None = None
    ) -> None:
        """With a `keeper` the server is one of its spares."""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.keeper = keeper
        spares = keeper.spares if keeper is not None else cast(Spares, NoSpares())
        self.store = WorkerStore(environment, spares, started_io(), self.events.put)
        self.problems: list[str] = []
        self.store.on_failure = self.problems.append

    def serve(self) -> socket.socket:
        """A generation begins."""
        if (keeper := self.keeper) is not None and not self.store.pids:
            keeper.run_until_prepared(1)
        listener = bind_listener(ADDRESS, 0, "master")
        self.port = listener.getsockname()[1]
        self.store.serve(listener)
        return listener

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            try:
                event = self.events.get(timeout=0.02)
            except queue.Empty:
                continue
            assert callable(event)
            event()

    def client(self) -> TCPStore:
        """Connected, by which time the server is ready. The agent hears events meanwhile."""
        patience = timedelta(seconds=PATIENCE_S)
        with ThreadPoolExecutor() as pool:
            future = pool.submit(
                TCPStore, ADDRESS, self.port, is_master=False, wait_for_workers=False, timeout=patience
            )
            self.run_until(future.done)
            return future.result()


class NoSpares:
    why_cold = "there are none"

    def hand_out(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def keeper() -> Iterator[SpareKeeper]:
    with adopting():
        keeper = SpareKeeper("torch.distributed").start()
        yield keeper
        keeper.spares.close()


@pytest.fixture(params=["cold", "warm"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """The server is a process of its own, or a spare."""
    node = Node(keeper=request.getfixturevalue("keeper") if request.param == "warm" else None)
    yield node
    node.store.close()


def refused(port: int) -> bool:
    with socket.socket() as visitor:
        return visitor.connect_ex((ADDRESS, port)) == errno.ECONNREFUSED


def torch_that(does: str, folder: Path) -> dict[str, str]:
    """An environment in which `import torch` does just this."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(does)
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_a_worker_that_comes_before_torch_is_imported_waits_and_is_served(node: Node) -> None:
    listener = node.serve()
    early = socket.create_connection((ADDRESS, node.port), timeout=1)
    client = node.client()
    client.set("key", "value")
    assert client.get("key") == b"value"
    assert listener.fileno() == -1, "the agent has closed its copy"
    early.close()


def test_each_generation_has_an_empty_store_and_the_last_ones_port_refuses(node: Node) -> None:
    node.serve()
    client, first, [pid] = node.client(), node.port, node.store.pids
    client.set("key", "of the first generation")
    node.store.close()
    assert refused(first)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    node.serve()
    assert not node.client().check(["key"])
    node.run_until(node.events.empty)
    assert not node.problems


def test_a_killed_server_ends_its_generation_and_the_next_one_gets_another(node: Node) -> None:
    node.serve()
    node.client()
    [pid] = node.store.pids
    os.kill(pid, signal.SIGKILL)
    node.run_until(lambda: bool(node.problems))
    (problem,) = node.problems
    assert problem.startswith(
        "the workers' store is gone: the process that served it ended: killed by SIGKILL"
    )
    assert refused(node.port), "workers are not left to wait"
    node.store.close()
    node.serve()
    node.client().set("key", "value")
    assert node.store.pids != (pid,)


def test_a_torch_that_cannot_be_imported_is_a_problem_that_is_reported(tmp_path: Path) -> None:
    node = Node(torch_that("raise ImportError('libc10.so is missing')", tmp_path))
    node.serve()
    node.run_until(lambda: bool(node.problems))
    assert node.problems[0].endswith("ended: exit code 1: ImportError: libc10.so is missing")
    assert refused(node.port)


def test_the_server_does_not_see_the_agents_modules_by_their_bare_names(tmp_path: Path) -> None:
    """A library that tries `import guard` means another."""
    looking = "from importlib.util import find_spec; raise ImportError(find_spec('guard'))"
    node = Node(torch_that(looking, tmp_path))
    node.serve()
    node.run_until(lambda: bool(node.problems))
    assert "ImportError: None" in node.problems[0]


def test_a_spare_that_cannot_serve_says_why(keeper: SpareKeeper) -> None:
    node = Node(keeper=keeper)
    keeper.run_until_prepared(1)
    nothing, of_nobody = socket.socketpair()  # of no port
    node.store.serve(nothing)
    of_nobody.close()
    node.run_until(lambda: bool(node.problems))
    assert re.search(r"ended: exit code 1: \S*Error: ", node.problems[0])


def test_a_server_that_does_not_die_stays_known_until_it_has_ended(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be taken for what a worker has left, and the generation would never end."""
    node.serve()
    [pid] = node.store.pids
    monkeypatch.setattr(helper, "KILL_WAIT_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(helper.os, "kill", lambda *_: None)  # as in uninterruptible sleep
        node.store.close()
    assert node.store.pids == (pid,)
    os.kill(pid, signal.SIGKILL)
    node.run_until(lambda: not node.store.pids)


def test_without_a_server_no_port_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(OSError):
        node.serve()
    assert refused(node.port)


def test_the_end_of_a_generation_ends_the_server_also_during_its_import(tmp_path: Path) -> None:
    node = Node(torch_that("import time; time.sleep(600)", tmp_path))
    node.serve()
    [pid] = node.store.pids
    node.store.close()
    assert refused(node.port)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_service_managers_signals_to_all_do_not_take_the_store_from_workers_in_their_grace(
    node: Node,
) -> None:
    node.serve()
    client = node.client()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(*node.store.pids, number)
    client.set("key", "value")
    assert client.get("key") == b"value"
