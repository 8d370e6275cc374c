"""The samples of epoch after epoch as one stream, for libraries whose own loop deals them out to the ranks.

All ranks know the stream: epoch 0 of the dataset in its order, then epoch 1, and so on, without a gap. The *position*
says how many samples of it are finished, over all ranks together. It is all that must survive a change: another world
takes larger or smaller batches from there on, so no sample is repeated and none is lost. A batch may span two epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from ..errors import SamplerMismatch


@dataclass(frozen=True, slots=True)
class Order:
    """The order of each epoch of a dataset of `length` samples: that of DistributedSampler with the same seed."""

    length: int
    seed: int
    shuffle: bool

    def of_epoch(self, epoch: int) -> torch.Tensor:
        return _of_epoch(self, epoch)

    def between(self, start: int, end: int) -> list[int]:
        """The samples at these positions of the stream."""
        found = []
        while start < end:
            epoch, offset = divmod(start, self.length)
            count = min(self.length - offset, end - start)
            found += self.of_epoch(epoch)[offset : offset + count].tolist()
            start += count
        return found


@functools.lru_cache(maxsize=2)
def _of_epoch(order: Order, epoch: int) -> torch.Tensor:
    if not order.shuffle:
        return torch.arange(order.length)
    return torch.randperm(order.length, generator=torch.Generator().manual_seed(order.seed + epoch))


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

    def state_dict(self) -> dict[str, int | bool]:
        order = self._order
        return {
            "position": self.position,
            "length": order.length,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Go on at the position of `state`. Raises SamplerMismatch."""
        own = self.state_dict()
        if differing := sorted(name for name in own if name != "position" and state.get(name) != own[name]):
            raise SamplerMismatch(
                f"the data is in another order than before, so samples would be repeated and lost: "
                f"{', '.join(f'{name} was {state.get(name)} and is {own[name]}' for name in differing)}. Give the "
                "training the same dataset, shuffling and seed, or another directory"
            )
        self.position = int(state["position"])

    def __len__(self) -> int:
        return self._batches * len(range(self._samples)[self._share])

    def __iter__(self) -> Iterator[int]:
        return iter(()) if self.is_over else self._deal(self.position)

    def _deal(self, start: int) -> Iterator[int]:
        for batch in range(self._batches):
            begun_at = start + batch * self._samples
            yield from self._order.between(begun_at, begun_at + self._samples)[self._share]
