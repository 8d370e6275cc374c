"""A file at which the ranks of one generation meet, for `init_method="file://..."`.

Such a file must be new for every process group: one that is left over from a generation that was killed lets the next
one wait for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
from pathlib import Path

from ..errors import ClusterEnvironmentError
from ..wire.environment import WorkerEnv

PREFIX = "elastic-agent-init"

_calls = itertools.count()


def fresh_init_file(directory: str | os.PathLike[str]) -> str:
    """An `init_method` that no other generation or run uses, the same on all ranks: a file in `directory`.

    Each call names another file, so every rank must call it equally often. The directory must be on a file system that
    all nodes share, with working locks. Files of earlier generations of the run are removed, and each file when the
    process ends. Raises OSError, and ClusterEnvironmentError where no agent has started this process.
    """
    env = WorkerEnv.of(os.environ)
    if not env.run:
        raise ClusterEnvironmentError(
            "no agent has started this process, so no name is known that is new and the same on all ranks: pass an "
            "init_method of your own, or use env://"
        )
    folder = Path(directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    mine = re.compile(rf"{PREFIX}-{re.escape(env.run)}-(\d+)-\d+")
    for old in folder.iterdir():
        found = mine.fullmatch(old.name)
        if found is not None and int(found[1]) < env.generation:
            _remove(old)
    file = folder / f"{PREFIX}-{env.run}-{env.generation}-{next(_calls)}"
    atexit.register(_remove, file)
    return f"file://{file}"


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
