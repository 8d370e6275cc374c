"""A training of the proof suite: the same steps with every form of state that the library carries.

`training.py FOLDER WORDS` trains a network of 421 numbers for 14 steps, in epochs of five, with its checkpoints in
FOLDER/disk. It writes to the job's history where it began (`loaded`: at which step, and which one the disk had then),
where it waits until there is a FOLDER/go-STEP (`at`), and how it ended (`end`). All ranks together see the same samples
in a step, so all worlds come to the same numbers but for the last bits. WORDS are the fields of `Asked`, as JSON.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nets import SIZES, net_of, through_stages  # type: ignore[import-not-found]  # it stands beside this script
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from elastic_agent import worker
from elastic_agent.worker.dcp import ElasticStorageReader, ElasticStorageWriter

GENERATION = int(os.environ.get("ELASTIC_AGENT_GENERATION", "1"))
STEPS, SAMPLES, BATCH = 14, 60, 12
"""A batch is that of all ranks together."""
EPOCHS = -(-STEPS * BATCH // SAMPLES)


@dataclass(frozen=True)
class Asked:
    kind: str
    memory: bool = False  # every step is copied there
    saves: tuple[int, ...] = ()
    durable: bool = False  # each save is waited for
    pauses: tuple[int, ...] = ()
    dies: int = 0  # within this step the last rank of the first generation is killed
    quiet: bool = False  # the first generation writes, first, what the steps come to without the library
    noise: bool = False  # in the inputs, drawn from the rank's own random states
    reads: tuple[str, ...] = ()  # one process alone loads from each of these directories, and trains nothing


def record(what: str, **more: object) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    place = {"rank": rank, "world": world, "node": os.environ.get("ELASTIC_AGENT_NODE"), "pid": os.getpid()}
    line = {"what": what, "generation": GENERATION, "at": time.monotonic(), **place, **more}
    with open(os.environ["SYSTEM_TEST_HISTORY"], "ab", buffering=0) as history:
        history.write(json.dumps(line).encode() + b"\n")


class Training:
    """From its first step."""

    def __init__(self, asked: Asked, *, is_quiet: bool = False) -> None:
        self.kind, self.noise = asked.kind, asked.noise
        self.net, replicas, rank = net_of(self.kind)
        self.model: nn.Module = self.net.module if self.kind == "ddp" else self.net
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [one for name, one in named.items() if name.endswith(end)], "weight_decay": decay}
            for end, decay in (("weight", 0.1), ("bias", 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-4, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.7)
        place = {"num_replicas": replicas, "rank": rank, "seed": 3}
        size, samples = BATCH // replicas, range(SAMPLES)
        self.sampler: Any = (
            DistributedSampler(samples, **place)
            if is_quiet
            else worker.ElasticSampler(samples, batch_size=size, **place)
        )
        ahead = int(self.kind == "ddp")  # processes that draw samples before their turn
        self.loader = DataLoader(
            samples, size, sampler=self.sampler, num_workers=ahead, generator=torch.Generator()
        )
        self.meta: dict[str, Any] = {"done": 0, "trace": torch.zeros(3)}
        self.inputs = torch.randn(SAMPLES, SIZES[0], generator=torch.Generator().manual_seed(5))
        self.targets = self.inputs.sum(1, keepdim=True).sin()
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)

    @property
    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "sampler", "meta")}

    def batches(self) -> Iterator[torch.Tensor]:
        for epoch in range(self.sampler.epoch, EPOCHS):
            self.sampler.set_epoch(epoch)
            yield from self.loader

    def step(self, batch: torch.Tensor, *, dies: bool = False) -> None:
        inputs, targets = self.inputs[batch], self.targets[batch]
        if self.noise:
            inputs = inputs + 0.01 * torch.randn(inputs.shape) + 0.01 * random.random()
        self.optimizer.zero_grad()
        if self.kind == "pipeline":
            through_stages(self.net, inputs, targets)
        else:
            nn.functional.mse_loss(self.net(inputs), targets).backward()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()
        self.scheduler.step()
        self.meta["done"] += 1
        self.meta["trace"] = 0.9 * self.meta["trace"] + self.meta["done"]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.kind != "fsdp1":
            for name, weight in self.model.named_parameters():
                for key, one in {"weight": weight, **self.optimizer.state.get(weight, {})}.items():
                    yield f"{key} of {name}", one
        elif self.meta["done"]:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            for name, state in {**optimizer["state"], "weights": model}.items():
                yield from ((f"{key} of {name}", one) for key, one in state.items())

    def record(self, what: str, **more: object) -> None:
        """The numbers of the state of all ranks together, on rank 0; and of each rank what it draws next."""
        mine = {"trace": self.meta["trace"].tolist(), "step": [self.meta["done"], self.scheduler.last_epoch]}
        mine["rates"] = [float(group["lr"]) for group in self.optimizer.param_groups]
        for name, one in self._tensors():
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            mine[name] = whole.detach().flatten().tolist()
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        if dist.get_rank() == 0:
            more["numbers"] = {name: one for some in of_ranks for name, one in some.items()}
        draws = repr((random.getstate(), torch.get_rng_state().tolist())).encode()
        record(what, step=self.meta["done"], draws=hashlib.sha256(draws).hexdigest(), **more)


class DcpSaves:
    """What a script does that saves with DCP, in the place of a Checkpointer."""

    def __init__(self, directory: str | Path, training: Training) -> None:
        self.directory, self.training = directory, training

    def load(self) -> int:
        one, reader = self.training, ElasticStorageReader(self.directory)
        if reader.step is None:
            return 0
        found = self._state()
        dcp.load(found, storage_reader=reader)
        parts = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(one.model, one.optimizer, **parts)
        one.scheduler.load_state_dict(found["scheduler"])
        one.sampler.load_state_dict(found["sampler"])
        one.meta.update(found["meta"])
        if one.noise:
            own = found[f"draws of {dist.get_rank()}"]
            torch.set_rng_state(own["torch"])
            random.setstate((3, tuple(own["python"].tolist()), None))
        return reader.step

    def save(self, number: int, *, durable: bool) -> bool:
        writer = ElasticStorageWriter(self.directory, step=number, durable=durable)
        dcp.save(self._state(), storage_writer=writer)
        return True

    def _state(self) -> dict[str, Any]:
        one = self.training
        model, optimizer = get_state_dict(one.model, one.optimizer)
        state = {"model": model, "optimizer": optimizer, "meta": dict(one.meta)}
        state |= {name: getattr(one, name).state_dict() for name in ("scheduler", "sampler")}
        if one.noise:
            own = {"torch": torch.get_rng_state(), "python": torch.tensor(random.getstate()[1])}
            state[f"draws of {dist.get_rank()}"] = own
        return state


def mark(what: str, number: int) -> None:
    """Into the log of the power cuts: see `recorded`."""
    log = os.environ.get("PROOF_DISK_LOG")
    if log and dist.get_rank() == 0:
        with open(f"{log}.lock", "ab") as lock, open(log, "ab", buffering=0) as file:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file.write(json.dumps({"what": what, "step": number}).encode() + b"\n")


def pause(folder: Path, number: int) -> None:
    """No collective: where each rank keeps its state alone, a planned change ends one before another one."""
    record("at", step=number)
    while not (folder / f"go-{number}").exists():
        worker.poll()
        time.sleep(0.01)


def train(folder: Path, asked: Asked) -> None:
    disk, training, by_dcp = folder / "disk", Training(asked), asked.kind == "dcp"
    every = 1 if asked.memory else None
    checkpoints: Any = (
        DcpSaves(disk, training) if by_dcp else worker.Checkpointer(disk, training.state, memory_every=every)
    )
    before = max((int(path.stem.split("-")[1]) for path in disk.glob("step-*.json")), default=0)
    done = checkpoints.load()
    record("loaded", step=done, disk=before)
    assert done == training.meta["done"]
    saved = done
    dies = asked.dies if GENERATION == 1 and dist.get_rank() == dist.get_world_size() - 1 else 0
    for batch in training.batches():
        training.step(batch, dies=done + 1 == dies)
        done += 1
        record("step", step=done)
        try:
            worker.step(done)
            if done in asked.saves:
                mark("begun", done)
                assert checkpoints.save(done, **({"durable": asked.durable} if by_dcp else {}))
                saved = done
                if asked.durable and (by_dcp or checkpoints.wait()):
                    mark("promised", done)
            if done in asked.pauses:
                while asked.memory and not checkpoints.save_to_memory(done):
                    time.sleep(0.01)
                pause(folder, done)
        except worker.Drained:
            if by_dcp and done != saved:
                checkpoints.save(done, durable=True)
            raise
        if done == STEPS:
            break
    training.record("end")
    assert by_dcp or checkpoints.wait()


def main(folder: Path, words: str) -> None:
    asked = Asked(**json.loads(words))
    torch.set_default_dtype(torch.float64)
    env = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "ELASTIC_AGENT_MEMORY")}
    record("start", env=env)
    worker.init_process_group("gloo")
    if asked.quiet and GENERATION == 1:
        training = Training(asked, is_quiet=True)
        for batch in training.batches():
            if training.meta["done"] < STEPS:
                training.step(batch)
                training.record("quiet")
    for directory in asked.reads:
        training, refused = Training(asked), ""
        state: Any = training.state
        try:
            if asked.kind == "dcp":
                DcpSaves(directory, training).load()
            else:
                worker.Checkpointer(directory, state, read_only=True).load()
        except worker.CheckpointError as error:
            refused = f"{type(error).__name__}: {error}"
        training.record("read", directory=directory, refused=refused)
    if not asked.reads:
        train(folder, asked)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
