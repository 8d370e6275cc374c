"""Sharded saves that processes of the agents bring to disk: two nodes with real writers, one directory."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.checkpoints import processes
from elastic_agent.worker.storage.disk import async_save, sharded_save
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.commit import new_attempt
from elastic_agent.worker.storage.disk.sharded_save import ShardedSave
from elastic_agent.worker.wire.environment import WORKER_VARIABLES, WorkerEnv
from elastic_agent.worker.wire.messages import (
    MAX_BYTES,
    REPORTS,
    CommitGranted,
    CommitOrder,
    CommitRefused,
    CommitUndecided,
    SaveReport,
    WriteOutcome,
    encode,
)
from tests.contract.test_disk_writer import PATIENCE_S, Agent, wait_for
from tests.shards import METADATA, RUN, check, copy_of, in_slot
from tests.stopping import stop

WORLD_SIZE = 4
RANKS_PER_NODE = 2
GENERATION = 7


class Node:
    """One agent with its writer, and its workers: each has its slots, and a saver."""

    def __init__(self, folder: Path, directory: Path, first_rank: int) -> None:
        folder.mkdir()
        (folder / "memory").mkdir()
        self.agent = Agent(folder)
        self.folder = folder
        self.directory = directory
        self.ranks = range(first_rank, first_rank + RANKS_PER_NODE)
        self.savers = [self._saver(local_rank) for local_rank in range(RANKS_PER_NODE)]

    def _saver(self, local_rank: int) -> async_save.DiskSaver:
        env = WorkerEnv(
            generation=GENERATION,
            run=RUN.id,
            local_rank=local_rank,
            incarnation="x",
            socket=str(self.folder / "commits"),
            reports=str(self.folder / "reports"),
            writes=str(self.folder / "writes"),
        )
        return async_save.DiskSaver(CheckpointFiles(self.directory, keep=2, run=RUN), env)

    def begin(self, attempt: str, step: int, *, leave_to_writer: bool = False) -> None:
        for local_rank, rank in enumerate(self.ranks):
            raw, header = copy_of(rank, step, WORLD_SIZE, generation=GENERATION)
            slots = in_slot(self.folder / "memory", str(self.directory), local_rank, raw, header)
            held = slots.hold(slots.newest_first()[0])
            saver = self.savers[local_rank]
            save = ShardedSave(step, attempt, rank, WORLD_SIZE, 1000, None, METADATA if rank == 0 else b"")
            if leave_to_writer:
                saver.leave_to_writer(save, slots, held)
            else:
                saver.promise(save)
                saver.begin(slots, held)

    def finish(self) -> list[WriteOutcome | None]:
        """As the ranks of a node would: none waits for another."""
        outcomes: list[WriteOutcome | None] = [None] * RANKS_PER_NODE

        def finish(local_rank: int) -> None:
            outcomes[local_rank] = self.savers[local_rank].finish()

        threads = [
            threading.Thread(target=finish, args=(local_rank,)) for local_rank in range(RANKS_PER_NODE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return outcomes

    @property
    def writer(self) -> int:
        (pid,) = self.agent.writer.pids
        return pid

    def kill_writer(self) -> None:
        os.kill(self.writer, signal.SIGKILL)
        self.agent.turn(self.agent.writer.ended)

    def reports(self, count: int) -> list[tuple[int, int, str, str]]:
        """Local rank, step, result and tier, of what the writer was ordered to do."""
        found = []
        while len(found) < count:
            report = REPORTS.decode(self.agent._reports.recv(MAX_BYTES + 1))
            assert isinstance(report, SaveReport)
            found.append((report.local_rank, report.step, report.result, report.tier))
        return sorted(found)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def nodes(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    for name in WORKER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes, "PAUSE_S", 0.0)
    monkeypatch.setattr(async_save.atexit, "register", lambda _: None)
    made = [Node(tmp_path / f"node-{rank}", directory, rank) for rank in range(0, WORLD_SIZE, RANKS_PER_NODE)]
    yield made
    for node in made:
        node.agent.close()


def attempt_of(nodes: list[Node], step: int) -> str:
    return new_attempt(nodes[0].savers[0].files, step, GENERATION)


def begin(nodes: list[Node], step: int, *, leave_to_writer: bool = False) -> str:
    attempt = attempt_of(nodes, step)
    for node in nodes:
        node.begin(attempt, step, leave_to_writer=leave_to_writer)
    return attempt


def turn(nodes: list[Node]) -> None:
    for node in nodes:
        node.agent.turn()


def finish(nodes: list[Node]) -> list[str]:
    """By rank, the error of its outcome; rank 0's last, as if its node were the slowest."""
    later = [node.finish() for node in reversed(nodes)]
    outcomes = [outcome for found in reversed(later) for outcome in found]
    assert None not in outcomes
    return [outcome.error for outcome in outcomes if outcome is not None]


def saved(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in directory.glob("step-*.json"))


def parts(directory: Path, attempt: str) -> list[str]:
    return sorted(path.name for path in (directory / attempt).glob("__*_0.distcp"))


def check_all(directory: Path, *expected: int) -> None:
    """All that is visible is whole."""
    reader = CheckpointFiles(directory, keep=2, run=RUN)
    assert saved(directory) == sorted(expected)
    for step in expected:
        checkpoint = reader.open(step)
        checkpoint.stream.close()
        check(reader, checkpoint.manifest)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return sorted(record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)


GOOD = [""] * WORLD_SIZE


def test_every_node_writes_its_own_and_the_first_one_commits(nodes: list[Node], directory: Path) -> None:
    begin(nodes, 10)
    nodes[0].agent.turn()
    assert nodes[0].reports(2) == [(0, 10, "ok", "part"), (1, 10, "ok", "part")]
    assert saved(directory) == []
    nodes[1].agent.turn()
    assert finish(nodes) == GOOD
    check_all(directory, 10)
    assert all(saver.is_durable for node in nodes for saver in node.savers)
    assert nodes[0].reports(1) == [(0, 10, "ok", "local")]
    assert nodes[1].reports(2) == [(0, 10, "ok", "part"), (1, 10, "ok", "part")]
    assert [saver.finish() for node in nodes for saver in node.savers] == [None] * WORLD_SIZE


def test_the_next_save_drops_the_oldest(nodes: list[Node], directory: Path) -> None:
    for step in (10, 20, 30):
        begin(nodes, step)
        if step == 10:
            turn(nodes)
        assert finish(nodes) == GOOD
    check_all(directory, 20, 30)


def test_ranks_whose_writer_dies_write_their_parts_themselves(
    nodes: list[Node], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes[1].agent.gate.open.clear()
    attempt = begin(nodes, 10)
    turn(nodes)
    wait_for(lambda: nodes[1].agent.gate.asked, "the second node's writer to ask")
    wait_for(lambda: len(parts(directory, attempt)) == RANKS_PER_NODE, "the parts of the first node")
    nodes[1].kill_writer()
    nodes[1].agent.gate.open.set()
    assert finish(nodes) == GOOD
    check_all(directory, 10)
    assert caplog.text.count("writes its checkpoint itself: step=10") == RANKS_PER_NODE


@pytest.mark.parametrize("when", ["before its parts", "while it waits"])
def test_rank_0_commits_itself_when_its_writer_has_died(
    nodes: list[Node], directory: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    if when == "before its parts":
        nodes[0].agent.gate.open.clear()
    attempt = begin(nodes, 10)
    nodes[0].agent.turn()
    if when == "while it waits":
        wait_for(lambda: len(parts(directory, attempt)) == RANKS_PER_NODE, "the parts of the first node")
    wait_for(lambda: nodes[0].agent.gate.asked, "the first node's writer to ask")
    nodes[0].kill_writer()
    nodes[0].agent.gate.open.set()
    nodes[1].agent.turn()
    assert finish(nodes) == GOOD
    check_all(directory, 10)
    assert "writes its checkpoint itself: step=10" in caplog.text


def test_what_ranks_that_died_have_ordered_is_committed_all_the_same(
    nodes: list[Node], directory: Path
) -> None:
    attempt = attempt_of(nodes, 10)
    for node in nodes:
        pid = os.fork()
        if pid == 0:
            node.begin(attempt, 10)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
    turn(nodes)
    wait_for(lambda: saved(directory), "the commit")
    check_all(directory, 10)


def test_a_part_that_never_comes_is_named_after_a_while(
    nodes: list[Node], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sharded_save, "CommitOrder", lambda *order: CommitOrder(*order[:-2], 0.3))
        nodes[0].begin(attempt_of(nodes, 10), 10)
    nodes[0].agent.turn()
    committed, part = nodes[0].finish()
    assert committed is not None
    assert part is not None
    assert (committed.error, part.error) == ("SaveFailed", "")
    assert "no part has come of rank 2, 3 within 0.3 s" in committed.reason
    assert not nodes[0].savers[0].is_durable
    assert saved(directory) == []
    begin(nodes, 20)
    nodes[1].agent.turn()
    assert finish(nodes) == GOOD
    check_all(directory, 20)
    assert len(list(directory.glob("step-*-run-a-*"))) == 1, "the attempt that failed is removed"


def test_a_generation_that_is_over_commits_nothing_and_ends_its_wait(
    nodes: list[Node], directory: Path
) -> None:
    nodes[0].agent.gate.answer = CommitGranted(0.2)
    attempt = begin(nodes, 10)
    nodes[0].agent.turn()
    wait_for(lambda: len(parts(directory, attempt)) == RANKS_PER_NODE, "the parts of the first node")
    for node in nodes:
        node.agent.gate.answer = CommitRefused("generation 8 has replaced it")
    nodes[1].agent.turn()
    assert finish(nodes) == ["Fenced", "", "Fenced", "Fenced"]
    assert saved(directory) == []


def test_an_unconfirmed_commit_is_no_checkpoint(nodes: list[Node], directory: Path) -> None:
    nodes[0].agent.gate.answer = CommitUndecided("the store is away")
    begin(nodes, 10)
    turn(nodes)
    assert finish(nodes) == ["Unconfirmed", "Unconfirmed", "", ""]
    assert saved(directory) == []


class FullDisk:
    """To one node's writer, which can make no file of more than so many bytes."""

    def __init__(self, node: Node) -> None:
        node.agent.gate.open.clear()
        self._node = node

    def begin(self) -> None:
        self._node.agent.turn()
        wait_for(lambda: self._node.agent.gate.asked, "the writer to ask")
        self._pid = self._node.writer
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        self._node.agent.gate.open.set()

    def end(self) -> None:
        unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, unlimited)


def test_a_full_disk_on_one_node_refuses_the_save_at_once_and_says_which(
    nodes: list[Node], directory: Path
) -> None:
    full = FullDisk(nodes[1])
    begin(nodes, 10)
    nodes[0].agent.turn()
    full.begin()
    committed, part = nodes[0].finish()
    assert committed is not None
    assert part is not None
    assert (committed.error, part.error) == ("SaveFailed", "")
    assert "cannot write its part: [Errno 27] File too large" in committed.reason
    assert [outcome.error for outcome in nodes[1].finish() if outcome is not None] == ["SaveFailed"] * 2
    assert nodes[1].reports(2) == [(0, 10, "error", "part"), (1, 10, "error", "part")]
    full.end()
    begin(nodes, 20)
    assert finish(nodes) == GOOD
    check_all(directory, 20)


def test_a_copy_that_was_lost_is_waited_for_by_no_one(nodes: list[Node], directory: Path) -> None:
    """A GPU's copy to the last rank's slot did not end, which this rank hears of only after the others have begun."""
    attempt = attempt_of(nodes, 10)
    nodes[0].begin(attempt, 10)
    nodes[0].agent.turn()
    for saver, rank in zip(nodes[1].savers, nodes[1].ranks, strict=True):
        saver.promise(ShardedSave(10, attempt, rank, WORLD_SIZE, 1000))
        outcome = saver.finish("the GPU has fallen off the bus")
        assert outcome is not None
        assert outcome.error == "SaveFailed"
    committed, _ = nodes[0].finish()
    assert committed is not None
    assert "rank 2 cannot write its part: the GPU has fallen off the bus" in committed.reason


def test_a_commit_that_rank_0_has_taken_back_is_made_once(
    nodes: list[Node], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer stood still, and changes nothing when it wakes."""
    nodes[0].agent.gate.open.clear()
    begin(nodes, 10)
    turn(nodes)
    wait_for(lambda: nodes[0].agent.gate.asked, "the first node's writer to ask")
    pid = nodes[0].writer
    stop(pid)
    nodes[0].agent.gate.open.set()
    for saver in nodes[0].savers:
        saver.clock = lambda: time.monotonic() + 10 * async_save.LEAST_S
    nodes[0].agent.gate.answer = CommitGranted(1000.0)
    assert finish(nodes) == GOOD
    check_all(directory, 10)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    os.kill(pid, signal.SIGCONT)
    join(end(nodes[:1], PATIENCE_S))
    assert errors(caplog) == []
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("second", [10, 20])
def test_saves_that_follow_each_other_do_not_remove_each_others_attempts(
    nodes: list[Node], directory: Path, second: int
) -> None:
    """As at a planned change: the second is ordered while the slow node has not begun the first."""
    begin(nodes, 10)
    nodes[0].agent.turn()
    attempt = begin(nodes, second, leave_to_writer=True)
    nodes[1].agent.turn()
    assert finish(nodes) == GOOD
    reader = CheckpointFiles(directory, keep=2, run=RUN)

    def newest() -> str:
        manifest = reader.newest_manifest()
        return manifest.file if manifest is not None else ""

    wait_for(lambda: newest() == attempt, "the second commit")
    check_all(directory, *sorted({10, second}))


# --- The end of the agents


def end(nodes: list[Node], within_s: float) -> list[threading.Thread]:
    ends = [threading.Thread(target=node.agent.writer.finish, args=(within_s,)) for node in nodes]
    for thread in ends:
        thread.start()
    return ends


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_the_end_of_the_agents_waits_for_what_was_ordered(
    nodes: list[Node], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(nodes, 10, leave_to_writer=True)
    for node in nodes:
        node.savers.clear()
    join(end(nodes, PATIENCE_S))
    check_all(directory, 10)
    assert errors(caplog) == []


def test_what_is_not_on_disk_at_the_end_of_the_agents_is_named(
    nodes: list[Node], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = FullDisk(nodes[1])
    begin(nodes, 10, leave_to_writer=True)
    nodes[0].agent.turn()
    full.begin()
    join(end(nodes, 2.0))
    first, *others = errors(caplog)
    assert first.startswith(f"rank 2's part of step 10 is NOT on disk in {directory}: [Errno 27]")
    assert [one.partition(" in ")[0] for one in others] == [
        "rank 3's part of step 10 is NOT on disk",
        "step 10 is NOT on disk",
    ]
    assert "rank 2 cannot write its part" in others[1] or "rank 3 cannot write its part" in others[1]
    assert saved(directory) == []


def test_a_disk_that_takes_the_last_parts_in_time_loses_nothing(
    nodes: list[Node], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = FullDisk(nodes[1])
    begin(nodes, 10, leave_to_writer=True)
    nodes[0].agent.turn()
    full.begin()
    ends = end(nodes, PATIENCE_S)
    wait_for(lambda: "part of step 10 is not on disk" in caplog.text, "the writer to try again")
    full.end()
    join(ends)
    check_all(directory, 10)
    assert errors(caplog) == []


def test_an_order_to_commit_without_an_index_disturbs_no_other(nodes: list[Node], directory: Path) -> None:
    order = CommitOrder(str(directory), 10, GENERATION, RUN.id, "x", WORLD_SIZE, WORLD_SIZE, 2, (), 60.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(nodes[0].agent.writer.path))
        client.sendall(encode(order))
        nodes[0].agent.turn()
        assert client.recv(100) == b""
    begin(nodes, 10)
    nodes[1].agent.turn()
    assert finish(nodes) == GOOD
