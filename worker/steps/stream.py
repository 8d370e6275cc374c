"""The samples of epoch after epoch as one stream, for libraries whose own loop deals them out to the ranks.

All ranks know the stream: epoch 0 of the dataset in its order, then epoch 1, and so on, without a gap. The *position*
says how many samples of it are finished, over all ranks together. It is all that must survive a change: another world
takes larger or smaller batches from there on, so no sample is repeated and none is lost. A batch may span two epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from .order import Order

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
