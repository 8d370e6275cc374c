"""Deals out the samples of an epoch to the ranks, and goes on where it was when their number changes.

All ranks know one *order* of the epoch: `torch.randperm` of seed + epoch, as in DistributedSampler. The *position* says
how many samples of that order are finished, over all ranks together. What is left is dealt like cards, one sample to
each rank in turn, so that after every step the finished samples are the first ones of the order, however many ranks
there were. Hence two numbers, epoch and position, are all that must survive a change, and another world deals out the
rest: no sample is repeated and none is lost.

The position moves in `step()` and not when a sample is drawn: a DataLoader draws ahead, by `prefetch_factor` batches
for each of its processes, and what was not trained on must be dealt again.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ..errors import SamplerError, SamplerMismatch
from . import progress

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16
"""Indices that are turned into Python numbers at a time."""


class ElasticSampler(Sampler[int]):
    """A DistributedSampler whose epoch survives restarts and changes of the world.

        sampler = ElasticSampler(dataset, batch_size=32)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, generator=torch.Generator())
        checkpoints = Checkpointer("runs/x", {"model": model, "optimizer": optimizer, "sampler": sampler})
        done = checkpoints.load()
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)          # goes on within the epoch that was loaded
            for batch in loader:
                train_one(batch)
                done += 1
                step(done)                    # here the position moves: call it before save()

    batch_size: samples of one batch of one rank, as the loader has it. After a change it may be another.
    batches_per_step: batches of one rank for each optimizer step, that is, for each `step()`: above 1 where gradients
        are accumulated. Batches that are left at the end of an epoch get a step of their own or none.
    drop_last: what happens at the end of the epoch when the samples do not come out even between the ranks. As in
        DistributedSampler, False repeats some from the beginning of the order until they do, at most one for each rank
        but the first; True leaves out as few. The loader's own `drop_last`, about batches, may be used with either.
    num_replicas, rank: this process's place in the world; the default process group's when left out.

    Every rank gets the same number of batches. One for training only: evaluation wants a DistributedSampler, since
    every `step()` moves the position of every ElasticSampler that is in use.

    Why the loader has a generator of its own: it draws a seed whenever an iteration begins, from torch's global random
    numbers otherwise, and a resumed run begins once more often than one that was never stopped.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int,
        batches_per_step: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("batches_per_step", batches_per_step)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if num_replicas is None or rank is None:
            own_rank, world_size = _place()
            num_replicas = world_size if num_replicas is None else num_replicas
            rank = own_rank if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank is {rank}, expected 0 to {num_replicas - 1}: num_replicas is {num_replicas}"
            )
        self._order = Order(len(dataset), shuffle, seed)
        self._step_samples = num_replicas * batch_size * batches_per_step
        self._drop_last = drop_last
        self._world_size = num_replicas
        self._rank = rank
        self._epoch = 0
        self._position = 0
        self._pass: _Pass | None = None
        self._warned = False
        # The listener must not keep a sampler alive that the script has dropped.
        weakref.finalize(
            self, progress.on_step(_forwarding(weakref.ref(self)), stage=progress.Stage.POSITION)
        )

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of this epoch's order that are finished, over all ranks together."""
        return self._position

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`. For the epoch that is under way, as after a load, this changes nothing."""
        epoch = operator.index(epoch)
        if epoch == self._epoch:
            return
        self._warn_of_missing_steps()
        self._epoch, self._position, self._pass = epoch, 0, None

    def __len__(self) -> int:
        """Samples of this rank: of the running iteration, all from its begin on; before it, what is left of the epoch.

        So `len(loader)` stays what it is while a loop runs, and `enumerate(loader)` from 0 ends there.
        """
        return self._pass.count if self._pass is not None else self._left()

    def _left(self) -> int:
        left = self._order.length - self._position
        return left // self._world_size if self._drop_last else -(-left // self._world_size)

    def __iter__(self) -> Iterator[int]:
        before = self._pass
        if (
            before is not None
            and before.complete
            and self._order.length - self._position < self._step_samples
        ):
            raise SamplerError(
                f"epoch {self._epoch} is over, and a second iteration would find nothing left of it: call "
                "set_epoch(epoch) at the beginning of each epoch"
            )
        current = self._pass = _Pass(self._position, self._left())
        for index in self._deal(current):
            if self._pass is not current:
                raise SamplerError(
                    "this iteration is over, since set_epoch(), load_state_dict() or another iteration has begun anew: "
                    "take a new iterator from the loader"
                )
            current.drawn += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the place in the epoch after the last finished step, and what its order is made of."""
        return self._order.state_at(epoch=self._epoch, position=self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, in a world of any size and with batches of any size.

        Raises SamplerMismatch, and changes nothing, when the order of the epoch is another here: then it is unknown
        which samples are left.
        """
        self._order.check(
            state,
            {"epoch": 2**63 - 1, "position": self._order.length},
            owner="ElasticSampler",
            otherwise="leave the sampler out of the state to begin an epoch anew",
        )
        self._epoch, self._position, self._pass = state["epoch"], state["position"], None

    def _deal(self, part: _Pass) -> Iterator[int]:
        """This rank's indices of what is left."""
        if not part.count:
            return
        order = self._order.of_epoch(self._epoch)
        first = part.begun_at + self._rank
        for start in range(0, part.count, _CHUNK):
            turns = torch.arange(start, min(start + _CHUNK, part.count))
            # Only the last turn can go beyond the end, and begins the order again there.
            yield from order[(first + turns * self._world_size) % self._order.length].tolist()

    def _advance(self) -> None:
        """One optimizer step is finished."""
        if self._pass is None:
            return  # no sample has been drawn since the epoch was set or loaded: it was a step of something else
        drawn = self._pass.begun_at + self._world_size * self._pass.drawn
        wanted = self._position + self._step_samples
        if wanted > drawn and not self._pass.complete:
            self._warn(
                f"step() finishes {self._step_samples} samples over all ranks, and {drawn - self._position} were drawn"
            )
        self._position = min(wanted, drawn, self._order.length)

    def _warn_of_missing_steps(self) -> None:
        if self._pass is None or not self._pass.complete:
            return
        drawn = min(self._order.length, self._pass.begun_at + self._world_size * self._pass.drawn)
        if drawn - self._position >= self._step_samples:
            self._warn(
                f"epoch {self._epoch} ended after {drawn} samples over all ranks, and step() has finished "
                f"{self._position}"
            )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "after a change samples would be repeated or lost: %s. Give ElasticSampler the loader's batch_size and "
                "the batches_per_step of your loop, and call step() once per optimizer step",
                what,
            )


class _Pass:
    """One iteration over what was left at `begun_at`: this rank draws `count` samples."""

    def __init__(self, begun_at: int, count: int) -> None:
        self.begun_at = begun_at
        self.count = count
        self.drawn = 0

    @property
    def complete(self) -> bool:
        return self.drawn == self.count


def _forwarding(sampler: weakref.ref[ElasticSampler]) -> Callable[[int], None]:
    def advance(step: int) -> None:
        alive = sampler()
        if alive is not None:
            alive._advance()

    return advance


def _place() -> tuple[int, int]:
    """Rank and world size of this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise SamplerError(
            f"WORLD_SIZE is {world_size} but there is no process group, so every rank would train on all samples: call "
            "init_process_group() before ElasticSampler(), or give it num_replicas and rank"
        )
    return 0, 1


# ---------------------------------------------------------------- the order of an epoch
#
# The order of the samples of each epoch, which all ranks know, and the check that a loaded place is one in it.


@dataclass(frozen=True, slots=True)
class Order:
    """The order of each epoch of a dataset of `length` samples: that of DistributedSampler with the same seed."""

    length: int
    shuffle: bool
    seed: int

    def of_epoch(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))

    def state_at(self, **place: int) -> dict[str, Any]:
        """Plain data: a place, and what the order is made of."""
        return {**place, **asdict(self)}

    def check(self, state: Any, most: Mapping[str, int], *, owner: str, otherwise: str) -> None:
        """Raises SamplerMismatch unless `state` is a place in this order, with numbers of 0 to those of `most`.

        In another order it is unknown which samples are left. For the message: whose state it is, and what to do if the
        order is meant to be another.
        """
        own = asdict(self)
        names = own.keys() | most.keys()
        if not isinstance(state, Mapping) or state.keys() != names:
            raise SamplerMismatch(f"this is no state of {owner}, which has {sorted(names)}: {state!r}")
        for name, meaning in (("length", "samples"), ("shuffle", "as shuffle"), ("seed", "as seed")):
            if state[name] != own[name]:
                raise SamplerMismatch(
                    f"the epoch that was under way had {state[name]} {meaning}, this sampler has {own[name]}: its "
                    f"order would be another, so that samples would be repeated and lost. Give {owner} the same "
                    f"dataset, shuffle and seed, or {otherwise}"
                )
        for name, limit in most.items():
            value = state[name]
            if type(value) is not int or not 0 <= value <= limit:
                raise SamplerMismatch(f"{name} of the sampler's state is {value!r}, expected 0 to {limit}")


# ---------------------------------------------------------------- streams
#
# The samples of epoch after epoch as one stream, for libraries whose own loop deals them out to the ranks.
#
# All ranks know the stream: epoch 0 of the dataset in its order, then epoch 1, and so on, without a gap. The *position*
# says how many samples of it are finished, over all ranks together. It is all that must survive a change: another world
# takes larger or smaller batches from there on, so no sample is repeated and none is lost. A batch may span two epochs.


_of_epoch = functools.lru_cache(maxsize=2)(Order.of_epoch)


def samples_between(order: Order, start: int, end: int) -> list[int]:
    """The samples at these positions of the stream."""
    found = []
    while start < end:
        epoch, offset = divmod(start, order.length)
        count = min(order.length - offset, end - start)
        found += _of_epoch(order, epoch)[offset : offset + count].tolist()
        start += count
    return found


class StreamSampler(Sampler[int]):
    """Gives an iteration of a library's loop the next samples of the stream. Whoever trains says `batch_is_done`.

    batches: of one rank in each iteration.
    samples: of one batch, over all ranks together.
    share: of each batch, what is this rank's. All, where the library gives each rank its own.
    """

    def __init__(self, order: Order, *, batches: int, samples: int, share: slice = slice(None)) -> None:
        self._order = order
        self._batches = batches
        self._samples = samples
        self._share = share
        self.position = 0
        """Samples of the stream that are finished. It moves by whole batches, and not when they are drawn."""
        self.is_over = False
        """The training was finished when it was loaded: there is no more to draw."""

    @property
    def epoch(self) -> float:
        """Epochs that are finished."""
        return self.position / self._order.length

    def batch_is_done(self) -> None:
        """On all ranks."""
        self.position += self._samples

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_at(position=self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of `state`. Raises SamplerMismatch, and changes nothing, in another order."""
        self._order.check(state, {"position": 2**63 - 1}, owner="the training", otherwise="another directory")
        self.position = state["position"]

    def __len__(self) -> int:
        return self._batches * len(range(self._samples)[self._share])

    def __iter__(self) -> Iterator[int]:
        return iter(()) if self.is_over else self._deal(self.position)

    def _deal(self, start: int) -> Iterator[int]:
        for batch in range(self._batches):
            begun_at = start + batch * self._samples
            yield from samples_between(self._order, begun_at, begun_at + self._samples)[self._share]
