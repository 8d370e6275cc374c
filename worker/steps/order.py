"""The order of the samples of each epoch, which all ranks know, and the check that a loaded place is one in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import SamplerMismatch


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
