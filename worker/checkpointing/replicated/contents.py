"""What a checkpoint holds of a state that is the same on all ranks: all of it, and what each rank has for itself."""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import CheckpointError
from ...ranks.comparison import DIGEST_BYTES, ReplicatedComparison
from ...ranks.group import Group, because, current_group, raise_together
from ...state import rng
from ...state.kinds import refuse_sharded
from ...state.rank_parts import Rules, pack, unpack
from ...state.sharding.layout import ShardLayout, ShardLayouts
from ...state.sharding.parts import Own, ShardedParts, own_parts_of
from ...state.sharding.table import RANDOM_STATE, Table, own_key
from ...state.state_dicts import Part, modules_in
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


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a state was at the end of a step, where it may be another by now: its dicts, by the names of the parts, and
    buffers of modules, by the address that each of them has."""

    dicts: Mapping[str, dict[str, Any]]
    buffers: Mapping[int, torch.Tensor]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = self.buffers.get(tensor.data_ptr())
        return tensor if kept is None or kept.shape != tensor.shape else kept


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
        self.given = dict(parts)
        self.parts = ShardedParts(parts, of_rank_0, of_each_rank)
        self.of_rank_0 = frozenset(of_rank_0)
        self.of_each_rank = of_each_rank
        self.shared = {name: part for name, part in self.given.items() if name not in of_each_rank}
        """The parts of which one rank's state is for all."""
        self._own = {name: part for name, part in self.given.items() if name in of_each_rank}
        self.comparison = ReplicatedComparison(self.given, {*of_rank_0, *of_each_rank})
        self._layouts = ShardLayouts()
        self._lock = threading.Lock()
        """The guard of `just_in_time` copies in a thread of its own."""
        self._places: tuple[Table, tuple[tuple[int, int], ...]] | None = None
        """Of the random states in the copy with that table."""
        self._holes: tuple[tuple[int, int], dict[int, Own]] | None = None
        """What ranks have for themselves in a copy without it, for so many ranks and so much room."""

    def refuse(self) -> None:
        """Raises Sharded for parts that were sharded since."""
        refuse_sharded(self.given)

    def lay_out(
        self, step: int, world_size: int, gathered: Gathered | None, boundary: Boundary | None = None
    ) -> ShardLayout:
        """A copy of all. `gathered`: None leaves room for a random state of each rank, which comes later.

        Raises NotPlainData, Sharded, and what the parts' `state_dict` raises.
        """
        with self._lock:
            items = self.parts.take(
                0,
                world_size,
                step,
                common=True,
                own=self._own_of_ranks(world_size, gathered),
                instead=boundary.dicts if boundary is not None else {},
            )
            if boundary is not None:
                items = replace(items, tensors=[boundary.of(one) for one in items.tensors])
            return self._layouts.lay_out(items)

    def _own_of_ranks(self, world_size: int, gathered: Gathered | None) -> dict[int, Own]:
        room = _room_for(rng.capture())  # in a copy with them, too: then the next one has the same form
        if gathered is None:
            if self._holes is None or self._holes[0] != (world_size, room):
                self._holes = (world_size, room), {rank: _own_of(b"", room) for rank in range(world_size)}
            return self._holes[1]
        found = {rank: _own_of(state, room) for rank, state in enumerate(gathered.random_states)}
        for rank, row in enumerate(gathered.rows):
            states = unpack(torch.frombuffer(bytearray(row), dtype=torch.uint8))
            found[rank] = {**found[rank], **own_parts_of(states)}
        return found

    def random_state_places(self, layout: ShardLayout, world_size: int) -> tuple[tuple[int, int], ...]:
        """By rank, as offset and length in the copy."""
        if self._places is None or self._places[0] is not layout.table:
            rows = {row.key: row for row in layout.table.shards}
            found = (rows[own_key(rank, RANDOM_STATE)] for rank in range(world_size))
            self._places = layout.table, tuple((row.data, row.sizes[0]) for row in found)
        return self._places[1]

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
        """Give all ranks the modules' buffers of rank 0, as a checkpoint on disk does. All ranks call it after
        `gather`.

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


def _own_of(random_state: bytes, room: int) -> Own:
    padded = bytearray(random_state).ljust(max(room, len(random_state)), b"\0")
    return {(RANDOM_STATE,): torch.frombuffer(padded, dtype=torch.uint8)}


def _room_for(random_state: bytes) -> int:
    """Another rank's may be longer: it may have more devices, or be the only one that uses numpy."""
    return (len(random_state) * 5 // 4 + 4096) // 8 * 8
