"""Parts of the state that each rank has for itself, such as the error feedback of PowerSGD.

Each rank's are one row of bytes: what torch writes of `{name of the part: its state}`. A checkpoint holds the rows of
all ranks, and a rank loads its own. In a world of another size no row is any rank's own: only a part's `Reshard` can
say what its ranks go on with.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointMismatch, OtherWorldSize
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


def states_for(
    rank: int,
    world_size: int,
    rows: Sequence[torch.Tensor],
    rules: Rules,
    where: str,
    *,
    some: bool = False,
) -> dict[str, Any]:
    """What the parts in `rules` load on this rank; `rows` are those of all ranks when `where` was saved. `some`:
    there may be those of more parts.

    Raises CheckpointMismatch for parts of other names, OtherWorldSize where a part has no rule.
    """
    resized = len(rows) not in (0, world_size)
    states = {one: unpack(rows[one]) for one in (range(len(rows)) if resized else [rank][: len(rows)])}
    saved = next(iter(states.values()), {})
    if saved.keys() != rules.keys() and not (some and rules.keys() <= saved.keys()):
        raise CheckpointMismatch(
            f"{where} holds of each rank {sorted(saved)}, this script declares {sorted(rules)}: give Checkpointer the "
            "same per_rank, or use another directory"
        )
    if not resized:
        return saved
    without = sorted(name for name, rule in rules.items() if rule is None)
    if without:
        raise OtherWorldSize(
            f"{where} holds {without} of each of {len(rows)} ranks, and this world has {world_size}: start with "
            f"{len(rows)} workers again, or say how to reshape it: "
            f"Checkpointer(..., per_rank={{{without[0]!r}: rule}})"
        )
    found = {}
    for name, rule in rules.items():
        assert rule is not None
        try:
            found[name] = rule({one: state[name] for one, state in states.items()}, rank, world_size)
        except Exception as error:
            raise CheckpointMismatch(
                f"the rule of {name!r} in per_rank cannot reshape {where} from {len(rows)} ranks to {world_size}: "
                f"{error!r}"
            ) from error
    return found
