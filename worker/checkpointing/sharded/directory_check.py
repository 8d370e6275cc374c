"""Whether all nodes see one checkpoint directory, as a sharded state needs it. They look once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from ...errors import CheckpointError, DirectoryNotShared, SaveFailed
from ...ranks.group import Group
from ...ranks.refusals import because, together
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.sharded.shared_directory import not_shared, remove_mark, sees_mark, write_mark

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
