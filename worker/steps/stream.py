"""The samples of epoch after epoch as one stream, for libraries whose own loop deals them out to the ranks.

All ranks know the stream: epoch 0 of the dataset in its order, then epoch 1, and so on, without a gap. The *position*
says how many samples of it are finished, over all ranks together. It is all that must survive a change: another world
takes larger or smaller batches from there on, so no sample is repeated and none is lost. A batch may span two epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from ..errors import SamplerMismatch


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How a library's loop takes samples: iterations of `batches`, and a step after every `per_step` of them.

    batches: of one rank in one iteration over its loader. The last step of an iteration has what is left of them.
    samples: of one batch, over all ranks together.
    """

    batches: int
    samples: int
    per_step: int = 1

    @property
    def per_iteration(self) -> int:
        """Samples."""
        return self.batches * self.samples

    def finished(self, steps: int) -> int:
        """How many samples have been taken by so many steps."""
        iterations, rest = divmod(steps, math.ceil(self.batches / self.per_step))
        return iterations * self.per_iteration + rest * self.per_step * self.samples


@dataclass(frozen=True, slots=True)
class Order:
    """The order of each epoch of a dataset of `length` samples: that of DistributedSampler with the same seed."""

    length: int
    seed: int
    shuffle: bool

    def of_epoch(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))

    def between(self, start: int, end: int) -> Iterator[int]:
        """The samples at these positions of the stream."""
        while start < end:
            epoch, offset = divmod(start, self.length)
            count = min(self.length - offset, end - start)
            yield from self.of_epoch(epoch)[offset : offset + count].tolist()
            start += count


class StreamSampler(Sampler[int]):
    """The next samples of the stream with every iteration, for all ranks together: a library gives each its batches."""

    def __init__(self, order: Order, rhythm: Rhythm) -> None:
        self._order = order
        self._rhythm = rhythm
        self._begun_at = 0
        self._steps_before = 0
        self._iterations = 0
        self.is_over = False
        """The training was finished when it was loaded: there is no more to draw."""

    def position(self, steps: int) -> int:
        """Samples of the stream that are finished after `steps` steps of the training."""
        return self._begun_at + self._rhythm.finished(steps - self._steps_before)

    def epoch(self, steps: int) -> float:
        """Epochs that are finished after `steps` steps."""
        return self.position(steps) / self._order.length

    def state_dict(self, steps: int) -> dict[str, int | bool]:
        order = self._order
        return {
            "position": self.position(steps),
            "length": order.length,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: dict[str, int | bool], steps: int) -> None:
        """Go on at the position of `state`, after `steps` steps. Raises SamplerMismatch."""
        own = self.state_dict(steps)
        if differing := sorted(name for name in own if name != "position" and state.get(name) != own[name]):
            raise SamplerMismatch(
                f"the data is in another order than before, so samples would be repeated and lost: "
                f"{', '.join(f'{name} was {state.get(name)} and is {own[name]}' for name in differing)}. Give the "
                "training the same dataset, shuffling and seed, or another directory"
            )
        self._begun_at, self._steps_before, self._iterations = int(state["position"]), steps, 0

    def __len__(self) -> int:
        return self._rhythm.per_iteration

    def __iter__(self) -> Iterator[int]:
        if self.is_over:
            return iter(())
        start = self._begun_at + self._iterations * self._rhythm.per_iteration
        self._iterations += 1
        return self._order.between(start, start + self._rhythm.per_iteration)
