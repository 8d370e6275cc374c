"""States that differ between ranks, by right or not, for the worlds of `test_unequal_states`. Not a test."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import Checkpointer, CheckpointError, Fenced
from elastic_agent.worker.ranks import comparison
from elastic_agent.worker.steps import progress
from elastic_agent.worker.storage.disk.commit_permission import CommitPermission
from elastic_agent.worker.storage.memory import slots
from elastic_agent.worker.wire.channel import receive, send
from elastic_agent.worker.wire.messages import FROM_WORKERS, CommitGranted, CommitQuestion


class Training:
    """A state by the names of its parts, and how it changes in a step."""

    def __init__(self, kind: str, rank: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.more: dict[str, Any] = {}
        self.optimizer_type: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
        self.shared = True
        getattr(self, kind)()
        self.optimizer = self.optimizer_type(self.model.parameters(), lr=0.1)
        self.done = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, **self.more}

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4) + self.rank).square().mean().backward()
            self.optimizer.step()
            self.done += 1
            self.feedback()

    def feedback(self) -> None:
        """What a communication hook keeps for its next step."""

    def ddp(self) -> None:
        self.model = DistributedDataParallel(self.model)
        self.more["numbers"] = {"loss": 0.5 + self.rank, "names": ["a"] * self.rank}

    def fsdp2(self) -> None:
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))

    def partial(self) -> None:
        """A sum of which each rank has a term."""
        self.ddp()
        mesh = init_device_mesh("cpu", (2,))
        self.more["table"] = {"rows": [DTensor.from_local(torch.ones(4), mesh, [Partial()])]}

    def dtensor(self) -> None:
        self.ddp()
        mesh = init_device_mesh("cpu", (2,))
        self.more["table"] = {"rows": [distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])]}

    def zero(self) -> None:
        self.ddp()
        self.optimizer_type = lambda weights, lr: ZeroRedundancyOptimizer(
            weights, optimizer_class=torch.optim.AdamW, lr=lr
        )

    def shards(self) -> None:
        """Tensor parallelism with plain tensors: as many numbers on each rank, and at first the same ones."""

    def late_feedback(self) -> None:
        """As with PowerSGD, of which each rank keeps its own error, and which does not begin with training."""
        self.ddp()
        errors: dict[int, torch.Tensor] = {}
        self.more["compression"] = errors

        def feedback() -> None:
            if self.done > 2:
                errors[0] = torch.full((4,), self.rank + self.done / 10)

        self.feedback = feedback  # type: ignore[method-assign]

    def late_in_optimizer(self) -> None:
        """As with 1-bit optimizers, which keep their errors beside the moments."""
        self.ddp()

        def feedback() -> None:
            if self.done > 2:
                for state in self.optimizer.state.values():
                    state["error"] = torch.full((4,), self.rank + self.done / 10)

        self.feedback = feedback  # type: ignore[method-assign]

    def own(self) -> None:
        self.ddp()
        self.more["best"] = {"sample": torch.full((3,), float(self.rank))}

    def growing(self) -> None:
        """A table that rank 0 alone has, and that holds more after each step."""
        self.ddp()
        best: dict[int, torch.Tensor] = {}
        self.more["best"] = best

        def feedback() -> None:
            if self.rank == 0:
                best[self.done] = torch.randn(3)

        self.feedback = feedback  # type: ignore[method-assign]


def attempt(action: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"returned": action()}
    except CheckpointError as error:
        return {"raised": type(error).__name__, "text": str(error)}


def save_unequal(
    rank: int, directory: str, kind: str, steps: int = 1, times: int = 1, own: tuple[str, ...] = ()
) -> dict[str, Any]:
    training = Training(kind, rank)
    checkpoints = Checkpointer(directory, training.state, from_rank_0=own)

    def save() -> list[bool]:
        results = []
        for _ in range(times):
            training.train(steps)
            results.append(checkpoints.save(training.done))
        return results

    return {**attempt(save), "files": sorted(os.listdir(directory)) if os.path.isdir(directory) else []}


def save_what_has_just_begun(rank: int, directory: str) -> dict[str, Any]:
    """At first all ranks have the same shards."""
    training = Training("shards", rank)
    checkpoints = Checkpointer(directory, training.state)
    checkpoints.load()
    first = checkpoints.save(0)
    training.train()
    return {"first": first, **attempt(lambda: checkpoints.save(1))}


def load_unequal(rank: int, directory: str, kind: str) -> dict[str, Any]:
    return attempt(Checkpointer(directory, Training(kind, rank).state).load)


def count_comparisons(rank: int, directory: str, kind: str, nodes: int = 1) -> dict[str, Any]:
    """Digests of this rank's state in five steps with a copy each, and what the copies returned."""
    be_guarded(directory if nodes == 1 else f"{directory}-{rank}", rank)
    if nodes == 2:
        os.environ.update(ELASTIC_AGENT_NODE="ab"[rank], ELASTIC_AGENT_LOCAL_RANK="0")
    looks = 0
    digests_of = comparison.digests_of

    def counted(tensors: Any) -> Any:
        nonlocal looks
        looks += 1
        return digests_of(tensors)

    comparison.digests_of = counted
    training = Training(kind, rank)
    own = [name for name in training.state if name == "best"]
    checkpoints = Checkpointer(directory, training.state, from_rank_0=own)
    checkpoints.load()
    remembered = []
    for _ in range(5):
        training.train()
        remembered.append(checkpoints.save_to_memory(training.done))
    return {"looks": looks, "remembered": remembered}


def load_twice(rank: int, directory: str) -> dict[str, Any]:
    """Before anything was compared, and back again after a step that was."""
    be_guarded(directory, rank)
    training = Training("ddp", rank)
    checkpoints = Checkpointer(directory, training.state)
    results = []
    for _ in range(2):
        checkpoints.load()
        checkpoints.load()
        training.train()
        progress.step(1)
        results.append(checkpoints.save_to_memory(1))
    return {"remembered": results}


def copy_unequal(rank: int, directory: str, kind: str, way: str) -> dict[str, Any]:
    """Go each way on which a state comes to memory without a save."""
    be_guarded(directory, rank)
    training = Training(kind, rank)
    every = 1 if way == "memory_every" else None
    checkpoints = Checkpointer(directory, training.state, memory_every=every)
    checkpoints.load()

    def go() -> Any:
        training.train()
        if way == "remember":
            return checkpoints.save_to_memory(training.done)
        if way == "just in time":
            with checkpoints.just_in_time():
                progress.step(training.done)
                return checkpoints._state.save_just_in_time(training.done, {})
        progress.step(training.done)
        if way == "keep":
            checkpoints._state.save_last_step(training.done, leaves=False)
        if way == "keep alone":
            dist.barrier()  # the others are known to have finished that step
            checkpoints._state.save_last_step_alone(training.done)
        return None

    answer = attempt(go)
    memory = slots.Slots(os.environ["ELASTIC_AGENT_MEMORY"], directory)
    steps = sorted(header.step for header in memory.headers().values())
    return {**answer, "copies": steps}


def copy_where_one_rank_does_not_come(rank: int, directory: str) -> dict[str, Any]:
    comparison.PATIENCE_S = 0.2
    be_guarded(directory, rank)
    training = Training("ddp", rank)
    checkpoints = Checkpointer(directory, training.state)
    checkpoints.load()
    training.train()
    remembered = [checkpoints.save_to_memory(training.done) for _ in range(2)] if rank == 0 else None
    dist.barrier()
    return {"remembered": remembered}


def listen(listener: socket.socket) -> None:
    guards = []
    while True:
        connection, _ = listener.accept()
        if isinstance(receive(connection, FROM_WORKERS, 60.0), CommitQuestion):
            with connection:
                send(connection, CommitGranted(60.0), 60.0)
        else:
            guards.append(connection)


def be_guarded(directory: str, rank: int) -> None:
    """As a worker of an agent that lets it commit, and else listens, and says nothing."""
    memory = f"{directory}-memory"
    os.makedirs(memory, exist_ok=True)
    address = f"{memory}/just-in-time-{rank}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    threading.Thread(target=listen, args=(listener,), daemon=True).start()
    os.environ.update(
        ELASTIC_AGENT_MEMORY=memory,
        ELASTIC_AGENT_MEMORY_BYTES=str(1 << 30),
        ELASTIC_AGENT_NODE="a",
        ELASTIC_AGENT_SOCKET=address,
    )


def load_after_a_save(rank: int, directory: str, refused: bool) -> dict[str, Any]:
    """A save is under way when it is loaded: nobody writes it but this process, which has no one to ask."""
    be_guarded(directory, rank)
    os.environ["ELASTIC_AGENT_WRITES"] = f"{directory}-memory/nobody"
    if refused:
        CommitPermission.check = refuse  # type: ignore[method-assign]
    training = Training("ddp", rank)
    checkpoints = Checkpointer(directory, training.state)
    checkpoints._state._disk.turn = lambda: None  # type: ignore[method-assign]  # it is not written at once
    training.train()
    saved = checkpoints.save(1)
    return {"saved": saved, **attempt(checkpoints.load), "files": sorted(os.listdir(directory))}


def refuse(_: CommitPermission) -> None:
    raise Fenced("generation 2 has replaced it")
