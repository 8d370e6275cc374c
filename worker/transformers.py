"""Elastic training by the Trainer of Hugging Face's transformers: planned changes lose no step, a kill loses little.

    trainer = Trainer(model=model, args=TrainingArguments(max_steps=1000), train_dataset=dataset)
    trainer.add_callback(ElasticCallback(trainer, "runs/x"))
    trainer.train()

The callback has a `Checkpointer` of the model, the optimizer, the scheduler, the gradient scaler, the Trainer's own
progress and the position in the data, and loads it when `train()` begins. `train(resume_from_checkpoint=...)` is not
used: it counts steps of the present world to find its place in the data, and another world has steps of another size.
A sampler of ours takes the place of the Trainer's, and deals out one stream of epochs (see `stream`).

The boundary of a step (see `progress.step`) is after what the Trainer does at its end: logs, evaluation and the
Trainer's own checkpoint. These belong to the step, and a planned change waits for them.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from .checkpointing.checkpointer import Checkpointer
from .errors import LibraryMissing, UnsupportedTraining
from .steps.progress import step
from .steps.sampler import Order, StreamSampler

try:
    from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise LibraryMissing(
        f"elastic_agent.worker.transformers needs transformers and accelerate, and there is no {error.name}: "
        "pip install 'transformers[torch]'"
    ) from error

_PROGRESS = (
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""The fields of TrainerState that training changes; the others come from the arguments."""

_LOGGED_SINCE = ("_initial_global_step", "_globalstep_last_logged")
"""Attributes in which a Trainer notes the step at which it began: it divides sums of losses by what came after."""


class ElasticCallback(TrainerCallback):
    """Lets a Trainer take part in planned changes, and go on after a kill. Add it to the Trainer that it is given.

    directory: of the checkpoints, see `Checkpointer`. Not the Trainer's `output_dir`.
    save_every: save every so many steps. None: whenever the Trainer saves. The end of the training is saved, too.
    memory_every, and what else a `Checkpointer` may be given: see there.

    TrainingArguments needs `max_steps`, which means the same in every world. When `train()` begins, what cannot be
    carried raises UnsupportedTraining, with what to change.
    """

    def __init__(
        self,
        trainer: Trainer,
        directory: str,
        *,
        save_every: int | None = None,
        memory_every: int | None = None,
        **checkpointer: Any,
    ) -> None:
        if save_every is not None and save_every < 1:
            raise ValueError(f"save_every is {save_every}, expected at least 1")
        self._trainer = trainer
        self._directory = directory
        self._save_every = save_every
        self._options = {"memory_every": memory_every, **checkpointer}
        self._checkpoints: Checkpointer | None = None
        self._finished = 0
        """The newest step whose boundary was reported."""
        self._saved = 0
        """The newest step that was saved, or loaded."""
        self._save_is_due = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._checkpoints is not None:
            raise UnsupportedTraining(
                "this Trainer has trained already: give each training a Trainer, a callback and a directory of its own"
            )
        loader = parts["train_dataloader"]
        refuse(self._trainer, loader)
        self._stream = _stream(args, loader)
        loader.set_sampler(self._stream)
        # An iteration draws a seed, from the global random numbers if there is no generator. A training that goes on
        # within an epoch has one iteration more.
        loader.base_dataloader.generator = torch.Generator()
        self._checkpoints = Checkpointer(self._directory, self._contents(**parts), **self._options)
        self._finished = self._saved = self._checkpoints.load()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stream.batch_is_done()
        state.epoch = self._stream.epoch
        self._save_is_due = self._save_every is not None and state.global_step % self._save_every == 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stream.batch_is_done()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has saved. What the evaluation decides, such as save_strategy="best", is known only here."""
        if self._save_every is None:
            self._save_is_due = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_step(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The end of the training comes from anywhere: max_steps, an evaluation, another callback.
        self._save_is_due |= control.should_training_stop
        self._end_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A callback behind this one may have ended the training at the end of the epoch.
        self._save_is_due = True
        self._save(state.global_step)
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _end_step(self, done: int) -> None:
        if done != self._finished:
            self._finished = done
            step(done)
        self._save(done)

    def _save(self, done: int) -> None:
        if self._save_is_due and done > self._saved and self._checkpoints is not None:
            self._saved = done
            self._checkpoints.save(done)
        self._save_is_due = False

    def _contents(self, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> dict[str, Any]:
        inner = getattr(optimizer, "optimizer", optimizer)
        contents = {"model": model, "optimizer": inner, "scheduler": lr_scheduler}
        if (scaler := getattr(optimizer, "scaler", None)) is not None:
            contents["scaler"] = scaler
        return {**contents, "trainer": _Progress(self._trainer, self._stream)}


class _Progress:
    """What the Trainer itself has to remember, as a part of a checkpoint."""

    def __init__(self, trainer: Any, stream: StreamSampler) -> None:
        self._trainer = trainer
        self._stream = stream

    def state_dict(self) -> dict[str, Any]:
        state, control = self._trainer.state, self._trainer.control
        fields = dataclasses.asdict(state)
        own = {
            "state": {name: fields[name] for name in _PROGRESS if name in fields},
            "callbacks": [[name, one.state()["attributes"]] for name, one in self._stateful()],
            "stopped": control.should_training_stop and state.global_step < state.max_steps,
        }
        # As the Trainer writes it into its own checkpoints.
        return {"data": self._stream.state_dict(), "trainer": json.dumps(own)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        own, trainer = json.loads(saved["trainer"]), self._trainer
        for name, value in own["state"].items():
            setattr(trainer.state, name, value)
        done = trainer.state.global_step
        for name in _LOGGED_SINCE:
            if hasattr(trainer, name):
                setattr(trainer, name, done)
        self._stream.load_state_dict(saved["data"])
        trainer.state.epoch = self._stream.epoch
        self._stream.is_over = own["stopped"] or done >= trainer.state.max_steps
        left = list(own["callbacks"])
        for name, callback in self._stateful():
            found = next((one for one in left if one[0] == name), None)
            if found is not None:
                left.remove(found)
                for attribute, value in found[1].items():
                    setattr(callback, attribute, value)

    def _stateful(self) -> list[tuple[str, Any]]:
        """The callbacks that say what they have to remember, such as EarlyStoppingCallback."""
        callbacks = self._trainer.callback_handler.callbacks
        return [(type(one).__name__, one) for one in callbacks if callable(getattr(one, "state", None))]


def refuse(trainer: Any, loader: Any) -> None:
    """Raises UnsupportedTraining for what this cannot carry through a change, with what to do."""
    args, state = trainer.args, trainer.state
    by_epoch = [
        name
        for name in ("logging_strategy", "eval_strategy", "save_strategy")
        if getattr(args, name, None) == "epoch"
    ]
    problem = None
    if getattr(trainer, "is_deepspeed_enabled", False):
        problem = "DeepSpeed spreads the state over the ranks: train without it, or without this callback"
    elif getattr(trainer, "is_fsdp_enabled", False):
        problem = "FSDP spreads the state over the ranks: train without it, or without this callback"
    elif getattr(trainer.accelerator, "parallelism_config", None) is not None:
        problem = "parallelism_config spreads the model or its input over the ranks: only data parallelism is carried"
    elif args.max_steps <= 0:
        problem = (
            f"TrainingArguments has no max_steps, and {args.num_train_epochs:g} epochs are other steps, and another "
            f"learning rate, with every node that joins or leaves: set max_steps={state.max_steps}, which they are in "
            "this world"
        )
    elif args.auto_find_batch_size:
        problem = "auto_find_batch_size begins the training again by itself: set per_device_train_batch_size"
    elif state.is_hyper_param_search:
        problem = "hyperparameter_search is many trainings in one: use the callback in one training"
    elif by_epoch:
        problem = f"{', '.join(by_epoch)} is 'epoch', which ends elsewhere after a change: set 'steps'"
    elif state.global_step:
        problem = (
            f"train() began at step {state.global_step}: call it without resume_from_checkpoint, the callback loads "
            "what is newest by itself"
        )
    else:
        problem = _refuse_data(loader)
    if problem is not None:
        raise UnsupportedTraining(problem)


def _refuse_data(loader: Any) -> str | None:
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is an IterableDataset, in which no place is found again: give the Trainer one with len()"
    if not isinstance(loader, DataLoaderShard):
        return f"{type(loader).__name__} deals out batches from rank 0: set dispatch_batches to False"
    sampler = loader.get_sampler()
    # Not a subclass: its order may be any.
    if type(sampler) is SequentialSampler or (
        type(sampler) in (RandomSampler, SeedableRandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
    ):
        return None
    return (
        f"the order of {type(sampler or loader.batch_sampler).__name__} cannot be continued: set "
        "train_sampling_strategy to 'random' or 'sequential'"
    )


def _stream(args: Any, loader: Any) -> StreamSampler:
    seed = args.seed if args.data_seed is None else args.data_seed
    shuffle = type(loader.get_sampler()) is not SequentialSampler
    order = Order(len(loader.dataset), shuffle, seed)
    return StreamSampler(order, batches=len(loader), samples=loader.total_batch_size)
