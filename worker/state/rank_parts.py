"""Parts of the state that each rank has for itself, such as the error feedback of PowerSGD.

Ranks that save a state that is the same on all of them bring them as one row of bytes: what torch writes of `{name of
the part: its state}`. A checkpoint holds those of all ranks, and a rank loads its own. In a world of another size none
is any rank's own: only a part's `Reshard` can say what its ranks go on with.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from .state_dicts import Part, is_plain, prove_loadable, state_of, with_numbers

Reshard = Callable[[Mapping[int, Any], int, int], Any]
"""The part's states by rank when they were saved, this process's rank, and the size of the world now; what this rank
loads. It is called on each rank, where the world's size has changed."""

Rules = Mapping[str, Reshard | None]
"""By the name of the part; None: its state cannot be reshaped."""


def rules_of(
    of_each_rank: Collection[str] | Rules, parts: Collection[str], of_rank_0: Collection[str]
) -> dict[str, Reshard | None]:
    """Raises ValueError for what is no part of the state, or rank 0's."""
    rules = dict(of_each_rank) if isinstance(of_each_rank, Mapping) else dict.fromkeys(of_each_rank)
    if unknown := set(rules) - set(parts):
        raise ValueError(
            f"per_rank names {sorted(unknown)}, which are no parts of the state: expected some of {sorted(parts)}"
        )
    if both := set(rules).intersection(of_rank_0):
        raise ValueError(
            f"{sorted(both)} cannot be from_rank_0 and per_rank: leave them out of one of the two"
        )
    return rules


def pack(parts: Mapping[str, Part], step: int) -> bytes:
    """This rank's row. Raises NotPlainData, and what the parts' `state_dict` raises."""
    states = with_numbers({name: state_of(part) for name, part in parts.items()})
    buffer = io.BytesIO()
    torch.save(states, buffer)
    if not is_plain(states):
        buffer.seek(0)
        prove_loadable(buffer, step, states)
    return buffer.getvalue()


def unpack(row: torch.Tensor) -> dict[str, Any]:
    """The states in a rank's row, on the CPU."""
    stream = io.BytesIO(row.numpy().data)
    states: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
    return states
