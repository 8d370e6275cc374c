"""ElasticCallback for the Trainer of transformers, with a Trainer that has just the loop that it relies on."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from elastic_agent.worker import Drained, LibraryMissing, SamplerMismatch, UnsupportedTraining
from elastic_agent.worker.steps import progress

MODULE = "elastic_agent.worker.transformers"


@dataclasses.dataclass
class State:
    max_steps: int
    global_step: int = 0
    epoch: float = 0
    log_history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    is_hyper_param_search: bool = False


class Loader:
    """As accelerate's: the batches of rank 0 of `size` ranks."""

    def __init__(self, dataset: TensorDataset, sampler: Any, batch: int, size: int) -> None:
        self.dataset = dataset
        self.batch_sampler = BatchSampler(sampler, batch, drop_last=False)
        self.base_dataloader = DataLoader(dataset, batch_sampler=self.batch_sampler)
        self._size = size
        self.total_batch_size = batch * size

    def get_sampler(self) -> Any:
        return self.batch_sampler.sampler

    def set_sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of each batch, of all ranks."""
        batches = iter(self.batch_sampler)
        while of_all_ranks := list(itertools.islice(batches, self._size)):
            yield [index for batch in of_all_ranks for index in batch]


class Seedable(RandomSampler):
    """As accelerate's."""


class Patience:
    """A callback with a state, such as EarlyStoppingCallback."""

    def __init__(self) -> None:
        self.worse = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"worse": self.worse}}


class Trainer:
    """The order of events, and the arithmetic of iterations, of transformers 5."""

    def __init__(self, *, size: int = 1, samples: int = 20, shuffle: bool = True, **arguments: Any) -> None:
        given: dict[str, Any] = {
            "max_steps": 12,
            "num_train_epochs": 3,
            "auto_find_batch_size": False,
            "gradient_accumulation_steps": 1,
            "seed": 5,
            "data_seed": None,
            "logging_strategy": "steps",
        }
        self.args = SimpleNamespace(**{**given, **arguments})
        self.accelerator = SimpleNamespace(parallelism_config=None)
        self.control = SimpleNamespace(should_save=False, should_training_stop=False)
        self.state = State(self.args.max_steps if self.args.max_steps > 0 else 15)
        self.callback_handler = SimpleNamespace(callbacks=[Patience()])
        dataset = TensorDataset(torch.arange(samples))
        sampler = Seedable(dataset) if shuffle else SequentialSampler(dataset)
        self.loader = Loader(dataset, sampler, batch=2, size=size)
        self.model = torch.nn.Linear(1, 1)
        self._globalstep_last_logged = 0
        self.stops_at = self.stops_late_at = -1
        self.saves_at: tuple[int, ...] = ()
        self.trained: dict[int, list[int]] = {}
        """The samples of each step, over all ranks."""

    def train(self, *, until: int | None = None) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        (callback,) = self.callback_handler.callbacks[1:]
        state, control, per_step = self.state, self.control, self.args.gradient_accumulation_steps
        parts = {"model": self.model, "optimizer": optimizer, "lr_scheduler": scheduler}
        callback.on_train_begin(self.args, state, control, train_dataloader=self.loader, **parts)
        while not control.should_training_stop:
            steps = _in_groups(self.loader, per_step)
            if not steps:
                break
            for batches in steps:
                callback.on_step_begin(self.args, state, control)
                if state.global_step == until:
                    return
                for _ in batches[1:]:
                    callback.on_substep_end(self.args, state, control)
                state.global_step += 1
                control.should_training_stop = state.global_step >= state.max_steps
                callback.on_step_end(self.args, state, control)
                state.log_history.append({"step": state.global_step})
                # The evaluation, which comes after our on_step_end, stops early or finds the best.
                control.should_training_stop |= state.global_step == self.stops_at
                if state.global_step in self.saves_at:
                    callback.on_save(self.args, state, control)
                self.trained[state.global_step] = [index for batch in batches for index in batch]
                if control.should_training_stop:
                    break
            callback.on_epoch_end(self.args, state, control)
            control.should_training_stop |= state.global_step == self.stops_late_at
        callback.on_train_end(self.args, state, control)


def _in_groups(loader: Loader, size: int) -> list[list[list[int]]]:
    batches = list(loader)
    return [batches[start : start + size] for start in range(0, len(batches), size)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, only_worker: Path) -> Any:
    """Our module, with these in the place of the libraries."""
    monkeypatch.delenv("ELASTIC_AGENT_MEMORY")  # of several Checkpointers in one process, one after the other
    fakes = {"transformers": ModuleType("transformers"), "accelerate": ModuleType("accelerate")}
    fakes["accelerate.data_loader"] = ModuleType("accelerate.data_loader")
    fakes["transformers"].__dict__.update(Trainer=Trainer, TrainerCallback=object)
    fakes["accelerate.data_loader"].__dict__.update(DataLoaderShard=Loader, SeedableRandomSampler=Seedable)
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def run(library: Any, directory: Path, *, until: int | None = None, **arguments: Any) -> Trainer:
    trainer = Trainer(**arguments)
    callback = library.ElasticCallback(trainer, str(directory), save_every=until or 100)
    trainer.callback_handler.callbacks.append(callback)
    trainer.train(until=until)
    return trainer


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_sample_is_repeated_or_lost_when_the_world_changes(
    library: Any, tmp_path: Path, shuffle: bool
) -> None:
    first = run(library, tmp_path, until=4, size=2, shuffle=shuffle)
    second = run(library, tmp_path, until=6, size=3, shuffle=shuffle)
    third = run(library, tmp_path, size=1, shuffle=shuffle)
    alone = [
        index
        for step in range(1, 13)
        for index in next(run.trained[step] for run in (first, second, third) if step in run.trained)
    ]
    assert len(alone) == 4 * 4 + 2 * 6 + 6 * 2
    assert set(first.trained) | set(second.trained) | set(third.trained) == set(range(1, 13))
    assert [sorted(alone[start : start + 20]) for start in (0, 20)] == [list(range(20))] * 2
    assert (alone[:20] == list(range(20))) == (not shuffle)
    assert third.state.epoch == 2


@pytest.mark.parametrize(("per_step", "samples"), [(1, 20), (1, 19), (2, 24), (3, 24)])
def test_the_same_world_gets_the_very_batches_of_an_undisturbed_run(
    library: Any, tmp_path: Path, per_step: int, samples: int
) -> None:
    options = {"gradient_accumulation_steps": per_step, "samples": samples, "size": 2}
    whole = run(library, tmp_path / "whole", **options)
    parts = [run(library, tmp_path / "parts", until=until, **options) for until in (5, 11, None)]
    trained: dict[int, list[int]] = {}
    for part in parts:
        assert not trained.keys() & part.trained.keys()
        trained |= part.trained
    assert trained == whole.trained


def test_progress_of_the_trainer_goes_on(library: Any, tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.callback_handler.callbacks[0].worse = 2
    trainer.callback_handler.callbacks.append(library.ElasticCallback(trainer, str(tmp_path), save_every=7))
    trainer.train(until=7)
    after = run(library, tmp_path, until=8)
    assert after.callback_handler.callbacks[0].worse == 2
    assert [line["step"] for line in after.state.log_history] == list(range(1, 9)), "the log of step 7, too"
    assert after._globalstep_last_logged == 7


def test_a_finished_training_does_no_more_step(library: Any, tmp_path: Path) -> None:
    run(library, tmp_path)
    again = run(library, tmp_path)
    assert again.state.global_step == 12
    assert again.trained == {}
    assert run(library, tmp_path, max_steps=14).trained.keys() == {13, 14}


@pytest.mark.parametrize("way", ["stops_at", "stops_late_at"])
def test_the_end_is_saved_whatever_stopped_the_training(library: Any, tmp_path: Path, way: str) -> None:
    """Late: by a callback that comes after ours, at the end of an epoch of 10 steps."""
    trainer = Trainer()
    setattr(trainer, way, 10)
    trainer.callback_handler.callbacks.append(library.ElasticCallback(trainer, str(tmp_path)))
    trainer.train()
    again = run(library, tmp_path)
    assert (again.state.global_step, again.trained) == (10, {})


def test_without_save_every_each_save_of_the_trainer_is_one_of_ours(library: Any, tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.saves_at = (3, 10)
    trainer.callback_handler.callbacks.append(library.ElasticCallback(trainer, str(tmp_path), keep=9))
    trainer.train()
    assert sorted(int(path.stem.split("-")[1]) for path in tmp_path.glob("step-*.json")) == [3, 10, 12]


def test_a_planned_change_comes_after_all_that_belongs_to_the_step(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    seen = []

    def drain(step: int) -> None:
        if step == 3:
            seen.append(list(trainer.state.log_history))
            raise Drained(step)

    progress.on_step(drain)
    trainer.callback_handler.callbacks.append(library.ElasticCallback(trainer, str(tmp_path)))
    with pytest.raises(Drained):
        trainer.train()
    assert [[line["step"] for line in log] for log in seen] == [[1, 2, 3]]


def test_other_data_is_refused(library: Any, tmp_path: Path) -> None:
    run(library, tmp_path, until=3)
    with pytest.raises(RuntimeError, match="had 20 samples, this sampler has 22") as raised:
        run(library, tmp_path, samples=22)
    assert isinstance(raised.value.__cause__, SamplerMismatch)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda one: setattr(one, "is_deepspeed_enabled", True), "DeepSpeed"),
        (lambda one: setattr(one, "is_fsdp_enabled", True), "FSDP"),
        (lambda one: setattr(one.accelerator, "parallelism_config", object()), "parallelism_config"),
        (lambda one: setattr(one.args, "max_steps", -1), "set max_steps=12"),
        (lambda one: setattr(one.args, "auto_find_batch_size", True), "auto_find_batch_size"),
        (lambda one: setattr(one.args, "eval_strategy", "epoch"), "eval_strategy is 'epoch'"),
        (lambda one: setattr(one.state, "is_hyper_param_search", True), "hyperparameter_search"),
        (lambda one: setattr(one.state, "global_step", 4), "without resume_from_checkpoint"),
        (
            lambda one: one.loader.set_sampler(RandomSampler(range(9), replacement=True)),
            "order of RandomSampler cannot be continued",
        ),
        (
            lambda one: one.loader.set_sampler(type("Sorted", (RandomSampler,), {})(one.loader.dataset)),
            "order of Sorted cannot be continued",
        ),
        (lambda one: setattr(one.loader, "dataset", Endless()), "IterableDataset"),
        (lambda one: setattr(one, "loader", SimpleNamespace(dataset=one.loader.dataset)), "dispatch_batches"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(
    library: Any, tmp_path: Path, change: Any, text: str
) -> None:
    trainer = Trainer()
    change(trainer)
    trainer.callback_handler.callbacks.append(library.ElasticCallback(trainer, str(tmp_path)))
    with pytest.raises(UnsupportedTraining, match=text):
        trainer.train()


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_without_the_library_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(LibraryMissing, match=r"pip install 'transformers\[torch\]'"):
        importlib.import_module(MODULE)
