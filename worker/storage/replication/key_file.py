"""The key by which the memory servers of one job know each other: 32 bytes, in a file that only its user can read.

The agent writes it to its folder in memory, as soon as the job's store has said which it is. It is in no argument and
no variable.
"""

from __future__ import annotations

import time

from ...wire.files import open_directory, read_whole, replace_file

KEY_BYTES = 32
_NAME = "server-key"
_LOOK_S = 0.01


def write_key(memory: str, key: bytes) -> None:
    """Raises OSError."""
    with open_directory(memory) as folder:
        replace_file(folder, _NAME, key)


def read_key(memory: str, within_s: float = 0.0) -> bytes:
    """`within_s`: the agent may still be asking the store for it. Raises OSError."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            with open_directory(memory) as folder:
                key = read_whole(folder, _NAME, KEY_BYTES)
            if len(key) != KEY_BYTES:
                raise OSError(f"the key in {memory} has {len(key)} bytes, expected {KEY_BYTES}")
            return key
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOOK_S)
