"""Finds out whether a directory is one for several nodes: each writes a small file there and looks for the others'.

The file is removed as soon as standard input ends, which it does with the process that started this one. A file is
looked for by opening its name, and not before all are written: a file server's client may remember for seconds that
there is no such file, and less often opens what is none.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from ...processes import read_order, say, wait_for_end

PREFIX = ".elastic-agent-check-"
LOOK_S = 3.0
"""For how long a file that is not seen is looked for again."""
PAUSE_S = 0.25


def main() -> None:
    """Holds a file in `hold`, or looks for `files` in `look`."""
    order = read_order()
    if "hold" in order:
        _hold(Path(order["hold"]))
    else:
        say({"seen": look(Path(order["look"]), order["files"])})


def look(
    directory: Path,
    files: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Those of these names that are there."""
    ends, seen = clock() + LOOK_S, set[str]()
    while True:
        seen |= {name for name in files if name not in seen and _there(directory, name)}
        if len(seen) == len(files) or clock() >= ends:
            return [name for name in files if name in seen]
        sleep(PAUSE_S)


def _there(directory: Path, name: str) -> bool:
    if not name.startswith(PREFIX) or "/" in name:
        return False
    try:
        with open(directory / name, "rb") as file:
            return file.read(len(name)) == name.encode()
    except OSError:
        return False


def _hold(directory: Path) -> None:
    file = directory / f"{PREFIX}{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with open(file, "xb") as opened:
                opened.write(file.name.encode())
                opened.flush()
                os.fsync(opened.fileno())
            say({"file": file.name})
            wait_for_end()
        finally:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
    except OSError as error:
        say({"problem": f"{directory}: {error.strerror}"})
