"""What a save to disk is for one rank: its attempt, who writes what it has twice, and rank 0's index of all files.

DCP's index is made of the tables of all ranks' copies. They change only with the form of a state, so rank 0 keeps them:
a rank sends its own only when it is another one than before, and where none is, no collective is needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from ...errors import CheckpointError, DirectoryNotShared, SaveFailed
from ...ranks.group import Group, because, together
from ...state.sharding.table import Table
from ...storage.disk.async_save import DiskSaver
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.commit import new_attempt, not_shared, remove_mark, sees_mark, write_mark
from ...storage.disk.parts import own_rows
from ...storage.disk.sharded_save import ShardedSave, metadata_of
from .meeting import Met


class ShardedSaves:
    """Of one Checkpointer's saves, one after the other."""

    def __init__(self, files: CheckpointFiles, generation: int) -> None:
        self._files = files
        self._generation = generation
        self._sent = b""
        self._packed: dict[int, bytes] = {}
        """Of rank 0: the tables of all ranks' copies."""
        self._known: dict[int, tuple[bytes, Table]] = {}
        self._index: tuple[list[int | None], bytes] | None = None
        """Of rank 0: for those first twins."""

    def is_new(self, table: bytes) -> bool:
        """Whether rank 0 does not have this rank's table yet."""
        return table != self._sent

    def exchange(self, table: bytes, group: Group) -> None:
        """All ranks call it, where some have a new table."""
        rows = group.gather(table if table != self._sent else b"")
        self._sent = table
        if group.rank == 0:
            self._packed |= {rank: packed for rank, packed in enumerate(rows) if packed}
            self._index = None

    def make(self, step: int, met: Met, group: Group, *, twins: bool) -> ShardedSave:
        """`twins`: a rank whose shards another one writes, too, writes only what it has for itself.

        Raises Invalid for a table that cannot be read.
        """
        first: list[int | None] = met.first_twins if twins else [None] * group.world_size
        return ShardedSave(
            step,
            new_attempt(self._files, step, self._generation, met.token),
            group.rank,
            group.world_size,
            _most_bytes_of_a_node(met, first),
            first[group.rank],
            self._indexed(first) if group.rank == 0 else b"",
        )

    def order(
        self, disk: DiskSaver, step: int, met: Met, group: Group, hand: Callable[[ShardedSave], None]
    ) -> None:
        """`hand` lets the disk writer have this rank's copy. All others go on meanwhile, so this raises nothing."""
        save: ShardedSave | None = None
        try:
            save = self.make(step, met, group, twins=True)
            hand(save)
        except Exception as error:
            disk.refuse(step, error, save)

    def _indexed(self, first_twins: list[int | None]) -> bytes:
        if self._index is None or self._index[0] != first_twins:
            for rank, packed in self._packed.items():
                if self._known.get(rank, (b"",))[0] != packed:
                    self._known[rank] = packed, Table.from_bytes(packed)
            tables = {
                rank: table if first_twins[rank] is None else own_rows(table, rank)[0]
                for rank, (_, table) in self._known.items()
            }
            self._index = first_twins, metadata_of(tables)
        return self._index[1]


def _most_bytes_of_a_node(met: Met, first_twins: Sequence[int | None]) -> int:
    """No rank knows which ranks share a node, but all nodes of a world have about as many."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    sizes = [one.size if first is None else 0 for one, first in zip(met.all, first_twins, strict=True)]
    return max(sum(sizes[begin : begin + local]) for begin in range(0, len(sizes), local))


# ---------------------------------------------------------------- one directory for all nodes
#
# Whether all nodes see one checkpoint directory, as a sharded state needs it. They look once.


logger = logging.getLogger(__name__)


class DirectoryCheck:
    """Of one Checkpointer's directory."""

    def __init__(self, files: CheckpointFiles, node: str, count: Callable[[CheckpointError], None]) -> None:
        """`count` gets what the disk refuses, and raises."""
        self._files = files
        self._node = node
        self._count = count
        self._is_shared: bool | None = None
        """None: the nodes have not looked yet."""
        self._refusal = ""

    def require(self, group: Group) -> None:
        """All ranks call it. Raises DirectoryNotShared, or what `count` raises, on all of them."""
        if self._is_shared is None:
            self._is_shared = group.world_size == 1 or self._all_see_one(group)
        if not self._is_shared:
            raise DirectoryNotShared(self._refusal)

    def require_one_name(self, group: Group) -> None:
        """Before a state is kept in memory, where it is found by the name of the directory. All ranks call it.

        Other names of one directory get a warning. Raises CheckpointError, on all ranks, where it is not one.
        """
        names = [os.fsdecode(raw) for raw in group.gather(os.fsencode(self._files.directory))]
        other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
        if other is None:
            return
        named = f"the directory of the checkpoints is {names[0]} on rank 0 and {names[other]} on rank {other}"
        try:
            self.require(group)
        except DirectoryNotShared:
            raise DirectoryNotShared(
                f"{named}, and that is not one directory: give all ranks the same, where all nodes can read"
            ) from None
        except SaveFailed as refusal:
            raise CheckpointError(
                f"{named}, and it cannot be tried whether that is one: {refusal}"
            ) from refusal
        if group.rank == 0:
            logger.warning(
                "%s: what a lost node had in memory is not found by another name, so its shards are loaded from the "
                "disk, as of the last save. Give all ranks the same name",
                named,
            )

    def _all_see_one(self, group: Group) -> bool:
        directory = self._files.directory
        token = ""

        def mark() -> None:
            nonlocal token
            if group.rank == 0:
                try:
                    token = write_mark(directory, self._files.run)
                except OSError as error:
                    self._count(because(SaveFailed, f"nothing can be written to {directory}: {error}", error))

        together(group, mark, f"nothing can be written to {directory}")
        token = group.gather(token.encode())[0].decode()
        seen = group.gather(b"" if sees_mark(directory, token) else self._node.encode() or b"?")
        if group.rank == 0:
            remove_mark(directory, token)
        blind = next((rank for rank, node in enumerate(seen) if node), None)
        if blind is not None:
            refusal = not_shared(directory, blind, seen[blind].decode())
            self._refusal = f"{refusal}. Until then the state is only in memory and in its replicas"
        return blind is None
