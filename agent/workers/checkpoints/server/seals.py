"""Tells when a copy was sealed here: the kernel (inotify) says when a header is renamed into place.

Where the kernel gives no more watches (fs.inotify.max_user_instances, max_user_watches), `blind` is true and its user
looks now and then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

from .....worker.storage.memory.slots import header_file
from .....worker.wire.messages import SLOT_NAMES

IN_CLOEXEC = os.O_CLOEXEC
IN_NONBLOCK = os.O_NONBLOCK
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_ONLYDIR = 0x01000000
IN_ISDIR = 0x40000000

_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 65536
_HEADERS = {header_file(slot).encode() for slot in SLOT_NAMES}


class Seals:
    """Of the slots in all folders of the agent's folder in memory. For one thread."""

    def __init__(self, memory: str) -> None:
        self._memory = memory
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.readable: int = self._libc.inotify_init1(IN_CLOEXEC | IN_NONBLOCK)
        """A descriptor that can be read when something has happened; negative: there is none."""
        self.blind = self.readable < 0
        self._watch(memory, IN_CREATE | IN_ONLYDIR)
        self._watch_folders()

    def close(self) -> None:
        descriptor, self.readable = self.readable, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(self) -> bool:
        """Whether some copy may have been sealed since the last look."""
        try:
            raw = os.read(self.readable, _BUFFER_BYTES)
        except BlockingIOError:
            return False
        sealed, offset = False, 0
        while offset < len(raw):
            _, mask, _, length = _EVENT.unpack_from(raw, offset)
            offset += _EVENT.size
            name = raw[offset : offset + length].rstrip(b"\0")
            offset += length
            if mask & IN_ISDIR or not name:  # a new folder, or events were lost
                self._watch_folders()
                sealed = True
            sealed |= name in _HEADERS
        return sealed

    def _watch_folders(self) -> None:
        """All that are there: a folder that is watched already stays so."""
        with contextlib.suppress(OSError), os.scandir(self._memory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._watch(entry.path, IN_MOVED_TO | IN_ONLYDIR)

    def _watch(self, path: str, events: int) -> None:
        if not self.blind:
            found = self._libc.inotify_add_watch(self.readable, os.fsencode(path), events)
            self.blind = found < 0 and os.path.isdir(path)
