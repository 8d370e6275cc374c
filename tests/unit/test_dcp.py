"""DCP's save and load into a checkpoint directory: by two ranks, read by two, by one, and by DCP alone.

Without agents, and then as workers of two nodes: each with a folder in memory and a memory server, which are this
process's, as is the gate that a disk writer asks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elastic_agent.worker.dcp import ElasticStorageReader, ElasticStorageWriter, rank_storage
from elastic_agent.worker.dcp.rank_storage import storage_of
from elastic_agent.worker.errors import (
    BadCheckpoint,
    CheckpointError,
    DirectoryNotShared,
    Fenced,
    NotPlainData,
    NoUsableCheckpoint,
    SaveFailed,
    StepNotGrowing,
)
from elastic_agent.worker.storage.disk import commit as commit_module
from elastic_agent.worker.storage.disk import ownership
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder, all_folders_of
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.wire.environment import NAMES, WorkerEnv
from elastic_agent.worker.wire.messages import CommitGranted, CommitRefused
from tests.contract.test_disk_writer import Agent
from tests.memory_servers import Node, wait_for


def state(seed: int, *, sharded: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 3))
    if sharded:
        fully_shard(net, mesh=DeviceMesh("cpu", list(range(2))))
    return {"model": get_model_state_dict(net), "counts": {"seen": seed, "of": torch.arange(3) + seed}}


def whole(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        key: one.full_tensor() if hasattr(one, "full_tensor") else one for key, one in found["model"].items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = whole(one), whole(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert one["counts"]["seen"] == other["counts"]["seen"]
    assert torch.equal(one["counts"]["of"], other["counts"]["of"])


def load(
    directory: str, seed: int = 99, *, sharded: bool = True, step: int | None = None
) -> tuple[Any, int | None]:
    reader, found = ElasticStorageReader(directory, step=step), state(seed, sharded=sharded)
    dcp.load(found, storage_reader=reader)
    return found, reader.step


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def attempts(folder: str) -> list[Path]:
    return sorted(one for one in Path(folder).glob("step-*") if one.is_dir())


def failure(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return next(iter(caught.value.failures.values()))[0]


def without_room(rank: int, memory: Path, runs: str) -> None:
    """On rank 1's node: it writes its part while rank 0 has copied, and what is on disk is all that counts."""
    kept = storage_of(runs)._memory
    assert kept is not None
    limit = kept._limit
    if rank == 1:
        kept._limit = 0
    save(4, runs, 75)
    kept._limit = limit
    assert (75 in {step for part, _, step in copies_in(memory, runs) if not part.origin}) == (rank == 0)
    wait_for(lambda: 75 in manifests(runs), "the disk writer of rank 0")
    dist.barrier()
    found, step = load(runs)
    assert step == 75
    same(found, state(4))


def worker_of(folder: Path, rank: int, world_size: int, *, generation: int) -> dict[str, str]:
    """What an agent gives the only worker of a node."""
    node = f"n{rank}"
    env = WorkerEnv(
        generation,
        "run-a",
        node,
        0,
        incarnation="x",
        socket=str(folder / "commits"),
        reports=str(folder / "reports"),
        memory=str(folder / node),
        memory_bytes=1 << 30,
        writes=str(folder / "writes"),
        memory_server=str(folder / f"{node}.orders"),
        memory_address=(folder / f"{node}.address").read_text(),
        memory_replicas=1,
    )
    places = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return env.variables() | {name: str(value) for name, value in places.items()}


class Switch:
    """A file by which the ranks say what the gate of the agents answers."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "gate"

    def set(self, rank: int, to: str) -> None:
        dist.barrier()
        if rank == 0:
            self._file.write_text(to)
            wait_for(lambda: self._file.with_suffix(".is").exists() and self.now == to, to)
        dist.barrier()

    @property
    def now(self) -> str:
        return self._file.with_suffix(".is").read_text()

    def obey(self, agent: Agent, until: threading.Event) -> None:
        while not until.wait(0.005):
            with contextlib.suppress(FileNotFoundError):
                wanted = self._file.read_text()
                agent.gate.answer = CommitRefused("over") if wanted == "refuses" else CommitGranted(60.0)
                if wanted == "waits":
                    agent.gate.open.clear()
                else:
                    agent.gate.open.set()
                self._file.with_suffix(".is").write_text(wanted)


def manifests(directory: str) -> list[int]:
    return [int(one.stem[5:17]) for one in sorted(Path(directory).glob("step-*.json"))]


def save(seed: int, directory: str, step: int, **options: Any) -> None:
    dcp.save(state(seed), storage_writer=ElasticStorageWriter(directory, step=step, **options))


def copies_in(memory: Path, directory: str) -> list[tuple[SlotFolder, str, int]]:
    found = []
    for folder in all_folders_of(str(memory), SlotFolder.of(directory).directory):
        with contextlib.closing(Slots(str(memory), folder)) as slots:
            found += [(folder, name, header.step) for name, header in slots.headers().items()]
    return found


def replicas(memory: Path, directory: str) -> set[int]:
    return {step for folder, _, step in copies_in(memory, directory) if folder.origin}


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastic_agent").addHandler(handler)
    yield lines
    logging.getLogger("elastic_agent").removeHandler(handler)


def under_agents(rank: int, folder: Path, runs: str) -> None:
    gate = Switch(folder)
    memory = folder / f"n{rank}"
    with pytest.raises(CheckpointException) as caught:
        load(runs)
    assert isinstance(failure(caught), NoUsableCheckpoint)

    gate.set(rank, "waits")
    save(1, runs, 10)
    assert not manifests(runs), "the disk writer waits, and training does not"
    found, step = load(runs)
    assert step == 10
    same(found, state(1))
    gate.set(rank, "grants")
    save(2, runs, 20)
    assert 10 in manifests(runs), "the next save has waited for it"
    wait_for(lambda: manifests(runs) == [10, 20], "the newest save to be on disk")

    second = state(3)
    pending = dcp.async_save(second, storage_writer=ElasticStorageWriter(runs, step=30, durable=True))
    for tensor in second["model"].values():
        tensor.zero_()
    pending.result()  # type: ignore[union-attr]
    assert manifests(runs) == [20, 30]
    found, step = load(runs)
    assert step == 30
    same(found, state(3))
    plain = state(9)
    dcp.load(plain, storage_reader=dcp.FileSystemReader(attempts(runs)[-1]))
    same(plain, state(3))
    dist.barrier()

    not_shared(rank, folder)
    by_itself(rank, folder)
    refused(rank, gate, runs)
    several_at_once(runs)
    damaged(rank, memory, runs)
    without_room(rank, memory, runs)
    save(8, runs, 80)
    wait_for(lambda: 80 in replicas(memory, runs), "the other node's part to be here")


def not_shared(rank: int, folder: Path) -> None:
    commit_module.SEEN_WITHIN_S = 0.2
    runs = folder / f"of-{rank}"
    with pytest.raises(CheckpointException) as caught:
        save(1, str(runs), 1)
    assert isinstance(failure(caught), DirectoryNotShared)
    assert f"{folder / 'of-1'}: rank 1 on node n1 does not see there" in str(failure(caught))
    assert not copies_in(folder / "n1", str(folder / "of-1")), "what cannot be saved is not copied"


def by_itself(rank: int, folder: Path) -> None:
    """Each rank is a coordinator: at most one of them saves that step, and the others are refused."""
    runs, outcome = str(folder / "of-all"), ""
    dist.barrier()
    writer = ElasticStorageWriter(runs, step=1)
    try:
        dcp.save({"mine": torch.full((3,), float(rank))}, storage_writer=writer, no_dist=True)
    except CheckpointException as caught:
        error = next(iter(caught.failures.values()))[0]
        assert isinstance(error, StepNotGrowing), repr(error)
        outcome = str(error)
    outcomes: list[str] = ["", ""]
    dist.all_gather_object(outcomes, outcome)
    assert all("process" in one for one in outcomes if one)
    assert sum(not one for one in outcomes) == len(manifests(runs)) <= 1


def refused(rank: int, gate: Switch, runs: str) -> None:
    gate.set(rank, "refuses")
    save(4, runs, 40)
    with logged() as lines, pytest.raises(CheckpointException) as caught:
        save(5, runs, 41)
    assert isinstance(failure(caught), Fenced), "the next save says what became of the one before"
    assert any("a save is not on disk: step=40" in line for line in lines)
    found, step = load(runs)
    assert step == 41, "it is in memory nevertheless"
    same(found, state(5))
    gate.set(rank, "grants")
    save(6, runs, 42)
    assert 42 in manifests(runs), "after a refusal a save ends on disk"


class Waiting(ElasticStorageWriter):
    """A save that is under way on this rank until it `may_end`."""

    def __init__(self, directory: str, step: int) -> None:
        super().__init__(directory, step=step)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def write_data(self, *args: Any) -> Any:
        self.has_begun.set()
        assert self.may_end.wait(30)
        return super().write_data(*args)


def several_at_once(runs: str) -> None:
    other = dist.new_group()
    writer = Waiting(runs, step=50)
    first = dcp.async_save(state(1), storage_writer=writer)
    assert writer.has_begun.wait(30)
    dist.barrier(other)
    second = dcp.async_save(state(2), storage_writer=ElasticStorageWriter(runs, step=51), process_group=other)
    refusal = second.exception()  # type: ignore[union-attr]
    assert isinstance(refusal, CheckpointException)
    error = next(iter(refusal.failures.values()))[0]
    assert "ranks [0, 1] are still at another save" in str(error)
    assert "Wait for the future of the last dcp.async_save" in str(error)
    writer.may_end.set()
    first.result()  # type: ignore[union-attr]
    found, step = load(runs)
    assert step == 50
    same(found, state(1))
    save(2, runs, 51)
    found, step = load(runs)
    assert step == 51
    same(found, state(2))


def damaged(rank: int, memory: Path, runs: str) -> None:
    """Of rank 1's newest part no copy is good: what is on disk is loaded, and the log says why."""
    save(7, runs, 70, durable=True)
    wait_for(lambda: 70 in replicas(memory, runs), "the other node's part to be here")
    dist.barrier()
    for part, slot, step in copies_in(memory, runs):
        if step == 70 and bool(part.origin) == (rank == 0):
            flip(memory / part.name / f"{slot}.pt", 300)
    dist.barrier()
    with logged() as lines:
        found, step = load(runs)
    assert step == 70
    same(found, state(7))
    told = [line for line in lines if "a copy in memory cannot be read, trying another: step=70" in line]
    assert len(told) == (2 if rank == 0 else 0)
    dist.barrier()


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    without_agents(rank, f"{folder}/runs")
    os.environ |= worker_of(Path(folder), rank, 2, generation=1)
    try:
        under_agents(rank, Path(folder), f"{folder}/behind")
    finally:
        Path(folder, "gate").write_text("grants")
    dist.barrier()
    dist.destroy_process_group()


def without_agents(rank: int, runs: str) -> None:
    assert ElasticStorageReader(runs).step is None
    dist.barrier()
    dcp.save(state(1), storage_writer=ElasticStorageWriter(runs, step=10))
    found, step = load(runs)
    assert step == 10
    same(found, state(1))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(1), storage_writer=ElasticStorageWriter(runs, step=10))
    assert isinstance(failure(caught), StepNotGrowing)

    second = state(2)
    pending = dcp.async_save(second, storage_writer=ElasticStorageWriter(runs, step=20))
    for tensor in second["model"].values():
        tensor.zero_()  # what training does meanwhile is not saved
    pending.result()  # type: ignore[union-attr]
    found, step = load(runs)
    assert step == 20
    same(found, state(2))

    dcp.save(state(3), storage_writer=ElasticStorageWriter(runs, step=30))
    dist.barrier()
    assert [one.name[:17] for one in attempts(runs)] == ["step-000000000020", "step-000000000030"]
    plain = state(9)
    dcp.load(plain, storage_reader=dcp.FileSystemReader(attempts(runs)[-1]))
    same(plain, state(3))
    if rank == 0:
        flip(attempts(runs)[-1] / "__1_0.distcp", 300)
    dist.barrier()
    found, step = load(runs)
    assert step == 20, "all ranks fall back alike"
    same(found, state(2))
    dist.barrier()


@contextlib.contextmanager
def agents(folder: Path) -> Iterator[list[Node]]:
    nodes = [Node(folder, f"n{rank}") for rank in range(2)]
    for node in nodes:
        (folder / f"{node.name}.address").write_text(node.address)
    agent, over = Agent(folder), threading.Event()
    switch = threading.Thread(target=Switch(folder).obey, args=(agent, over), daemon=True)

    def launch() -> None:
        while not over.is_set():
            with contextlib.suppress(queue.Empty):
                agent.turn()
                over.wait()  # the disk writer ends with the thread that has started it

    launches = threading.Thread(target=launch, daemon=True)
    switch.start()
    launches.start()
    try:
        yield nodes
    finally:
        over.set()
        agent.close()
        for node in nodes:
            node.close()


def one_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch, other: Node) -> None:
    """The node of rank 1 stands by, with a damaged copy, and nothing is on disk: one rank takes what two had from its
    memory."""
    runs = str(folder / "behind")
    shutil.rmtree(runs)
    for part, slot, step in copies_in(Path(other.memory), runs):
        if step == 80 and not part.origin:
            for at in range(0, 5000, 40):  # a shard, wherever it lies
                flip(Path(other.memory) / part.name / f"{slot}.pt", at)
    with monkeypatch.context() as patch:
        for name, value in worker_of(folder, 0, 1, generation=2).items():
            patch.setenv(name, value)
        patch.setenv(NAMES["memory_standbys"], f"{other.name}={other.address}")
        found, step = load(runs, sharded=False)
        assert step == 80
        same(found, state(8, sharded=False))
        dcp.save(
            state(9, sharded=False),
            storage_writer=ElasticStorageWriter(runs, step=90, durable=True),
        )
        assert manifests(runs) == [90]
        found, step = load(runs, sharded=False)
        assert step == 90
        goes_back(runs)


def goes_back(runs: str) -> None:
    """In one process: what it has copied since must not come to disk, nor be loaded, for what it copies now."""

    def save_one(seed: int, step: int) -> None:
        dcp.save(state(seed, sharded=False), storage_writer=ElasticStorageWriter(runs, step=step))

    save_one(10, 91)
    save_one(11, 92)
    found, step = load(runs, sharded=False, step=91)
    same(found, state(10, sharded=False))
    for seed, at in ((20, 92), (21, 93)):
        save_one(seed, at)
        found, step = load(runs, sharded=False)
        assert step == at
        same(found, state(seed, sharded=False))
    wait_for(lambda: manifests(runs) == [92, 93], "the newest save to be on disk")
    reader, found = ElasticStorageReader(runs, step=92, memory=False), state(99, sharded=False)
    dcp.load(found, storage_reader=reader)
    same(found, state(20, sharded=False))


@pytest.mark.filterwarnings("ignore")
def test_what_two_ranks_have_saved_two_ranks_one_and_dcp_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agents(tmp_path) as nodes:
        mp.spawn(work, (str(tmp_path),), 2)
        one_is_left(tmp_path, monkeypatch, nodes[1])
    runs = str(tmp_path / "runs")
    found, step = load(runs, sharded=False)
    assert step == 20
    same(found, state(2, sharded=False))
    flip(attempts(runs)[0] / "__0_0.distcp", 300)
    with pytest.raises(CheckpointException) as caught:
        load(runs, sharded=False)
    assert isinstance(failure(caught), NoUsableCheckpoint)


class Failing(DefaultSavePlanner):
    """Where another rank fails, a writer is not told either."""

    def finish_plan(self, new_plan: Any) -> Any:
        raise RuntimeError("no plan")


@pytest.mark.filterwarnings("ignore")
def test_a_save_before_the_last_one_has_ended_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    runs = str(tmp_path)
    writer = Waiting(runs, step=10)
    first = dcp.async_save({"x": torch.ones(2)}, storage_writer=writer)
    assert writer.has_begun.wait(30)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.ones(2)}, storage_writer=ElasticStorageWriter(runs, step=20))
    assert "Wait for the future of the last dcp.async_save" in str(failure(caught))
    writer.may_end.set()
    first.result()  # type: ignore[union-attr]
    assert manifests(runs) == [10]
    with pytest.raises(CheckpointException, match="no plan"):
        dcp.save({"x": torch.ones(2)}, storage_writer=ElasticStorageWriter(runs, step=20), planner=Failing())
    after = dcp.async_save({"x": torch.ones(2)}, storage_writer=ElasticStorageWriter(runs, step=20))
    after.result()  # type: ignore[union-attr]
    assert manifests(runs) == [10, 20]


@pytest.mark.filterwarnings("ignore")
def test_the_writer_refuses_a_checkpoint_id_by_name(tmp_path: Path) -> None:
    writer = ElasticStorageWriter(tmp_path / "runs", step=1)
    with pytest.raises(
        ValueError, match=r"leave checkpoint_id out: .*ElasticStorageWriter\(directory, step="
    ):
        dcp.save({"x": torch.ones(2)}, storage_writer=writer, checkpoint_id=tmp_path / "step-1")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")
def test_one_process_keeps_one(tmp_path: Path) -> None:
    runs = str(tmp_path)
    for step in (1, 2):
        dcp.save(state(step, sharded=False), storage_writer=ElasticStorageWriter(runs, step=step, keep=1))
    assert len(attempts(runs)) == 1
    reader, found = ElasticStorageReader(runs), state(99, sharded=False)
    assert reader.step == 2
    reader.reset()
    found, _ = load(runs, sharded=False)
    same(found, state(2, sharded=False))


def save_one(seed: int, directory: str, step: int) -> None:
    dcp.save(state(seed, sharded=False), storage_writer=ElasticStorageWriter(directory, step=step, keep=3))


def no_lock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks here")


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """The only worker of that run and generation, after those before have ended."""

    def begin(run: str, generation: int) -> None:
        storage_of(str(tmp_path)).files.claim._lock.forget()
        rank_storage._storage.cache_clear()
        for name, value in WorkerEnv(generation, run, "n", 0).variables().items():
            monkeypatch.setenv(name, value)

    return begin


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", ["run-a", "run-b"])
@pytest.mark.parametrize("damage", [0, 300])
def test_what_is_newer_than_what_was_loaded_is_given_up(
    tmp_path: Path, begin: Callable[[str, int], None], run: str, damage: int
) -> None:
    """By the next generation of the same job, or by another job: a step of its own takes the place."""
    runs = str(tmp_path)
    begin("run-a", 1)
    for step in (1, 2, 3):
        save_one(step, runs, step)
    begin(run, 2)
    if damage:
        flip(attempts(runs)[-1] / "__0_0.distcp", damage)
    found, loaded = load(runs, sharded=False, step=None if damage else 2)
    assert loaded == 2
    same(found, state(2, sharded=False))
    save_one(13, runs, 3)
    with pytest.raises(CheckpointException) as caught:
        save_one(14, runs, 3)
    assert isinstance(failure(caught), StepNotGrowing), "it is not the one that was given up"
    found, loaded = load(runs, sharded=False)
    assert loaded == 3
    same(found, state(13, sharded=False))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("run", "locks"), [("run-a", True), ("run-b", True), ("run-b", False)])
def test_the_step_that_was_loaded_may_be_saved_again_and_none_before_it(
    tmp_path: Path, begin: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch, run: str, locks: bool
) -> None:
    """A script that ended behind its last save trains nothing when it is started again."""
    runs = str(tmp_path)
    if not locks:
        monkeypatch.setattr(ownership.fcntl, "flock", no_lock)
    begin("run-a", 1)
    save_one(1, runs, 5)
    begin(run, 2)
    load(runs, sharded=False)
    with pytest.raises(CheckpointException) as caught:
        save_one(2, runs, 4)
    assert isinstance(failure(caught), StepNotGrowing)
    assert "step 4 is not beyond step 5" in str(failure(caught))
    save_one(3, runs, 5)
    found, step = load(runs, sharded=False)
    assert step == 5
    same(found, state(3, sharded=False))


@pytest.mark.filterwarnings("ignore")  # DCP's, of a load without a process group
def test_a_rank_of_several_needs_the_process_group_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the rank would look at the disk alone, and miss what is in memory."""
    for name, value in WorkerEnv(1, "run-a", "n", 0).variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match=r"no process group.*call .*init_process_group\(\) before"):
        assert ElasticStorageReader(tmp_path).step is None
    with pytest.raises(CheckpointException, match="init_process_group"):
        load(str(tmp_path), sharded=False)
    assert ElasticStorageReader(tmp_path, memory=False).step is None


@pytest.mark.filterwarnings("ignore")
def test_damage_that_a_read_finds_names_the_step_to_everyone(tmp_path: Path) -> None:
    runs = str(tmp_path)
    large = {"weight": torch.randn(12 << 20), "seen": 1}
    dcp.save({"seen": 0}, storage_writer=ElasticStorageWriter(runs, step=1))
    dcp.save(large, storage_writer=ElasticStorageWriter(runs, step=2))
    flip(attempts(runs)[1] / "__0_0.distcp", 300)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"weight": torch.zeros(12 << 20), "seen": 0}, storage_reader=ElasticStorageReader(runs))
    bad = failure(caught)
    assert isinstance(bad, BadCheckpoint)
    again = pickle.loads(pickle.dumps(bad))
    assert (again.step, str(again)) == (2, str(bad))
    assert f"ElasticStorageReader({runs!r}, step=1)" in str(bad)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_a_training_has_removed_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    runs = str(tmp_path)
    save_one(1, runs, 1)
    reader = ElasticStorageReader(runs)
    assert reader.step == 1
    dcp.save(state(2, sharded=False), storage_writer=ElasticStorageWriter(runs, step=2, keep=1))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state(99, sharded=False), storage_reader=reader)
    assert "was removed while it was loaded" in str(failure(caught))
    assert not isinstance(failure(caught), BadCheckpoint)


@pytest.mark.parametrize("step", [-1, 1.5, "12", None, 10**19])
def test_what_is_no_step_is_refused_at_once(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match=r"step is .*expected the number of steps"):
        ElasticStorageWriter(tmp_path, step=step)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (lambda: torch.empty(3, device="meta"), "on the meta device"),
        (lambda: torch.eye(3).to_sparse(), "of the layout torch.sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantized tensor"),
    ],
    ids=["meta", "sparse", "quantized"],
)
def test_a_tensor_that_is_not_carried_is_named(
    tmp_path: Path, tensor: Callable[[], torch.Tensor], kind: str
) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"odd": tensor()}, storage_writer=ElasticStorageWriter(tmp_path, step=1))
    assert isinstance(failure(caught), NotPlainData)
    assert "'odd' is " in str(failure(caught))
    assert kind in str(failure(caught))


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "owner.json").mkdir()
    with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be read: .*Is a directory"):
        assert ElasticStorageReader(tmp_path).step is None


@pytest.mark.filterwarnings("ignore")
def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointException) as caught:
        save_one(1, str(tmp_path / "file"), 1)
    assert isinstance(failure(caught), SaveFailed)
    assert f"step 1 not saved in {tmp_path / 'file'}: [Errno 20]" in str(failure(caught))
