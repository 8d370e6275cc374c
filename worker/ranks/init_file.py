"""A file at which the ranks of one generation meet, for `init_method="file://..."`.

Such a file must be new for every process group: one that is left over from a generation that was killed lets the next
one wait for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
from pathlib import Path

from ..wire.environment import WorkerEnv

_calls = itertools.count()


def fresh_init_file(directory: str | os.PathLike[str]) -> str:
    """An `init_method` that no other generation or run uses, the same on all ranks: a file in `directory`.

    Each call names another file, so every rank must call it equally often. The directory must be on a file system that
    all nodes share, with working locks. Files of earlier generations of the run are removed, and each file when the
    process ends. Raises OSError.
    """
    env = WorkerEnv.of(os.environ)
    folder = Path(directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    run = env.run or os.environ.get("TORCHELASTIC_RUN_ID", f"process-{os.getpid()}")
    restart = env.generation or os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    name = f"elastic-agent-init-{run}-"
    for old in folder.glob(f"{name}*"):
        if not old.name.startswith(f"{name}{restart}-"):
            _remove(old)
    file = folder / f"{name}{restart}-{next(_calls)}"
    atexit.register(_remove, file)
    return f"file://{file}"


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
