"""A script that copies its shards to memory after every step, and saves to disk where the test says.

`sharding.py FOLDER --kinds KIND...` trains a small network of each kind, with a Checkpointer each, until FOLDER/finish
is there, and does no step beyond the number in FOLDER/hold while that is there. It writes to the job's history where
each kind began, with a digest of the whole state and of the random numbers there, and every step with those that it
had, and with the newest step that this rank had copied before, and the newest before that: what is newer is copied only
when the partners have acknowledged that. Where a planned change ends it, it writes which step is on disk by then. With
`--quiet N` the first generation writes before all this what N steps come to without a Checkpointer. The checkpoints are
in FOLDER/disk/KIND, or in SYSTEM_TEST_CHECKPOINTS/KIND.

The inputs of a step come from its number and the rank's place in the mesh, dropout from the rank's random state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_agent.worker import Checkpointer, Drained, mesh, poll, step
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.wire.environment import WorkerEnv

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["ELASTIC_AGENT_GENERATION"])
NO_HOLD = 1e9


def record(what: str, **more: object) -> None:
    place = {"generation": GENERATION, "rank": RANK, "world": WORLD, "node": os.environ["ELASTIC_AGENT_NODE"]}
    with open(os.environ["SYSTEM_TEST_HISTORY"], "ab", buffering=0) as history:
        history.write(json.dumps({"what": what, "pid": os.getpid(), **place, **more}).encode() + b"\n")


class Training:
    """Of one kind, from its first step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        torch.manual_seed(0)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(7, 14), torch.nn.Dropout(), torch.nn.Linear(14, 1)
        )
        self.inputs = RANK
        """Ranks that have the same number here see the same inputs."""
        self.optimizer: Any = None
        {"fsdp": self._fsdp, "hsdp": self._hsdp, "fsdp-tp": self._fsdp_tp, "fsdp1": self._fsdp1}[kind]()
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.meta = {"done": 0}

    @property
    def done(self) -> int:
        return self.meta["done"]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "meta": self.meta}

    def _fsdp(self) -> None:
        fully_shard(self.model)

    def _hsdp(self) -> None:
        fully_shard(self.model, mesh=mesh(dp="auto", shard=2))

    def _fsdp_tp(self) -> None:
        both = mesh(dp=None, shard="auto", tp=2)
        parallelize_module(self.model, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.model, mesh=both["shard"])
        self.inputs = both.get_local_rank("shard")

    def _fsdp1(self) -> None:
        self.model = FullyShardedDataParallel(
            self.model,
            use_orig_params=True,
            device_id=torch.device("cpu"),
            device_mesh=mesh(dp=None, shard="auto"),
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        drawn = torch.Generator().manual_seed(1000 * self.done + self.inputs)
        self.model(torch.randn(4, 7, generator=drawn)).square().mean().backward()
        for weight in self.model.parameters():
            if not isinstance(weight, DTensor) and self.kind != "fsdp1":
                dist.all_reduce(weight.grad)
        self.optimizer.step()
        self.meta["done"] += 1

    def copied(self, directory: Path) -> dict[str, int]:
        slots = Slots(
            WorkerEnv.of(os.environ).memory, SlotFolder.of(str(directory), int(os.environ["LOCAL_RANK"]))
        )
        steps = [header.step for header in slots.headers().values() if header.generation == GENERATION]
        slots.close()
        before, newest = sorted([0, 0, *steps])[-2:]
        return {"copied": newest, "acknowledged": before}

    def record(self, what: str, **more: object) -> None:
        """`whole` is of the state of all ranks together, the same for every world size."""
        randomness = hashlib.sha256(_bytes(torch.get_rng_state())).hexdigest()
        record(what, kind=self.kind, step=self.done, whole=self._whole(), randomness=randomness, **more)

    def _whole(self) -> str:
        whole = hashlib.sha256(json.dumps(self.meta).encode())
        if self.kind == "fsdp1":
            if not self.done:
                return whole.hexdigest()
            for state in get_state_dict(self.model, self.optimizer):
                for _, tensor in _tensors_in(state):
                    whole.update(_bytes(tensor))
            return whole.hexdigest()
        held = self.optimizer.state
        for weight in self.model.parameters():
            whole.update(_bytes(weight))
            for name in sorted(held.get(weight, ())):
                whole.update(_bytes(held[weight][name]))
        return whole.hexdigest()


def _tensors_in(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in sorted(state.items()) if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor):
            yield key, value
        else:
            yield from _tensors_in(value)


def _bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().numpy().tobytes()


def one_step(trainings: Sequence[Training]) -> None:
    """Of each; all begin with the same random state, and so does it go on."""
    random_state = torch.get_rng_state()
    for training in trainings:
        torch.set_rng_state(random_state)
        training.step()
    torch.set_rng_state(random_state)
    torch.rand(1)


def orders(folder: Path) -> tuple[bool, float]:
    """Whether to finish, and up to which step to go: the same on all ranks."""
    hold = folder / "hold"
    seen = [float((folder / "finish").exists()), -float(hold.read_text()) if hold.exists() else -NO_HOLD]
    both = torch.tensor(seen, dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return bool(both[0]), -float(both[1])


def on_disk(directory: Path) -> int:
    """The newest step that a manifest vouches for."""
    return max((int(path.stem.split("-")[1]) for path in directory.glob("step-*.json")), default=0)


def quiet(kinds: Sequence[str], steps: int) -> None:
    trainings = [Training(kind) for kind in kinds]
    torch.manual_seed(RANK)
    for _ in range(steps):
        one_step(trainings)
        for training in trainings:
            training.record("quiet")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", default=["fsdp"])
    parser.add_argument("--quiet", type=int, default=0)
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--save-from", type=int, default=1_000_000)
    asked = parser.parse_args()
    record("start", env=dict(os.environ))
    dist.init_process_group("gloo")
    if asked.quiet and GENERATION == 1:
        quiet(asked.kinds, asked.quiet)
    trainings = [Training(kind) for kind in asked.kinds]
    disk = Path(os.environ.get("SYSTEM_TEST_CHECKPOINTS", asked.folder / "disk"))
    checkpoints = [Checkpointer(disk / one.kind, one.state, memory_every=1) for one in trainings]
    random_states = []
    for training, checkpoint in zip(trainings, checkpoints, strict=True):
        torch.manual_seed(RANK)
        checkpoint.load()
        training.record("loaded")
        random_states.append((training.done, torch.get_rng_state()))
    # A kind may have come further than another when a worker was killed: it waits for that.
    done, random_state = min(random_states, key=lambda one: one[0])
    torch.set_rng_state(random_state)
    while True:
        finished, hold = orders(asked.folder)
        if finished:
            break
        if done < hold:
            due = [training for training in trainings if training.done == done]
            one_step(due)
            for training in due:
                training.record("step", **training.copied(disk / training.kind))
            done += 1
            try:
                step(done)
            except Drained:
                for training in trainings:
                    record("drained", kind=training.kind, step=done, on_disk=on_disk(disk / training.kind))
                raise
            if done == asked.save_at or done >= asked.save_from:
                for training, checkpoint in zip(trainings, checkpoints, strict=True):
                    record("saved", kind=training.kind, step=done, ok=checkpoint.save(done))
        else:
            poll()
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
