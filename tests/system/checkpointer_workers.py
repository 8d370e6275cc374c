"""The workers of test_checkpointer: one process imports torch, every rank of every world is forked from it.

Reads one JSON request per line, runs that world to its end and answers with one JSON line: by rank, the wait
status and what the scenario returned. A world whose ranks do not all end by the deadline is killed.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import each_rank_states
import numpy
import torch
import torch._dynamo  # what DDP imports at its first use: a second less for each forked rank
import torch.distributed as dist
import unequal_states
from torch.nn.parallel import DistributedDataParallel
from unequal_states import attempt

from elastic_agent.worker import Checkpointer
from elastic_agent.worker.checkpointing.loading import open_copies, state_loader
from elastic_agent.worker.ranks import group
from elastic_agent.worker.state.sharding import layout
from elastic_agent.worker.steps import progress
from elastic_agent.worker.storage.disk import (
    checkpoint_files,
    commit,
    durable,
    ownership,
    parts,
    shard_files,
)
from elastic_agent.worker.storage.memory import slots
from elastic_agent.worker.wire import files

WORLD_DEADLINE_S = 40.0


# --- Scenarios: each runs on every rank and returns plain data


def save(rank: int, directory: str, step: int, texts: dict[str, str] | None = None) -> dict[str, Any]:
    """Save one checkpoint that knows its step, and what each rank draws next."""
    meta = {"text": (texts or {}).get(str(rank), f"after {step}")}
    result = attempt(lambda: Checkpointer(directory, {"meta": meta}).save(step))
    return {**result, "next": draw()}


def load(rank: int, directory: str, chunk_bytes: int = 64) -> dict[str, Any]:
    group.CHUNK_BYTES = chunk_bytes
    meta = {"text": "as the script set it"}
    result = attempt(Checkpointer(directory, {"meta": meta}).load)
    return {**result, "meta": meta["text"], "next": draw()}


def load_and_save(rank: int, directory: str, step: int) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    checkpoints = Checkpointer(directory, {"meta": meta})
    result = attempt(checkpoints.load)
    meta["text"] = f"after {step}"
    checkpoints.save(step)
    return result


def remember(
    rank: int, directory: str, steps: list[int], node: str = "a", local_rank: int = 0, text: str = ""
) -> dict[str, Any]:
    """Remember some steps, as a rank of that node; no rank waits for another."""
    be_of_node(node, local_rank)
    meta: dict[str, Any] = {}
    checkpoints = Checkpointer(directory, {"meta": meta})
    for step in steps:
        draw()
        meta["text"] = text or f"after {step}"
        checkpoints.save_to_memory(step)
    return {"next": draw()}


def recall(rank: int, directory: str, node: str = "a", local_rank: int = 0) -> dict[str, Any]:
    """Load, as a rank of that node, and tell what it has in memory then."""
    be_of_node(node, local_rank)
    answer = load(rank, directory)
    kept = [
        [one.step, one.generation, not one.rng_holes]
        for one in slots.Slots(memory_of(node), directory).headers().values()
    ]
    return {**answer, "kept": sorted(kept)}


def be_of_node(node: str, local_rank: int) -> None:
    os.makedirs(memory_of(node), exist_ok=True)
    os.environ.update(
        ELASTIC_AGENT_MEMORY=memory_of(node),
        ELASTIC_AGENT_MEMORY_BYTES=str(1 << 30),
        ELASTIC_AGENT_NODE=node,
        ELASTIC_AGENT_LOCAL_RANK=str(local_rank),
    )


def memory_of(node: str) -> str:
    return os.path.join(os.environ["TEST_MEMORY"], node)


def load_at(
    rank: int,
    directory: str,
    node: str,
    local_rank: int,
    memory: bool = True,
    limit: int = 1 << 30,
    as_directory: str = "",
) -> dict[str, Any]:
    """Load, as a rank of that node; which files it has read to verify them, and the one that it has mapped."""
    os.environ["ELASTIC_AGENT_NODE"] = node
    if memory:
        be_of_node(node, local_rank)
        os.environ["ELASTIC_AGENT_MEMORY_BYTES"] = str(limit)
    if as_directory:
        state_loader.StateLoader._place = lambda self: f"{node}:{as_directory}"
    verified, mapped = [], []

    def verify(copy: shard_files.DiskCopy) -> None:
        verified.append(copy.footer.step)
        really_verify(copy)

    def map_file(fd: int, *args: Any, **options: Any) -> Any:
        mapped.append(os.readlink(f"/proc/self/fd/{fd}"))
        return mmap.mmap(fd, *args, **options)

    really_verify, shard_files.DiskCopy.verify = shard_files.DiskCopy.verify, verify
    open_copies.mmap = Overlay(mmap, mmap=map_file)
    return {**load(rank, directory), "verified": verified, "mapped": mapped}


def load_while_the_disk_rots(rank: int, directory: str, error: bool) -> dict[str, Any]:
    """The owner's file verifies, and then cannot be read again or reads differently."""

    class Rotten(io.BufferedReader):
        def readinto(self, buffer: Any, /) -> int:
            if error:
                raise OSError(5, "Input/output error")
            count = super().readinto(buffer)
            buffer[0] ^= 1
            return count

    def find(self: checkpoint_files.CheckpointFiles, *unwanted: Any, verify: bool) -> Any:
        found, bad = really_find(self, *unwanted, verify=verify)
        if found is not None:
            found = checkpoint_files.VerifiedCheckpoint(
                found.manifest, Rotten(found.stream.detach()), found.footer
            )
        return found, bad

    really_find = checkpoint_files.CheckpointFiles.find
    checkpoint_files.CheckpointFiles.find = find
    return load(rank, directory)


def load_into_another_shape(rank: int, directory: str) -> dict[str, Any]:
    """Only rank 1's script is another one."""
    width = 3 if rank == 1 else 2
    model = torch.nn.Linear(width, 1)
    return attempt(Checkpointer(directory, {"model": model}).load)


def save_model(rank: int, directory: str) -> dict[str, Any]:
    return attempt(lambda: Checkpointer(directory, {"model": torch.nn.Linear(2, 1)}).save(1))


def save_different_steps(rank: int, directory: str) -> dict[str, Any]:
    return attempt(lambda: Checkpointer(directory, {"meta": {}}).save(10 + rank))


def save_backwards(rank: int, directory: str) -> dict[str, Any]:
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    return attempt(lambda: checkpoints.save(9))


def save_code(rank: int, directory: str) -> dict[str, Any]:
    return attempt(lambda: Checkpointer(directory, {"meta": {"generator": random.Random(rank)}}).save(10))


def save_with_a_broken_state_dict(rank: int, directory: str) -> dict[str, Any]:
    class Part:
        def state_dict(self) -> Any:
            raise ZeroDivisionError("a bug in the script")

        def load_state_dict(self, state: Any) -> None:
            pass

    return attempt(lambda: Checkpointer(directory, {"part": Part()}).save(10))


def save_on_a_failing_disk(rank: int, directory: str) -> dict[str, Any]:
    """Rank 0's disk fails twice, works once, then fails until the limit is reached."""
    failing = iter([True, True, False, True, True, True])

    def fsync(fd: int) -> None:
        if fail:
            raise OSError(28, "No space left on device")

    checkpoint_files.os = ownership.os = durable.os = files.os = Overlay(fsync=fsync)
    checkpoints = Checkpointer(directory, {"meta": {}}, max_failed_saves=3)
    results = []
    for step, fail in enumerate(failing, start=1):  # noqa: B007  # fsync reads it
        results.append(attempt(lambda: checkpoints.save(step)))  # noqa: B023  # called at once
    return {"results": results}


def leave_save(rank: int, directory: str) -> dict[str, Any]:
    """What of the checkpoint is visible when save() returns, though rank 0's disk is slow."""

    def fsync(fd: int) -> None:
        time.sleep(0.1)
        os.fsync(fd)

    checkpoint_files.os = ownership.os = durable.os = files.os = Overlay(fsync=fsync)
    Checkpointer(directory, {"meta": {}}).save(10)
    return {"visible": sorted(os.listdir(directory))}


def train(
    rank: int,
    directory: str,
    journal: str,
    steps: int,
    every: int,
    victim: int = -1,
    event: int = 0,
    memory_every: int | None = None,
) -> dict[str, Any]:
    """Train to the end, or die: rank `victim` kills itself at its `event`-th event.

    Events are the phases of a step, every call to the operating system that a save or a copy to memory makes, and
    each tensor that is copied there.
    """
    left = event

    def happens() -> None:
        nonlocal left
        left -= 1
        if rank == victim and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def eventful(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            happens()
            return function(*args, **kwargs)

        return call

    checkpoint_files.os = ownership.os = durable.os = files.os = parts.os = commit.os = shard_files.os = (
        Overlay(
            **{
                name: eventful(getattr(os, name))
                for name in ("open", "write", "fsync", "rename", "unlink", "mkdir")
            }
        )
    )
    slots.os = Overlay(
        **{name: eventful(getattr(os, name)) for name in ("open", "rename", "unlink", "ftruncate")}
    )
    layout._copy_all = eventful(layout._copy_all)
    seed(rank)
    # The same initial weights everywhere come from DDP; the draws of the ranks differ.
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[10, 20, 30])
    sampler = Sampler(rank)
    totals = {"loss": 0.0}
    checkpoints = Checkpointer(
        directory,
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "sampler": sampler,
            "totals": totals,
        },
        memory_every=memory_every,
    )
    start = checkpoints.load()
    with open(journal, "a", buffering=1) as lines:
        lines.write(f"start {start}\n")
        for step in range(start, steps):
            happens()
            inputs = sampler.batch() + 0.1 * torch.rand(4, 4) + random.gauss(0, 0.1) + numpy.random.rand()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            happens()
            optimizer.step()
            scheduler.step()
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            totals["loss"] += shared.item()
            happens()
            progress.step(step + 1)
            if memory_every and rank == 0:
                lines.write(f"remembered {step + 1}\n")
            if (step + 1) % every == 0 and checkpoints.save(step + 1):
                lines.write(f"saved {step + 1}\n")
    bits = hashlib.sha256()
    for part in (model.module.state_dict(), *optimizer.state_dict()["state"].values()):
        for tensor in part.values():
            bits.update(tensor.numpy().tobytes())
    return {"bits": bits.hexdigest(), "totals": totals, "sampler": sampler.state_dict(), "next": draw()}


class Sampler:
    """Random batches whose position is state: a new permutation each epoch, a slice of it each step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._data = torch.arange(128, dtype=torch.float32).reshape(32, 4) / 128
        self._position = 0
        self._epoch = 0

    def batch(self) -> torch.Tensor:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self._epoch))
        begin = self._position + 4 * self._rank
        self._position += 8
        if self._position == 32:
            self._position, self._epoch = 0, self._epoch + 1
        return self._data[order[begin : begin + 4]]

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position, self._epoch = state["position"], state["epoch"]


class Overlay:
    """A module, `os` if no other is named, with some functions replaced."""

    def __init__(self, module: Any = os, /, **replaced: Callable[..., Any]) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def seed(rank: int) -> None:
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)


def draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


# --- The world


def run_rank(request: dict[str, Any], rank: int, answer_fd: int) -> None:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "ELASTIC_AGENT_LOCAL_RANK": str(rank), **request["env"]}
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{request['store']}", rank=rank, world_size=len(request["args"])
    )
    seed(rank + 1000)
    scenarios = {**vars(unequal_states), **vars(each_rank_states), **globals()}
    answer = scenarios[request["scenario"]](rank, **request["args"][rank])
    os.write(answer_fd, json.dumps(answer).encode())


def fork_rank(request: dict[str, Any], rank: int) -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run_rank(request, rank, write_fd)
            status = 0
        except Exception as error:
            print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
        os._exit(status)
    os.close(write_fd)
    return pid, read_fd


def wait(pid: int, deadline_s: float) -> int:
    with open(os.pidfd_open(pid), "rb", buffering=0) as ended:
        if not select.select([ended], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def answers(requests: Iterator[str]) -> Iterator[str]:
    for line in requests:
        request = json.loads(line)
        ranks = [fork_rank(request, rank) for rank in range(len(request["args"]))]
        deadline_s = time.monotonic() + WORLD_DEADLINE_S
        result = []
        for pid, read_fd in ranks:
            status = wait(pid, deadline_s)
            with open(read_fd, "rb") as answer:
                raw = answer.read()
            result.append({"status": status, "answer": json.loads(raw) if raw else None})
        yield json.dumps(result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1, "forking a process with threads may hang"
    for answer in answers(iter(sys.stdin.readline, "")):
        print(answer, flush=True)
