"""What a checkpoint holds: the states of parts that are the same on all ranks, those of parts that each rank has for
itself, and the random state of each rank."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError
from ...ranks.comparison import DIGEST_BYTES, ReplicatedComparison
from ...ranks.group import Group, because, current_group, raise_together
from ...state import rng
from ...state.rank_parts import Rules, pack
from ...state.state_dicts import Part, modules_in, state_of
from ...storage.memory.rank_state import Buffers

# What a rank brings to save(): the step, a digest of its state, and whether it has parts for itself, followed by its
# random state.
_CALL = struct.Struct(f"!q{DIGEST_BYTES}sB")
_NOTHING, _ROW, _REFUSED = range(3)


@dataclass(frozen=True, slots=True)
class Gathered:
    """What each rank has brought to a save, by rank."""

    random_states: Sequence[bytes]
    rows: Sequence[bytes] = ()
    """Of `rank_parts`; none where no part is each rank's own."""


class Contents:
    """Of one Checkpointer."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        of_rank_0: Collection[str],
        of_each_rank: Rules,
        *,
        is_compared: bool = False,
    ) -> None:
        """`is_compared`: copies in memory are made somewhere, of a state that all ranks have shown to be the same."""
        self.is_compared = is_compared
        self.parts = dict(parts)
        self.of_rank_0 = frozenset(of_rank_0)
        self.of_each_rank = of_each_rank
        self.shared = {name: part for name, part in self.parts.items() if name not in of_each_rank}
        """The parts of which one rank's state is for all."""
        self._own = {name: part for name, part in self.parts.items() if name in of_each_rank}
        self.comparison = ReplicatedComparison(self.parts, {*of_rank_0, *of_each_rank})

    def states(self) -> dict[str, Any]:
        return {name: state_of(part) for name, part in self.shared.items()}

    def payload(self, step: int, gathered: Gathered) -> dict[str, Any]:
        payload = {"step": step, "state": self.states(), "rng": _tensors(gathered.random_states)}
        return {**payload, "ranks": _tensors(gathered.rows)} if gathered.rows else payload

    def gather(self, step: int, group: Group) -> Gathered:
        """What all ranks have for themselves: they must have come to the same step, and have the same state."""
        row, refusal = self._pack(step)
        kind = _NOTHING if not self._own else _ROW if refusal is None else _REFUSED
        calls = group.gather(_CALL.pack(step, self.comparison.digest(group), kind) + rng.capture())
        parts = [_CALL.unpack_from(call) for call in calls]
        steps = {rank: one[0] for rank, one in enumerate(parts)}
        if len(set(steps.values())) > 1:
            raise CheckpointError(
                f"ranks save different steps, by rank: {steps}; call save() in the same iteration"
            )
        self.comparison.compare(group, [one[1] for one in parts], step)
        random_states = [call[_CALL.size :] for call in calls]
        kinds = [one[2] for one in parts]
        if not any(kinds):
            return Gathered(random_states)
        if not all(kinds):
            ranks = [rank for rank, one in enumerate(kinds) if one == _NOTHING]
            raise CheckpointError(
                f"ranks {ranks} declare no part per_rank and others do: make the same Checkpointer on all ranks"
            )
        if _REFUSED in kinds:
            raise_together(group, refusal)
        return Gathered(random_states, group.gather(row))

    def _pack(self, step: int) -> tuple[bytes, CheckpointError | None]:
        """This rank's row, and what is wrong with it: other ranks wait for this one, and must get that."""
        try:
            return (pack(self._own, step) if self._own else b""), None
        except CheckpointError as refusal:
            return b"", refusal
        except Exception as failure:
            names = sorted(self._own)
            return b"", because(
                CheckpointError, f"the state of {names} cannot be taken: {failure!r}", failure
            )

    def share_buffers(self, group: Group) -> None:
        """Give all ranks the modules' buffers of rank 0, as a file on disk does. All ranks call it after `gather`.

        Ranks differ in them by right, and each node copies its own state: without this a node that comes to have
        rank 0 would go on with the statistics of another rank.
        """
        buffers = Buffers(
            modules_in({name: part for name, part in self.shared.items() if name not in self.of_rank_0})
        )
        if buffers.size:
            row = torch.empty(buffers.size, dtype=torch.uint8)
            buffers.copy_to(row)
            group.share(row)
            if group.rank != 0:
                buffers.restore(row)

    def same_on_all_ranks(self, step: int, *, wait: bool) -> bool:
        """See `ReplicatedComparison.prove`."""
        return self.comparison.proven or self.comparison.prove(current_group(), step, wait=wait)


def _tensors(rows: Sequence[bytes]) -> list[torch.Tensor]:
    return [torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in rows]
