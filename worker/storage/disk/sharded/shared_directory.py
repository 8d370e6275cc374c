"""Whether all nodes see one directory: rank 0 leaves a mark in it, and every rank looks for that.

    if rank == 0: token = write_mark(directory, run)
    ...                                       # all ranks get the token, and gather `sees_mark(directory, token)`
    if rank == 0: remove_mark(directory, token)

A mark that its writer has died over is a temporary file like any other, and removed with those. The directory of an
attempt, which one rank has made, serves as a mark, too: its name is the token.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable

from ....errors import DirectoryNotShared
from ....wire.files import open_directory, remove
from ....wire.run import Run
from ..durable import make_directory
from ..manifests import ATTEMPT_NAME

LOOK_S = 3.0
"""How long a rank looks: a file system over the network may show a new name a moment later."""
_PAUSE_S = 0.1
_MARK = re.compile(r"tmp-00000000-000000000000-[A-Za-z0-9._-]{1,128}-[0-9a-f]{8}\.json")


def write_mark(directory: str, run: Run) -> str:
    """Its name, which is the token. Raises OSError."""
    token = f"tmp-{0:08d}-{0:012d}-{run.id}-{os.urandom(4).hex()}.json"
    make_directory(directory)
    with open_directory(directory) as dir_fd:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(token, flags, 0o666, dir_fd=dir_fd))
    return token


def sees_mark(
    directory: str,
    token: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether this node has the directory in which the token was written; waits `LOOK_S` before it says no."""
    if not (_MARK.fullmatch(token) or ATTEMPT_NAME.fullmatch(token)):
        return False
    deadline = clock() + LOOK_S
    while True:
        with contextlib.suppress(OSError), open_directory(directory) as dir_fd:
            os.stat(token, dir_fd=dir_fd, follow_symlinks=False)
            return True
        if clock() >= deadline:
            return False
        sleep(_PAUSE_S)


def remove_mark(directory: str, token: str) -> None:
    with contextlib.suppress(OSError), open_directory(directory) as dir_fd:
        remove(dir_fd, token)


def not_shared(directory: str, rank: int, node: str) -> DirectoryNotShared:
    return DirectoryNotShared(
        f"a sharded state is not saved in {directory}: rank {rank} on node {node or 'unknown'} does not see there what "
        "rank 0 has written. Every node writes its own shards, so use a directory on a file system that all nodes share"
    )
