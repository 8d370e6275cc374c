"""What a checkpoint holds: the states of all parts, the same on all ranks, and the random state of each rank."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError
from ..memory.rank_state import Buffers
from ..ranks.group import Group, current_group
from ..ranks.replicas import DIGEST_BYTES, Replicas
from ..state import rng
from ..state.state_dicts import Part, modules_in, state_of

# What a rank brings to save(): the step and a digest of its state (see `replicas`), followed by its random state.
_CALL = struct.Struct(f"!q{DIGEST_BYTES}s")


class Contents:
    """Of one Checkpointer."""

    def __init__(
        self, parts: Mapping[str, Part], of_rank_0: Collection[str], *, is_compared: bool = False
    ) -> None:
        """`is_compared`: copies in memory are made somewhere, of a state that all ranks have shown to be the same."""
        self.is_compared = is_compared
        self.parts = dict(parts)
        self.of_rank_0 = frozenset(of_rank_0)
        self.replicas = Replicas(self.parts, of_rank_0)

    def states(self) -> dict[str, Any]:
        return {name: state_of(part) for name, part in self.parts.items()}

    def payload(self, step: int, random_states: Sequence[bytes]) -> dict[str, Any]:
        return {
            "step": step,
            "state": self.states(),
            "rng": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in random_states],
        }

    def gather(self, step: int, group: Group) -> list[bytes]:
        """The random states by rank, of all ranks: they must have come to the same step, and have the same state."""
        calls = group.gather(_CALL.pack(step, self.replicas.digest()) + rng.capture())
        parts = [_CALL.unpack_from(call) for call in calls]
        steps = {rank: one[0] for rank, one in enumerate(parts)}
        if len(set(steps.values())) > 1:
            raise CheckpointError(
                f"ranks save different steps, by rank: {steps}; call save() in the same iteration"
            )
        self.replicas.compare(group, [one[1] for one in parts], step)
        return [call[_CALL.size :] for call in calls]

    def share_buffers(self, group: Group) -> None:
        """Give all ranks the modules' buffers of rank 0, as a file on disk does. All ranks call it after `gather`.

        Ranks differ in them by right, and each node copies its own state: without this a node that comes to have
        rank 0 would go on with the statistics of another rank.
        """
        buffers = Buffers(
            modules_in({name: part for name, part in self.parts.items() if name not in self.of_rank_0})
        )
        if buffers.size:
            row = torch.empty(buffers.size, dtype=torch.uint8)
            buffers.copy_to(row)
            group.share(row)
            if group.rank != 0:
                buffers.restore(row)

    def same_on_all_ranks(self, step: int, *, wait: bool) -> bool:
        """See `Replicas.prove`."""
        return self.replicas.proven or self.replicas.prove(current_group(), step, wait=wait)
