"""A folder of this user's alone in the temporary directory, the same each time."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def own_folder(name: str, *, readable: bool = False) -> Path:
    """`readable`: its owner may have let others read it. Raises PermissionError where another user has made one by this
    name, or may write to it, and OSError."""
    path = Path(tempfile.gettempdir(), f"{name}{os.geteuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    others = found.st_mode & (0o022 if readable else 0o077)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
        problem = "it is not a folder of this user's alone: remove it, or name another place in TMPDIR"
        raise PermissionError(errno.EPERM, problem, str(path))
    return path
