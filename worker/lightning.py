"""Elastic training by Lightning's Trainer: planned changes lose no step, a kill loses little.

    environment = ElasticEnvironment()
    trainer = Trainer(
        strategy="ddp",
        devices=environment.devices,
        num_nodes=environment.num_nodes,
        plugins=[environment],
        callbacks=[ElasticCallback("runs/x")],
    )
    trainer.fit(module, loader)

The callback has a `Checkpointer` of the module, the optimizers, the schedulers, the precision plug-in, the other
callbacks, the data module, the progress of Lightning's loops and the position in the data, and loads it when `fit()`
begins. `fit(ckpt_path=...)` is not used: it does not find its place in the data again when the world has changed.
A sampler of ours takes the place of the loader's, and deals out one stream of epochs (see `stream`).

The boundary of a step (see `progress.step`) is where the next batch begins: validation and hooks at the end of a batch
or of an epoch belong to the step before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from .checkpointing.checkpointer import Checkpointer
from .errors import ClusterEnvironmentError, LibraryMissing, UnsupportedTraining
from .steps.progress import step
from .steps.sampler import Order, StreamSampler

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise LibraryMissing(
        f"elastic_agent.worker.lightning needs lightning, and there is no {error.name}: pip install lightning"
    ) from error


_NUMBER = "number of a tensor"
"""The key of a tensor of one number in the states of callbacks."""


class ElasticEnvironment(TorchElasticEnvironment):
    """The cluster of this generation, from what the agent has set. `devices` and `num_nodes` are for the Trainer."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Raises ClusterEnvironmentError."""
        super().__init__()
        environ = os.environ if environ is None else environ
        try:
            self._world_size, self.devices = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        except (KeyError, ValueError) as error:
            raise ClusterEnvironmentError(
                f"ElasticEnvironment needs WORLD_SIZE and LOCAL_WORLD_SIZE as numbers ({error}): start this script by "
                "elastic-agent or torchrun"
            ) from error
        if self._world_size % self.devices:
            raise ClusterEnvironmentError(
                f"Lightning needs nodes with the same number of workers: here are {self.devices} of "
                f"{self._world_size}. Give all agents the same --nproc-per-node"
            )

    @property
    def num_nodes(self) -> int:
        return self._world_size // self.devices

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if (num_devices, num_nodes) != (self.devices, self.num_nodes):
            raise ClusterEnvironmentError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) is not this generation's world of "
                f"{self.num_nodes} nodes with {self.devices} workers: give it devices=environment.devices and "
                "num_nodes=environment.num_nodes"
            )


class ElasticCallback(Callback):
    """Lets a Trainer take part in planned changes, and go on after a kill.

    directory: of the checkpoints, see `Checkpointer`. Not that of a ModelCheckpoint.
    save_every: save every so many optimizer steps. None: at the end of each epoch. The training's end is saved, too.
    memory_every, and what else a `Checkpointer` may be given: see there.

    When `fit()` begins, what cannot be carried raises UnsupportedTraining, with what to change.
    """

    def __init__(
        self,
        directory: str,
        *,
        save_every: int | None = None,
        memory_every: int | None = None,
        **checkpointer: Any,
    ) -> None:
        if save_every is not None and save_every < 1:
            raise ValueError(f"save_every is {save_every}, expected at least 1")
        self._directory = directory
        self._save_every = save_every
        self._options = {"memory_every": memory_every, **checkpointer}
        self._checkpoints: Checkpointer | None = None
        self._finished = 0
        """The newest step whose boundary was reported."""
        self._epoch_ended = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self._checkpoints is not None:
            raise UnsupportedTraining(
                "fit() is called again: give each training a Trainer, a callback and a directory of its own"
            )
        refuse(trainer)
        self._progress = _Progress(trainer)
        process = trainer.strategy.process_dataloader

        def processed(loader: Any) -> Any:
            loader = process(loader)
            return self._progress.feed(loader) if trainer.training else loader

        trainer.strategy.process_dataloader = processed  # what Lightning has for those who change loaders

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._checkpoints = Checkpointer(self._directory, self._contents(trainer, pl_module), **self._options)
        self._finished = self._checkpoints.load()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._end_step(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._progress.stream.batch_is_done()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._epoch_ended = True
        self._progress.epoch_ended()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_step(trainer, last=True)
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _end_step(self, trainer: Any, *, last: bool = False) -> None:
        before, done = self._finished, trainer.global_step
        if done == before or self._checkpoints is None:
            return
        self._finished = done
        step(done)
        every = self._save_every
        if last or (self._epoch_ended if every is None else done // every > before // every):
            self._checkpoints.save(done)
        self._epoch_ended = False

    def _contents(self, trainer: Any, module: Any) -> dict[str, Any]:
        optimizers = {f"optimizer_{number}": one for number, one in enumerate(trainer.optimizers)}
        configs = trainer.lr_scheduler_configs
        schedulers = {f"scheduler_{number}": one.scheduler for number, one in enumerate(configs)}
        others = {"precision": trainer.precision_plugin, "callbacks": _Callbacks(trainer, self)}
        if trainer.datamodule is not None:
            others["data_module"] = trainer.datamodule
        return {"model": module, **optimizers, **schedulers, **others, "trainer": self._progress}


class _Callbacks:
    """The states of the other callbacks, such as EarlyStopping and ModelCheckpoint."""

    def __init__(self, trainer: Any, own: ElasticCallback) -> None:
        self._by_key = {one.state_key: one for one in trainer.callbacks if one is not own}

    def state_dict(self) -> dict[str, Any]:
        return {key: _plain(state) for key, one in self._by_key.items() if (state := one.state_dict())}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for key, state in states.items():
            if key in self._by_key:
                self._by_key[key].load_state_dict(_restored(state))


def _plain(value: Any) -> Any:
    """The same with plain numbers for tensors of one number, such as the best score of a metric.

    A Checkpointer refuses tensors that differ between ranks. A score differs where each rank logs its own.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {_NUMBER: value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if type(value) is list else value


def _restored(value: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(value, Mapping):
        if _NUMBER in value:
            return torch.tensor(value[_NUMBER], dtype=getattr(torch, value["dtype"]))
        return {key: _restored(one) for key, one in value.items()}
    return [_restored(one) for one in value] if type(value) is list else value


class _Progress:
    """Where Lightning's loops are in the training and in the data, as a part of a checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        self._fed = False
        self._epoch = Epoch(0, 0, 0, drop_last=False)
        self._epoch_began = 0
        """The position of the stream."""

    def feed(self, loader: Any) -> Any:
        """Let this loader deal out the stream, from where the training has been loaded."""
        if self._fed:
            raise UnsupportedTraining("there are several loaders for training: give Lightning one")
        if problem := _refuse_data(loader):
            raise UnsupportedTraining(problem)
        self._fed = True
        self.stream, self._epoch = _stream(loader, self._trainer)
        loader.batch_sampler.sampler = self.stream
        # An iteration draws a seed, from the global random numbers if there is no generator. A training that goes on
        # within an epoch has one iteration more.
        loader.generator = torch.Generator()
        # Lightning warns of loaders that cannot be resumed, and has those that can in its own checkpoints.
        loader.state_dict, loader.load_state_dict = self.stream.state_dict, self.stream.load_state_dict
        if self._loaded is not None:
            self.stream.load_state_dict(self._loaded["data"])
            self._epoch_began = self._loaded["epoch_began"]
            loops, before = self._loaded["loops"], self._loaded["batches"]
            done = loops[_BATCHES]["current"]["completed"]
            if before == done:
                done = self._epoch.batches
            elif before != self._epoch.batches:
                done = self._epoch.batches_done(self.stream.position - self._epoch_began)
            self._trainer.fit_loop.load_state_dict(at_boundary(loops, done))
        return loader

    def epoch_ended(self) -> None:
        """Lightning's epoch has ended, or the training within it."""
        if self._trainer.fit_loop.state_dict()[_BATCHES]["current"]["completed"] >= self._epoch.batches:
            self._epoch_began = self.stream.position

    def state_dict(self) -> dict[str, Any]:
        return {
            "data": self.stream.state_dict(),
            "epoch_began": self._epoch_began,
            "batches": self._epoch.batches,
            "loops": self._trainer.fit_loop.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The loops come to know of it when they have a loader, whose length they count."""
        self._loaded = state


@dataclass(frozen=True)
class Epoch:
    """An epoch in this world: `batches` of `samples` over all ranks together, of a dataset of `length`."""

    length: int
    samples: int
    batches: int
    drop_last: bool

    def batches_done(self, done: int) -> int:
        """How many of the epoch's batches count as completed when `done` samples of it are, in batches of any size."""
        left = self.length - done
        count = left // self.samples if self.drop_last else -(-left // self.samples)
        return self.batches - min(max(1, count), self.batches)


_BATCHES = "epoch_loop.batch_progress"


def at_boundary(loops: dict[str, Any], done: int) -> dict[str, Any]:
    """The state of Lightning's loops as it is between two batches, when `done` of this epoch's are completed.

    The state was taken while the next batch was about to begin: that one is to come again.
    """
    loops = dict(loops)
    progress = loops[_BATCHES]
    current = dict.fromkeys(progress["current"], done)
    total = dict.fromkeys(progress["total"], progress["total"]["completed"])
    loops[_BATCHES] = {**progress, "total": total, "current": current, "is_last_batch": False}
    # What the loaders of Lightning's own checkpoints hold; ours has its state already.
    loops["state_dict"] = {}
    return loops


def refuse(trainer: Any) -> None:
    """Raises UnsupportedTraining for what this cannot carry through a change, with what to do."""
    strategy = trainer.strategy
    problem = None
    if type(strategy) not in (DDPStrategy, SingleDeviceStrategy):
        problem = (
            f"{type(strategy).__name__} may spread the state over the ranks: only strategy='ddp' is carried, and a "
            "single device"
        )
    elif getattr(strategy, "_ddp_comm_state", None) is not None:
        problem = (
            "DDPStrategy(ddp_comm_state=...) has what each rank remembers of its gradients, which is not carried: "
            "leave it out, and with it a ddp_comm_hook that needs it"
        )
    elif getattr(strategy, "_model_averaging_period", None) is not None:
        problem = (
            "DDPStrategy(model_averaging_period=...) lets the ranks' models differ, and only one is carried: leave it "
            "out"
        )
    elif trainer.ckpt_path is not None:
        problem = "call fit() without ckpt_path: the callback loads what is newest by itself"
    elif trainer.limit_train_batches not in (None, 1.0):
        problem = (
            f"limit_train_batches={trainer.limit_train_batches} leaves out data: give it a smaller dataset"
        )
    elif trainer.overfit_batches:
        problem = f"overfit_batches={trainer.overfit_batches} leaves out data: give it a smaller dataset"
    elif trainer.reload_dataloaders_every_n_epochs:
        problem = "reload_dataloaders_every_n_epochs makes new loaders, which begin anew: leave it out"
    if problem is not None:
        raise UnsupportedTraining(problem)


def _refuse_data(loader: Any) -> str | None:
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader):
        return (
            f"{type(loader).__name__} is no DataLoader, and no place is found again in it: give Lightning one"
        )
    if isinstance(dataset, IterableDataset):
        return "the dataset is an IterableDataset, in which no place is found again: give the loader one with len()"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"{type(loader.batch_sampler).__name__} makes batches of its own: give the loader a batch_size"
    sampler = loader.batch_sampler.sampler
    # Not a subclass: its order may be any, as Lightning's wrapper of other samplers has.
    if type(sampler) in (SequentialSampler, DistributedSampler) or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)
    ):
        return None
    wrapped = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    return f"the order of {type(wrapped).__name__} cannot be continued: give the loader shuffle=True or False"


def _stream(loader: Any, trainer: Any) -> tuple[StreamSampler, Epoch]:
    batches, sampler = loader.batch_sampler, loader.batch_sampler.sampler
    if type(sampler) is DistributedSampler:
        shuffle, seed = sampler.shuffle, sampler.seed
    else:
        shuffle, seed = type(sampler) is RandomSampler, int(os.environ.get("PL_GLOBAL_SEED", "0"))
    order = Order(len(loader.dataset), shuffle, seed)
    size, rank = batches.batch_size, trainer.global_rank
    samples = size * trainer.world_size
    count = max(1, order.length // samples if batches.drop_last else -(-order.length // samples))
    share = slice(rank * size, (rank + 1) * size)
    stream = StreamSampler(order, batches=count, samples=samples, share=share)
    return stream, Epoch(order.length, samples, count, batches.drop_last)
