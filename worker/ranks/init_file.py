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
import socket
from collections.abc import Iterator
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


# ---------------------------------------------------------------- a port to meet at
#
# A network port for those who must name one. Under an agent no script needs it: MASTER_PORT is bound beforehand.


def find_free_network_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Another process may take it before it is used: `reserve_port` holds it."""
    with reserve_port(host) as port:
        return port


@contextlib.contextmanager
def reserve_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that is held until the block ends: the kernel gives it to no process that asks for any.

    Inside of the block only a socket with SO_REUSEPORT can bind it. For others, such as torch's TCPStore, leave the
    block right before they start. Raises OSError.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]
