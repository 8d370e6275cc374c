"""A folder of this user's alone in the temporary directory, the same each time."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_CANDIDATES = ("/tmp", "/var/tmp", "/usr/tmp")
_VARIABLES = ("TMPDIR", "TEMP", "TMP")
"""Where `tempfile` looks."""


def own_path(name: str) -> Path:
    """Raises FileNotFoundError where there is no temporary directory but, by Python's rules, the current one."""
    parent = tempfile.gettempdir()
    if parent == os.getcwd() and parent not in _CANDIDATES and parent not in map(os.environ.get, _VARIABLES):
        problem = "this user may write to no temporary directory: name one in TMPDIR"
        raise FileNotFoundError(errno.ENOENT, problem, "/tmp")
    return Path(parent, f"{name}{os.geteuid()}")


def own_folder(name: str) -> Path:
    """It is there when this returns. Raises as `own_path` and `make_own` do."""
    path = own_path(name)
    make_own(path)
    return path


def make_own(path: Path, *, readable: bool = False) -> None:
    """`readable`: its owner may have let others read it. Raises PermissionError where another user has made one by this
    name, or may write to it, and OSError."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    others = found.st_mode & (0o022 if readable else 0o077)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
        problem = "it is not a folder of this user's alone: remove it, or name another place in TMPDIR"
        raise PermissionError(errno.EPERM, problem, str(path))
