"""Sharded saves that processes of the agents bring to disk: two nodes with real writers, one directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.workers.checkpoints import disk_writer
from elastic_agent.worker.storage.disk import async_save
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.sharded.commit import new_attempt
from elastic_agent.worker.storage.disk.sharded.shard_saver import ShardedSave, ShardSaver
from elastic_agent.worker.wire.environment import WORKER_VARIABLES, WorkerEnv
from elastic_agent.worker.wire.run import Run
from tests.contract.test_disk_writer import Agent
from tests.shards import METADATA, copy_of, in_slot

RUN = Run("run-a")
WORLD_SIZE = 4
RANKS_PER_NODE = 2


class Node:
    """One agent with its writer, and its workers: each has a copy of step 10 in its slots, and a saver."""

    def __init__(self, folder: Path, directory: Path, first_rank: int) -> None:
        folder.mkdir()
        (folder / "memory").mkdir()
        self.agent = Agent(folder)
        self.folder = folder
        self.directory = directory
        self.ranks = range(first_rank, first_rank + RANKS_PER_NODE)
        self.savers = [self._saver(local_rank) for local_rank in range(RANKS_PER_NODE)]

    def _saver(self, local_rank: int) -> ShardSaver:
        env = WorkerEnv(
            generation=7,
            run=RUN.id,
            local_rank=local_rank,
            incarnation="x",
            socket=str(self.folder / "commits"),
            reports=str(self.folder / "reports"),
            writes=str(self.folder / "writes"),
        )
        return ShardSaver(CheckpointFiles(self.directory, keep=2, run=RUN), env)

    def begin(self, attempt: str, step: int, **change: object) -> None:
        for local_rank, rank in enumerate(self.ranks):
            raw, header = copy_of(rank, step, WORLD_SIZE, generation=7)
            slots = in_slot(self.folder / "memory", str(self.directory), local_rank, raw, header)
            save = ShardedSave(step, attempt, rank, WORLD_SIZE, 1000, None, METADATA if rank == 0 else b"")
            saver = self.savers[local_rank]
            saver.expect(save)
            saver.promise(step)
            saver.begin(slots, slots.hold(slots.newest_first()[0]))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def nodes(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    for name in WORKER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disk_writer, "PAUSE_S", 0.0)
    monkeypatch.setattr(async_save.atexit, "register", lambda _: None)
    made = [Node(tmp_path / f"node-{rank}", directory, rank) for rank in range(0, WORLD_SIZE, RANKS_PER_NODE)]
    yield made
    for node in made:
        node.agent.close()


def attempt_of(nodes: list[Node], step: int) -> str:
    return new_attempt(nodes[0].savers[0].files, step, 7)


def saved(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in directory.glob("step-*.json"))


def test_every_node_writes_its_own_and_the_first_one_commits(nodes: list[Node], directory: Path) -> None:
    attempt = attempt_of(nodes, 10)
    for node in nodes:
        node.begin(attempt, 10)
    nodes[0].agent.turn()
    assert saved(directory) == []
    nodes[1].agent.turn()
    outcomes = [saver.finish() for node in nodes for saver in node.savers]
    assert [outcome.error for outcome in outcomes if outcome is not None] == [""] * WORLD_SIZE
    assert saved(directory) == [10]
    assert all(saver.is_durable for node in nodes for saver in node.savers)
    files = CheckpointFiles(directory, keep=2, run=RUN)
    manifest = files.newest_manifest()
    assert manifest is not None
    for rank in range(WORLD_SIZE):
        raw, _ = copy_of(rank, 10, WORLD_SIZE, generation=7)
        with files.open_rank(manifest, rank) as copy:
            into = bytearray(len(raw))
            copy.read(0, into)
            assert into == raw
