"""ElasticCallback for Lightning, with a Trainer that has just the loops that it relies on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from elastic_agent.worker import ClusterEnvironmentError, Drained, LibraryMissing, UnsupportedTraining
from elastic_agent.worker.steps import progress

MODULE = "elastic_agent.worker.lightning"
COUNTERS = ("ready", "started", "processed", "completed")


class DDPStrategy:
    def __init__(self, comm_state: object = None, averaging_period: int | None = None) -> None:
        self._ddp_comm_state = comm_state
        self._model_averaging_period = averaging_period

    def process_dataloader(self, loader: Any) -> Any:
        return loader


class FSDPStrategy(DDPStrategy):
    pass


class FitLoop:
    """The progress of Lightning's loops, in its own form."""

    def __init__(self) -> None:
        self.epoch = 0
        self.total = dict.fromkeys(COUNTERS, 0)
        self.current = dict.fromkeys(COUNTERS, 0)

    def state_dict(self) -> dict[str, Any]:
        progress = {"total": dict(self.total), "current": dict(self.current), "is_last_batch": True}
        return {
            "state_dict": {"combined_loader": [1]},
            "epoch": self.epoch,
            "epoch_loop.batch_progress": progress,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["state_dict"] == {}
        self.epoch, progress = state["epoch"], state["epoch_loop.batch_progress"]
        self.total, self.current = dict(progress["total"]), dict(progress["current"])
        assert len(set(self.total.values())) == len(set(self.current.values())) == 1, "between two batches"
        assert not progress["is_last_batch"]

    def count(self, *names: str) -> None:
        for name in names:
            self.total[name] += 1
            self.current[name] += 1


class Samples(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stopper:
    """A callback with a state."""

    state_key = "Stopper"

    def __init__(self) -> None:
        self.waited: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waited = state["waited"]


class Trainer:
    """The order of events of Lightning 2.6, for one of `world_size` ranks."""

    def __init__(self, callback: Any, *, world_size: int = 1, rank: int = 0, accumulate: int = 1) -> None:
        self.strategy = DDPStrategy()
        self.fit_loop = FitLoop()
        self.callback = callback
        self.callbacks = [Stopper(), callback]
        self.world_size, self.global_rank, self.accumulate = world_size, rank, accumulate
        self.training = True
        self.datamodule = self.ckpt_path = None
        self.limit_train_batches: float | None = 1.0
        self.overfit_batches = self.reload_dataloaders_every_n_epochs = 0
        self.lr_scheduler_configs: list[Any] = []
        self.precision_plugin = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        self.module = torch.nn.Linear(1, 1)
        self.optimizers = [torch.optim.SGD(self.module.parameters(), lr=0.1)]
        self.trained: list[int] = []
        """This rank's samples of finished steps."""
        self.epoch_ends: list[int] = []

    @property
    def global_step(self) -> int:
        return self.fit_loop.total["completed"] // self.accumulate

    def fit(self, loader: Any, *, epochs: int = 100, until: int | None = None) -> None:
        hooks, own = self.callback, (self, self.module)
        hooks.setup(*own, "fit")
        hooks.on_fit_start(*own)
        self.training = False
        assert self.strategy.process_dataloader(["of validation"]) == ["of validation"]
        self.training = True
        loader = self.strategy.process_dataloader(loader)
        loop, length = self.fit_loop, len(loader)
        while loop.epoch < epochs:
            for batch in loader:
                loop.count("ready")
                hooks.on_train_batch_start(*own, batch, 0)
                if self.global_step == until:
                    return
                loop.count("started", "processed")
                hooks.on_train_batch_end(*own, None, batch, 0)
                loop.count("completed")
                self.trained += batch.tolist()
                if loop.current["ready"] >= length:
                    break
            hooks.on_train_epoch_end(*own)
            self.epoch_ends.append(self.global_step)
            loop.epoch, loop.current = loop.epoch + 1, dict.fromkeys(COUNTERS, 0)
        hooks.on_train_end(*own)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, only_worker: Path) -> Any:
    """Our module, with these in the place of Lightning."""
    monkeypatch.delenv("ELASTIC_AGENT_MEMORY")  # of several Checkpointers in one process, one after the other
    fakes = {
        "lightning": {},
        "lightning.pytorch": {"Callback": object},
        "lightning.pytorch.plugins": {},
        "lightning.pytorch.plugins.environments": {"TorchElasticEnvironment": object},
        "lightning.pytorch.strategies": {"DDPStrategy": DDPStrategy, "SingleDeviceStrategy": str},
    }
    for name, contents in fakes.items():
        fake = ModuleType(name)
        fake.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def loader_of(length: int = 24, **more: Any) -> Any:
    return DataLoader(Samples(length), **{"batch_size": 2, "shuffle": True, **more})


def run(library: Any, directory: Path, *, until: int | None = None, epochs: int = 2, **place: Any) -> Trainer:
    trainer = Trainer(library.ElasticCallback(str(directory), save_every=until or 100), **place)
    trainer.fit(loader_of(), epochs=epochs, until=until)
    return trainer


def test_no_sample_is_repeated_or_lost_when_the_world_changes(library: Any, tmp_path: Path) -> None:
    """Rank 1 of two trains nothing here; its share is what rank 0 leaves out."""
    whole = run(library, tmp_path / "whole")
    first = run(library, tmp_path / "rank 0", until=5, world_size=2)
    other = run(library, tmp_path / "rank 1", until=5, world_size=2, rank=1)
    second = run(library, tmp_path / "rank 0")
    assert sorted(first.trained + other.trained) == sorted(whole.trained[:20])
    assert second.trained == whole.trained[20:]
    assert second.epoch_ends == [5 + 2, 5 + 2 + 12], (
        "the epoch goes on where it was, in batches of this world"
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_same_world_gets_the_very_batches_of_an_undisturbed_run(
    library: Any, tmp_path: Path, accumulate: int
) -> None:
    whole = run(library, tmp_path / "whole", accumulate=accumulate)
    stops = (3, 4, 5, None)  # after 4 of 12 batches: an epoch of its own
    parts = [run(library, tmp_path / "parts", until=until, accumulate=accumulate) for until in stops]
    assert [index for part in parts for index in part.trained] == whole.trained
    assert [step for part in parts for step in part.epoch_ends] == whole.epoch_ends


@pytest.mark.parametrize(
    ("drop_last", "length", "before", "until", "now", "ends"),
    [
        (False, 33, 16, 1, 1, 1 + 1),  # 1 sample is left, not half of the epoch
        (False, 33, 1, 16, 8, 16 + 1),
        (True, 33, 1, 15, 8, 15 + 1),  # what is left fills no batch: one that reaches into the next epoch
        (True, 35, 8, 1, 1, 1 + 9),
    ],
)
def test_an_epoch_ends_where_its_samples_end(
    library: Any, tmp_path: Path, drop_last: bool, length: int, before: int, until: int, now: int, ends: int
) -> None:
    """In worlds of `before` and `now` ranks, with batches of 2."""
    loader = {"length": length, "drop_last": drop_last}
    trainer = Trainer(library.ElasticCallback(str(tmp_path), save_every=until), world_size=before)
    trainer.fit(loader_of(**loader), until=until)
    after = Trainer(library.ElasticCallback(str(tmp_path)), world_size=now)
    after.fit(loader_of(**loader), epochs=1)
    assert after.epoch_ends == [ends]


def test_a_distributed_sampler_keeps_its_own_seed(library: Any, tmp_path: Path) -> None:
    sampler = DistributedSampler(range(24), num_replicas=1, rank=0, seed=9)
    trainer = Trainer(library.ElasticCallback(str(tmp_path)))
    trainer.fit(loader_of(shuffle=None, sampler=sampler), epochs=1)
    assert trainer.trained == list(sampler)


def test_scores_that_differ_between_ranks_are_carried_as_plain_numbers(library: Any, tmp_path: Path) -> None:
    trainer = Trainer(library.ElasticCallback(str(tmp_path), save_every=3))
    trainer.callbacks[0].waited = {"best": torch.tensor(0.1), "all": [torch.tensor(3), "x"]}
    saved = library._Callbacks(trainer, trainer.callback).state_dict()
    assert not [one for one in tree_leaves(saved) if isinstance(one, torch.Tensor)]
    trainer.fit(loader_of(), until=3)
    waited = run(library, tmp_path, until=4).callbacks[0].waited
    assert repr(waited) == "{'best': tensor(0.1000), 'all': [tensor(3), 'x']}"
    assert waited["best"].item() == torch.tensor(0.1).item()


def test_a_finished_training_does_no_more_step(library: Any, tmp_path: Path) -> None:
    assert run(library, tmp_path).global_step == 24
    again = run(library, tmp_path)
    assert (again.global_step, again.trained) == (24, [])
    assert len(run(library, tmp_path, epochs=3).trained) == 24


def test_a_planned_change_comes_after_the_end_of_the_epoch(library: Any, tmp_path: Path) -> None:
    trainer = Trainer(library.ElasticCallback(str(tmp_path)))
    seen = []

    def drain(step: int) -> None:
        if step == 12:
            seen.append(trainer.epoch_ends)
            raise Drained(step)

    progress.on_step(drain)
    with pytest.raises(Drained):
        trainer.fit(loader_of())
    assert seen == [[12]]


class Wrapped(list[int]):
    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)
        self._sampler = sampler


class Wrapper(DistributedSampler[int]):
    """As Lightning's around a sampler that it does not know, under ddp."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(Wrapped(sampler), num_replicas=1, rank=0)  # type: ignore[arg-type]


class Backwards(SequentialSampler):
    pass


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("strategy", FSDPStrategy(), "FSDPStrategy may spread the state"),
        ("strategy", DDPStrategy(comm_state=object()), "ddp_comm_state"),
        ("strategy", DDPStrategy(averaging_period=4), "model_averaging_period"),
        ("ckpt_path", "last", "without ckpt_path"),
        ("limit_train_batches", 0.5, r"limit_train_batches=0\.5"),
        ("overfit_batches", 2, "overfit_batches=2"),
        ("reload_dataloaders_every_n_epochs", 1, "reload_dataloaders_every_n_epochs"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(
    library: Any, tmp_path: Path, name: str, value: object, text: str
) -> None:
    trainer = Trainer(library.ElasticCallback(str(tmp_path)))
    setattr(trainer, name, value)
    with pytest.raises(UnsupportedTraining, match=text):
        trainer.fit(loader_of())


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ([[1]], "list is no DataLoader"),
        (DataLoader(Endless()), "IterableDataset"),
        (loader_of(batch_size=None), "NoneType makes batches of its own"),
        (loader_of(shuffle=None, sampler=WeightedRandomSampler([1.0], 3)), "order of WeightedRandomSampler"),
        (
            loader_of(shuffle=None, sampler=Wrapper(WeightedRandomSampler([1.0], 3))),
            "order of WeightedRandomSampler",
        ),
        (loader_of(shuffle=None, sampler=Backwards(range(9))), "order of Backwards"),
        (
            loader_of(shuffle=None, sampler=RandomSampler(range(9), replacement=True)),
            "order of RandomSampler",
        ),
    ],
)
def test_data_that_cannot_be_continued_is_refused_by_name(
    library: Any, tmp_path: Path, loader: Any, text: str
) -> None:
    with pytest.raises(UnsupportedTraining, match=text):
        Trainer(library.ElasticCallback(str(tmp_path))).fit(loader)


def test_the_environment_has_the_numbers_of_this_world(library: Any) -> None:
    environment = library.ElasticEnvironment({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"})
    assert (environment.devices, environment.num_nodes) == (2, 3)
    environment.validate_settings(2, 3)
    with pytest.raises(ClusterEnvironmentError, match=r"num_nodes=environment\.num_nodes"):
        environment.validate_settings(2, 4)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "same number of workers"),
    ],
)
def test_an_environment_that_lightning_cannot_have_is_refused(
    library: Any, environ: dict[str, str], text: str
) -> None:
    with pytest.raises(ClusterEnvironmentError, match=text):
        library.ElasticEnvironment(environ)


def test_without_the_library_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(LibraryMissing, match="pip install lightning"):
        importlib.import_module(MODULE)
