"""A worker to test in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.worker.steps.drain import Checkpointers
from elastic_agent.worker.wire.environment import WORKER_VARIABLES


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A worker leaves signals to its agent: agents that later tests start here must not inherit that."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A user's, that does nothing."""
    path = tmp_path / "train.py"
    path.write_text("pass\n")
    return str(path)


@pytest.fixture
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Checkpointer stands for that of a process of its own, as after a restart."""
    monkeypatch.setattr("elastic_agent.worker.steps.drain.Checkpointers.claim", lambda *_: None)


@pytest.fixture
def only_worker(own_processes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process is the only worker of an agent that keeps copies in this folder, and has not done anything yet."""
    for name in WORKER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "memory"
    folder.mkdir()
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "ELASTIC_AGENT_MEMORY": str(folder),
        "ELASTIC_AGENT_MEMORY_BYTES": str(1 << 30),
        "ELASTIC_AGENT_NODE": "a",
        "ELASTIC_AGENT_LOCAL_RANK": "0",
        "ELASTIC_AGENT_GENERATION": "1",
    }.items():
        monkeypatch.setenv(name, value)
    # By name: tests of other things need not load torch.
    monkeypatch.setattr("elastic_agent.worker.steps.progress._listeners", ())
    monkeypatch.setattr("elastic_agent.worker.steps.progress.checkpointers", Checkpointers())
    monkeypatch.setattr("elastic_agent.worker.storage.memory.slot_memory._used", set())
    return folder
