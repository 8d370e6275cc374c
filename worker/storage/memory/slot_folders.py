"""The names of the folders with slots, below the agent's folder in memory.

3b9e0c51d7aa91c2                     of a checkpoint directory: the state, where it is the same on all ranks
3b9e0c51d7aa91c2.1                   the shards of the worker with local rank 1, of a state that no rank has whole
3b9e0c51d7aa91c2.1.91c2f0d44f1c      a replica: the shards of the worker with local rank 1 of another node
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from typing import Annotated

from ....codec import Invalid, Row, shown

_NAME = re.compile(
    r"(?P<directory>[0-9a-f]{16})(?:\.(?P<local_rank>\d{1,5})(?:\.(?P<origin>[0-9a-f]{12}))?)?"
)


@dataclass(frozen=True, slots=True)
class SlotFolder(Row):
    """`directory` and `origin` are digests: of the checkpoint directory's path, and of a replica's node.

    In JSON it is its name.
    """

    directory: str
    local_rank: int | None = None
    """Of the worker whose shards are here; None: the state is the same on all ranks."""
    origin: str = ""
    """Empty: this node's own workers fill the slots."""

    @staticmethod
    def of(directory: str, local_rank: int | None = None, origin: str = "") -> SlotFolder:
        """`directory` is the path by which the script knows the checkpoints, `origin` the name of another node."""
        return SlotFolder(
            hashlib.sha256(os.fsencode(directory)).hexdigest()[:16],
            local_rank,
            _digest_of(origin) if origin else "",
        )

    def replica_of(self, node: str) -> SlotFolder:
        """The one in which other nodes keep what that node has here."""
        return replace(self, origin=_digest_of(node))

    @staticmethod
    def parse(name: str) -> SlotFolder | None:
        """None: the folder is another one."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        local_rank = match["local_rank"]
        return SlotFolder(match["directory"], int(local_rank) if local_rank else None, match["origin"] or "")

    @staticmethod
    def read(raw: object) -> SlotFolder:
        """Raises Invalid."""
        found = SlotFolder.parse(raw) if isinstance(raw, str) else raw
        if not isinstance(found, SlotFolder):
            raise Invalid(f"{shown(raw)}, expected the name of a folder of slots")
        return found

    @property
    def row(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        if self.local_rank is None:
            return self.directory
        return ".".join(filter(None, (self.directory, str(self.local_rank), self.origin)))


Folder = Annotated[SlotFolder, SlotFolder.read]


def all_folders_of(memory: str, digest: str) -> list[SlotFolder]:
    """Those of one checkpoint directory, by its digest, in the order of their names. Raises OSError."""
    found = [SlotFolder.parse(name) for name in sorted(os.listdir(memory))]
    return [one for one in found if one is not None and one.directory == digest]


def _digest_of(node: str) -> str:
    return hashlib.sha256(node.encode()).hexdigest()[:12]
