"""The random states of this node's ranks after their last two copied steps: files rng-3-0 and rng-3-1 of rank 3.

Every rank writes its own. A copy whose header has holes for them counts when all have done so.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from dataclasses import dataclass

from ...wire.files import read_whole, replace_file

_HEAD = struct.Struct("<8sIqqq")
_MAGIC = b"e-rng" + (1).to_bytes(3, "little")
_NAME = re.compile(r"rng-(\d{1,9})-[01]")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RandomState:
    """That of one rank after a step."""

    version: tuple[int, int]
    """Of the state that belongs to it: generation and step."""
    world_size: int
    state: bytes

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(_MAGIC, zlib.crc32(self.state), *self.version, self.world_size)
        return head + self.state

    @classmethod
    def from_bytes(cls, raw: bytes) -> RandomState:
        """Raises ValueError."""
        try:
            magic, crc, generation, step, world_size = _HEAD.unpack_from(raw)
        except struct.error as error:
            raise ValueError(f"record of {len(raw)} bytes") from error
        state = raw[_HEAD.size :]
        if magic != _MAGIC or crc != zlib.crc32(state):
            raise ValueError("record of another version, or it does not match its own checksum")
        return cls((generation, step), world_size, state)


class RandomStates:
    """Of one checkpoint directory, in its folder in memory."""

    def __init__(self, dir_fd: int) -> None:
        self._dir_fd = dir_fd

    def put(self, rank: int, state: RandomState) -> None:
        """Beside that of its step before. Raises OSError."""
        versions = {name: self._version(name) for name in (f"rng-{rank}-0", f"rng-{rank}-1")}
        same = [name for name, version in versions.items() if version == state.version]
        name = same[0] if same else min(versions, key=lambda name: versions[name])
        replace_file(self._dir_fd, name, state.to_bytes())

    def all(self) -> list[tuple[int, RandomState]]:
        """Each with its rank."""
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(self._dir_fd):
                if match := _NAME.fullmatch(name):
                    with contextlib.suppress(OSError, ValueError):
                        found.append((int(match[1]), self._read(name)))
        return found

    def of(self, version: tuple[int, int], world_size: int) -> dict[int, bytes]:
        """By rank, those that were written down here for that state of that world."""
        wanted = version, world_size
        return {rank: one.state for rank, one in self.all() if (one.version, one.world_size) == wanted}

    def _version(self, name: str) -> tuple[int, int]:
        try:
            return self._read(name).version
        except (OSError, ValueError):
            return (-1, -1)

    def _read(self, name: str) -> RandomState:
        return RandomState.from_bytes(read_whole(self._dir_fd, name, _MAX_BYTES))
