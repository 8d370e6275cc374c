"""A Checkpointer of sharded state without an agent: two ranks that write while all wait, as under torchrun."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elastic_agent.worker import Checkpointer
from elastic_agent.worker.checkpointing.loading.open_copies import MemoryReader
from elastic_agent.worker.checkpointing.loading.selection import CopyPlace
from elastic_agent.worker.checkpointing.sharded import saving as sharded_saving
from elastic_agent.worker.checkpointing.sharded import sharded_saves
from elastic_agent.worker.checkpointing.sharded.loaded_write import LoadedWrite
from elastic_agent.worker.checkpointing.sharded.shard_replicas import ShardReplicas
from elastic_agent.worker.errors import CheckpointError, DirectoryNotShared, NotReplicated
from elastic_agent.worker.ranks import comparison
from elastic_agent.worker.state.sharding.reading import OpenCopy
from elastic_agent.worker.steps import progress
from elastic_agent.worker.steps.drain import Checkpointers
from elastic_agent.worker.storage.disk import commit as commit_module
from elastic_agent.worker.storage.disk import sharded_save
from elastic_agent.worker.storage.disk.shard_files import data_name, read_footer
from elastic_agent.worker.storage.memory.slot_memory import SlotMemory
from elastic_agent.worker.storage.memory.slots import HeldSlot, Slots
from elastic_agent.worker.storage.replication.copy_rule import CopyVerdict
from elastic_agent.worker.wire.environment import WorkerEnv


def check_refusals(rank: int, folder: str, model: nn.Module) -> None:
    """Before any load."""
    with pytest.raises(ValueError, match="cannot be called 'ranks'"):
        Checkpointer(f"{folder}/refused", {"ranks": model})
    mixed = Checkpointer(f"{folder}/mixed", {"model": model} if rank else {"meta": {}})
    with pytest.raises(CheckpointError, match=r"sharded on ranks \[1\] and not on the others"):
        mixed.save(1)
    unequal = Checkpointer(f"{folder}/unequal", {"model": model, "table": {"rows": torch.ones(4) * rank}})
    with pytest.raises(
        NotReplicated, match="'rows' of part 'table' has other values on rank 1 than on rank 0"
    ):
        unequal.save(1)


def check_mixed_copies(rank: int, folder: str, model: nn.Module) -> None:
    """Without a load no rank with a plain state joins a collective for a copy. All are refused, whichever is first."""
    with pytest.MonkeyPatch.context() as patched:
        memory = Path(folder) / "mixed-memory"
        memory.mkdir(exist_ok=True)
        for name, value in {"MEMORY": memory, "MEMORY_BYTES": 1 << 30, "NODE": "n", "RUN": "run-a"}.items():
            patched.setenv(f"ELASTIC_AGENT_{name}", str(value))
        patched.setattr(comparison, "PATIENCE_S", 0.5)
        for first, own in ((0, ()), (1, ()), (0, ("meta",))):
            state: dict[str, Any] = {"model": model} if rank else {"meta": {}}
            directory = f"{folder}/mixed-copies-{first}-{len(own)}"
            mixed = Checkpointer(directory, state, per_rank=() if rank else own)
            time.sleep(0.2 * (rank != first))
            where = "this rank and not on another" if rank else "another rank and not on this"
            with pytest.raises(CheckpointError, match=f"sharded on {where} one: make the Checkpointer after"):
                mixed.save_to_memory(1)

        def store() -> None:
            raise dist.DistStoreError("recvValue failed")

        patched.setattr(dist.distributed_c10d, "_get_default_store", store)
        with pytest.raises(CheckpointError, match=r"does not say whether .* recvValue failed"):
            Checkpointer(f"{folder}/unknown", {"model": model} if rank else {"meta": {}}).save_to_memory(1)


@contextlib.contextmanager
def slots_gone(rank: int) -> Iterator[None]:
    """On rank 1 no copy can be lent to the disk."""

    def lend(_memory: SlotMemory, _version: tuple[int, int]) -> tuple[Slots, HeldSlot]:
        raise OSError("the slot is gone")

    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(SlotMemory, "lend", lend)
        yield


def check_missing_parts(rank: int, folder: str, model: nn.Module) -> None:
    """A rank that cannot begin to write says so: the commit does not wait for its part."""
    parts = {"model": model}

    def checkpoints(generation: int) -> Checkpointer:
        os.environ["ELASTIC_AGENT_GENERATION"] = str(generation)
        return Checkpointer(f"{folder}/parts", parts)

    with pytest.MonkeyPatch.context() as patched:
        memory = Path(folder) / "memory"
        memory.mkdir(exist_ok=True)
        agents = {"MEMORY": memory, "MEMORY_BYTES": 1 << 30, "NODE": "n", "RUN": "run-a", "WRITES": "/none"}
        for name, value in agents.items():
            patched.setenv(f"ELASTIC_AGENT_{name}", str(value))
        patched.setattr(sharded_save, "LEAST_S", 9.0)
        first = checkpoints(1)
        first.load()
        assert first.save_to_memory(1)
        dist.barrier()
        second = checkpoints(2)
        with slots_gone(rank):
            assert second.load() == 1
        started_s = time.monotonic()
        assert not second.wait()
        assert time.monotonic() - started_s < 9.0
        with slots_gone(rank):
            assert second.save(2), "in memory"
        assert not second.wait()
        saving: Any = second._state
        assert saving.save_last_step(3, leaves=True)
        with slots_gone(rank):
            saving.order_write(3)
        dist.barrier()
        (refused,) = (Path(folder) / "parts").glob("step-000000000003-*/__1_0.distcp")
        assert refused.stat().st_size < 1000, "a reason in the place of a part"
        check_last_step_of_busy_slots(saving, patched)
        # What the disk refuses is in memory, and is handed over from there.
        patched.setattr(saving, "_outlives_node", lambda *_: False)
        patched.setattr(saving, "_save", lambda *_, **__: False)
        assert saving.save_last_step(5, leaves=True)
    del os.environ["ELASTIC_AGENT_GENERATION"]


def check_unreadable_copies(rank: int, folder: str, model: nn.Module) -> None:
    """A copy that one rank cannot read is left aside by all: they go on from the version before it, if there is one."""

    def opened(reader: MemoryReader, place: CopyPlace, *how: Any) -> OpenCopy:
        if rank == 1 and place.header.step in unreadable:
            raise ValueError("it does not match its checksums")
        return original(reader, place, *how)

    original = MemoryReader._open_here
    unreadable = {2}
    with pytest.MonkeyPatch.context() as patched:
        memory = Path(folder) / "unreadable"
        memory.mkdir(exist_ok=True)
        agents = {"MEMORY": memory, "MEMORY_BYTES": 1 << 30, "NODE": "n", "RUN": "run-a", "GENERATION": 1}
        for name, value in agents.items():
            patched.setenv(f"ELASTIC_AGENT_{name}", str(value))
        done = {"done": 0}
        checkpoints = Checkpointer(f"{folder}/unreadable-runs", {"model": model, "meta": done})
        assert checkpoints.load() == 0
        for step in (1, 2):
            done["done"] = step
            assert checkpoints.save_to_memory(step)
        dist.barrier()
        patched.setenv("ELASTIC_AGENT_GENERATION", "2")
        patched.setattr(MemoryReader, "_open_here", opened)
        again = Checkpointer(f"{folder}/unreadable-runs", {"model": model, "meta": done})
        assert again.load() == 1
        assert done == {"done": 1}
        unreadable.add(1)
        patched.setenv("ELASTIC_AGENT_GENERATION", "3")
        anew = Checkpointer(f"{folder}/unreadable-runs", {"model": model, "meta": done})
        assert anew.load() == 0, "nothing was loaded"


def check_interrupted_copy(rank: int, folder: str) -> None:
    """Rank 1 is killed in the first copy of its generation, and its twin has its shards: its random numbers go on."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    parts = {"model": fully_shard(nn.Linear(3, 2), mesh=mesh)}
    with pytest.MonkeyPatch.context() as patched:
        memory = Path(folder) / "interrupted"
        memory.mkdir(exist_ok=True)
        agents = {"MEMORY": memory, "MEMORY_BYTES": 1 << 30, "NODE": "n", "RUN": "run-a", "GENERATION": 1}
        for name, value in agents.items():
            patched.setenv(f"ELASTIC_AGENT_{name}", str(value))
        checkpoints = Checkpointer(f"{folder}/interrupted-runs", parts)
        assert checkpoints.load() == 0
        torch.manual_seed(rank)
        assert checkpoints.save_to_memory(1)
        drawn = torch.rand(3)
        if rank == 1:
            copies: Any = checkpoints._state
            copies._memory._slots.drop(lambda _version: True)
        dist.barrier()
        patched.setenv("ELASTIC_AGENT_GENERATION", "2")
        torch.manual_seed(7)
        again = Checkpointer(f"{folder}/interrupted-runs", parts)
        assert again.load() == 1
        assert torch.equal(torch.rand(3), drawn)
        # Rank 1 had no copy of its own: no disk writer can take what was loaded from there.
        assert again.wait(), "all ranks have written it"
        assert [path.stem for path in Path(f"{folder}/interrupted-runs").glob("step-*.json")] == [
            "step-000000000001"
        ]
        # And until there is one, a second loss may take what was loaded.
        state: Any = again._state
        for step in (2, 3):
            progress.step(step)
            assert max(state._memory.versions()) == (2, 2)
        patched.setenv("ELASTIC_AGENT_GENERATION", "3")
        third = Checkpointer(f"{folder}/interrupted-runs", parts)
        assert third.load() == 2
        with torch.no_grad():
            parts["model"].weight.add_(rank)
        assert not third.wait(), "what was loaded is no more"
        progress.step(4)
        assert max(state._memory.versions()) == (2, 2), "all ranks had their own"


def check_last_step_of_busy_slots(saving: Any, patched: pytest.MonkeyPatch) -> None:
    """All ranks write while training waits, after one wait for the slots."""
    waits: list[int] = []

    def await_turn(*of: Any) -> CopyVerdict:
        waits.append(1)
        return original(*of)

    original = saving._await_turn
    patched.setattr(saving, "_await_turn", await_turn)
    patched.setattr(sharded_saving, "SLOT_PATIENCE_S", 0.1)
    slots = saving._memory._slots
    with slots.hold("a"), slots.hold("b"):
        assert saving.save_last_step(4, leaves=True)
    assert len(waits) == 1


def check_directories(rank: int, folder: str, model: nn.Module) -> None:
    """Copies in memory are found by the directory's name: with two a lost node would send training back to step 0."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commit_module, "SEEN_WITHIN_S", 0.2)
        patched.setattr(sharded_saves.logger, "warning", lambda text, *_: told.append(text))
        with pytest.raises(
            DirectoryNotShared, match=rf"{folder}/of-0 on rank 0 and {folder}/of-1 on rank 1, and"
        ):
            Checkpointer(f"{folder}/of-{rank}", {"model": model}).load()
        assert not told
        if rank == 0:
            Path(folder, "mounted-0").mkdir()
            Path(folder, "mounted-1").symlink_to("mounted-0")
        dist.barrier()
        assert Checkpointer(f"{folder}/mounted-{rank}", {"model": model}).load() == 0
        assert ["Give all ranks the same name" in line for line in told] == [True] * (rank == 0)


def check_stages(rank: int, folder: str) -> None:
    """Of a pipeline: each rank has one, with names of its own."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("stage", "shard"))["shard"]
    stage = nn.Sequential(OrderedDict([(str(rank), nn.Linear(3, 2 + rank))]))
    optimizer = torch.optim.SGD(fully_shard(stage, mesh=mesh).parameters(), lr=0.1, momentum=0.9)
    parts = {"model": stage, "optimizer": optimizer}
    checkpoints = Checkpointer(f"{folder}/stages", parts)
    assert checkpoints.load() == 0
    stage(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert checkpoints.save(1)
    weights = [weight.full_tensor() for weight in stage.parameters()]
    optimizer.step()
    assert Checkpointer(f"{folder}/stages", parts, read_only=True).load() == 1
    assert all(map(torch.equal, weights, (weight.full_tensor() for weight in stage.parameters())))


def work(rank: int, folder: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    # As where each worker sees its own devices alone.
    place |= {"LOCAL_RANK": 0, "ELASTIC_AGENT_LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    # Each Checkpointer stands for that of a process of its own.
    multiprocessing.parent_process = lambda: None  # it stands for a worker
    Checkpointers.claim = lambda *_: None  # type: ignore[method-assign]
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 2))
    fully_shard(model)
    meta = {"done": 0}
    check_refusals(rank, folder, model)
    check_mixed_copies(rank, folder, model)
    checkpoints = Checkpointer(f"{folder}/runs", {"model": model, "meta": meta}, max_failed_saves=2)
    assert checkpoints.load() == 0
    assert not checkpoints.save_to_memory(1), "there is no agent, and no memory"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for step in (2, 4):  # more failures than may come in a row
        meta["done"] = step
        assert checkpoints.save(step)
        assert checkpoints.wait(), "durable to all ranks"
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        assert not checkpoints.save(step + 1), "refused alike on all ranks"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    weights = [weight.full_tensor() for weight in model.parameters()]
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    again = Checkpointer(f"{folder}/runs", {"model": model, "meta": meta}, read_only=True)
    random_state = torch.get_rng_state()
    assert again.load() == 4
    assert torch.equal(torch.get_rng_state(), random_state), "a reader leaves them"
    assert meta == {"done": 4}
    assert Checkpointer(f"{folder}/runs", {"model": model}, read_only=True).load() == 4, "some of the parts"
    assert all(
        torch.equal(*pair)
        for pair in zip(weights, (w.full_tensor() for w in model.parameters()), strict=True)
    )
    checkpoints.close()
    archive = Checkpointer(f"{folder}/runs", {"model": model, "meta": meta}, max_failed_saves=1)
    assert not archive.save(4), "an earlier generation has, and this is no failure"
    archive.close()
    check_missing_parts(rank, folder, model)
    check_unreadable_copies(rank, folder, model)
    check_interrupted_copy(rank, folder)
    check_stages(rank, folder)
    check_directories(rank, folder, model)
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_are_one_run_and_count_alike(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), 2)
    assert len(list((tmp_path / "runs").glob("step-*.json"))) == 2
    (newest,) = (tmp_path / "runs").glob("step-000000000004-*")
    keepers = []
    for rank in range(2):
        with (newest / data_name(rank)).open("rb") as part:
            keepers.append(read_footer(part)[0].common)
    assert keepers == [True, False]


def test_a_memory_server_that_is_gone_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    memory: Any = SimpleNamespace(keeps_common=True)
    replicas = ShardReplicas("runs", WorkerEnv(memory_server="/nonexistent"), memory)
    for step in range(3):
        replicas.settled((1, step))
    assert caplog.text.count("takes no orders") == 1


@pytest.mark.parametrize(
    ("generation", "run", "durable"), [(3, "a", True), (4, "a", True), (2, "a", False), (3, "b", False)]
)
def test_only_a_checkpoint_of_that_version_makes_it_durable(generation: int, run: str, durable: bool) -> None:
    """One of the same step may be of a past that was given up, as below a state that crashed every load."""
    newest = SimpleNamespace(step=20, generation=generation, run=run)
    files = SimpleNamespace(newest_manifest=lambda: newest, run=SimpleNamespace(id="a"))
    loaded: Any = SimpleNamespace(_files=files)
    assert LoadedWrite._is_on_disk(loaded, (3, 20)) is durable
