"""Starts a job of a trainer that no pickle can carry: a small start file names its class and holds its arguments.

    python examples/trainer_start.py FOLDER

Some libraries, Ultralytics among them, start their workers in this way. Copy this file into your own code for that;
`Trainer`, at its end, is an example of what it starts.

The file lies in a folder that only this user can enter, and goes with the `with` block. Of a process that was killed
the next start removes it: the folder is locked while its process lives. Nothing else is ever removed, and of a
trainer's own folders nothing at all.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from elastic_agent.launcher import LaunchConfig, run_agent, words_of

PREFIX = "trainer-start-"
YOUNG_S = 60.0
"""A new folder is locked a moment after it was made."""

TEXT = """\
# Written for one job, and removed with it.
if __name__ == "__main__":
    from pathlib import PosixPath
    from runpy import run_path

    inf, nan = float("inf"), float("nan")
    run_path({here!r})["begin"]({start!r})
"""


@contextmanager
def start_file(
    trainer: Any,
    arguments: Mapping[str, Any],
    *,
    method: str = "train",
    on_restart: Mapping[str, Any] | None = None,
    if_exists: str | os.PathLike[str] | None = None,
) -> Iterator[Path]:
    """A script whose workers each call `method` of `trainer(**arguments)`. `trainer` is a class, or an object of it.

    From the second generation on `on_restart` is merged into the arguments, dict by dict, where the file `if_exists` is
    there: so a trainer resumes, and does not begin anew. A second generation may begin before the first checkpoint.
    Raises TypeError for what cannot be written down.
    """
    kind = trainer if isinstance(trainer, type) else type(trainer)
    if not callable(getattr(kind, method, None)):
        raise TypeError(f"trainer is {trainer!r:.200}, which has no method {method!r}")
    if on_restart and if_exists is None:
        raise TypeError("on_restart needs if_exists, the checkpoint to resume from")
    start = {
        "trainer": place_of(kind),
        "method": method,
        "arguments": plain(dict(arguments), "arguments"),
        "on_restart": plain(dict(on_restart or {}), "on_restart"),
        "if_exists": os.path.abspath(if_exists) if if_exists is not None else None,
        "path": [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)],
        "argv": sys.argv,
    }
    remove_leftovers()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = Path(folder, "start.py")
            path.write_text(TEXT.format(here=os.path.abspath(__file__), start=start))
            yield path
        finally:
            os.close(lock)


def remove_leftovers() -> None:
    """Of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or its process lives
            if folder.is_symlink() or time.time() - folder.stat().st_ctime < YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def plain(value: Any, where: str) -> Any:
    """The value, if Python can read what it writes of it. Raises TypeError, which says where something else is."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, PurePath):
        return value
    if type(value) is dict:
        return {
            plain(key, f"a key of {where}"): plain(one, f"{where}[{key!r}]") for key, one in value.items()
        }
    if type(value) in (list, tuple, set):
        return type(value)(plain(one, f"{where}[{number}]") for number, one in enumerate(value))
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a start file cannot hold: name a file instead"
    )


def place_of(kind: type) -> dict[str, str]:
    """Where a worker finds the class. Raises TypeError."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise TypeError(f"workers cannot import {kind}: define the class at the top of a module")
    if kind.__module__ != "__main__":
        return {"module": kind.__module__, "name": kind.__qualname__}
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return {"main_module": main.__spec__.name, "name": kind.__qualname__}
    if not getattr(main, "__file__", None):
        raise TypeError(f"{kind} is defined in a notebook or a shell: move it into a module")
    return {"script": os.path.abspath(main.__file__ or ""), "name": kind.__qualname__}


# ---------------------------------------------------------------- in a worker


@record
def begin(start: Mapping[str, Any]) -> None:
    """What the start file calls."""
    sys.path[:], sys.argv[:] = start["path"], start["argv"]
    trainer = class_at(start["trainer"])(**arguments_of(start, int(os.environ["ELASTIC_AGENT_GENERATION"])))
    getattr(trainer, start["method"])()


def arguments_of(start: Mapping[str, Any], generation: int) -> dict[str, Any]:
    resumes = generation > 1 and start["if_exists"] is not None and os.path.exists(start["if_exists"])
    return merged(start["arguments"], start["on_restart"] if resumes else {})


def merged(arguments: Mapping[Any, Any], more: Mapping[Any, Any]) -> dict[Any, Any]:
    together = dict(arguments)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(together.get(key), dict)
        together[key] = merged(together[key], value) if both else value
    return together


def class_at(place: Mapping[str, str]) -> Any:
    """A script is run again with another `__name__` than `__main__`, as `multiprocessing` does it."""
    found: Any
    if "module" in place:
        found = importlib.import_module(place["module"])
    else:
        found = ModuleType("__mp_main__")
        if "main_module" in place:
            names = runpy.run_module(place["main_module"], run_name="__mp_main__", alter_sys=True)
        else:
            names = runpy.run_path(place["script"], run_name="__mp_main__")
        vars(found).update(names)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = found
    for part in place["name"].split("."):
        found = getattr(found, part)
    return found


# ---------------------------------------------------------------- an example


class Trainer:
    """Counts epochs on rank 0, and goes on after the last one that it has written down."""

    def __init__(self, folder: Path, epochs: int, resume: bool = False) -> None:
        self.last = folder / "last.txt"
        self.epochs = epochs
        self.done = int(self.last.read_text()) if resume else 0

    def train(self) -> None:
        for epoch in range(self.done + 1, self.epochs + 1):
            time.sleep(0.1)
            if os.environ["RANK"] == "0":
                print(f"epoch {epoch} of {self.epochs}", flush=True)
                scratch = self.last.with_suffix(".new")
                scratch.write_text(str(epoch))
                scratch.replace(self.last)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = {"folder": folder.absolute(), "epochs": 5}
    last = folder / "last.txt"
    with start_file(Trainer, arguments, on_restart={"resume": True}, if_exists=last) as path:
        run_agent([*words_of(LaunchConfig(nproc_per_node=2)), str(path)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
