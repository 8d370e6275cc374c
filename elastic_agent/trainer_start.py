"""Starts a job of a trainer that no pickle can carry: a small start file names its class and holds its arguments.

    from elastic_agent.launcher import LaunchConfig
    from elastic_agent.trainer_start import StartFile

    resume = {"overrides": {"resume": str(last)}}
    with StartFile(Trainer, {"overrides": vars(args)}, on_restart=resume, if_exists=last) as start:
        start.run(LaunchConfig(nproc_per_node=2))

Each worker makes `Trainer(**arguments)` and calls its `train()`. The file has plain data, and no code of the caller's:
a class is found by its module, and one of the script itself by the script's path, which is run again with another
`__name__` than `__main__`, as `multiprocessing` does it.

The files lie in one folder of the temporary directory that is private to the user. Who has written one holds a lock on
it, which ends with its process however that ends: the next start removes what has neither lock nor a process that names
it in its command. Nothing else is ever removed, and of a trainer's own folders nothing at all.

Each restart reads the file again, and cleaners remove what lies long in temporary directories: while its process lives,
a thread there renews the file's time, and writes the file again where it is gone.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import runpy
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import process
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from .agent.common.own_folder import own_folder
from .launcher import run_agent, words_of
from .plain_data import merged, plain_arguments, value_of
from .worker.wire.environment import WorkerEnv

log = logging.getLogger(__name__)

FOLDER = "elastic-agent-starts-"
KEEP_EVERY_S = 5.0
"""Between two looks whether the file is still there."""
RENEW_AFTER_S = 3600.0
_PREFIX, _SUFFIX = "start-", ".py"
_MAIN = "__mp_main__"
"""What a script is called in a process that is not its own, as `multiprocessing` has it."""

_TEXT = """\
# Written by elastic_agent.trainer_start for one job, and removed with it.
if __name__ == "__main__":
    import json
    import sys

    start = json.loads({start!r})
    sys.path[:], sys.argv[:] = start["path"], start["argv"]

    from elastic_agent.trainer_start import begin

    begin(start)
"""


class StartFile:
    """One file for the workers of one job. Use it in a `with` block, or call `remove` when the job has ended."""

    def __init__(
        self,
        trainer: Any,
        arguments: Mapping[str, Any] | None = None,
        *,
        method: str = "train",
        on_restart: Mapping[str, Any] | None = None,
        if_exists: str | os.PathLike[str] | None = None,
    ) -> None:
        """`trainer` is a class, or an object of it; `arguments` are for its constructor, by name.

        They may be None, numbers, texts, paths, and lists, tuples, sets and dicts of these. From the second generation
        on `on_restart` is put into them, dict by dict, where the file `if_exists` is there: so a trainer resumes, and
        does not begin anew. A second generation alone says nothing: a node that joins, or a port that is taken, comes
        before the first checkpoint, too.
        Raises TypeError for what cannot be written, and OSError.
        """
        kind = trainer if isinstance(trainer, type) else type(trainer)
        if not callable(getattr(trainer, method, None)):
            raise TypeError(f"trainer is {trainer!r:.200}, which has no method {method!r}")
        if on_restart and if_exists is None:
            raise TypeError(
                "on_restart needs if_exists, the checkpoint to resume from: a second generation may begin before there "
                "is any"
            )
        start = {
            "trainer": _place_of(kind),
            "method": method,
            "arguments": plain_arguments(arguments or {}, "arguments"),
            "on_restart": plain_arguments(on_restart or {}, "on_restart"),
            "if_exists": os.path.abspath(if_exists) if if_exists is not None else None,
            "path": absolute_entries(sys.path, (process.ORIGINAL_DIR, os.getcwd())),  # type: ignore[attr-defined]
            "argv": sys.argv,
        }
        self._text = _TEXT.format(start=json.dumps(start))
        self._owner = os.getpid()
        self._change = threading.Lock()
        self._removed = threading.Event()
        self._held, self.path = _new_file(own_folder(FOLDER))
        try:
            self.path.write_text(self._text)
        except OSError:
            self.remove()
            raise
        threading.Thread(target=self._keep_on, name="elastic-agent-start-file", daemon=True).start()

    def command(self, config: Any) -> list[str]:
        """What starts the job, for `subprocess`. `config` is a `LaunchConfig`, of `launcher` or of torch."""
        return [sys.executable, "-m", "elastic_agent", *self._words(config)]

    def run(self, config: Any) -> None:
        """Runs the job, which ends when this process does. Raises LaunchError when it fails."""
        run_agent(self._words(config))

    def _words(self, config: Any) -> list[str]:
        return [*words_of(config), str(self.path)]

    def remove(self) -> None:
        """This file and nothing else. In a fork of the process that has written it: nothing."""
        if os.getpid() != self._owner:
            return
        self._removed.set()
        with self._change:
            if self._held < 0:
                return
            self.path.unlink(missing_ok=True)
            os.close(self._held)
            self._held = -1

    def _keep_on(self) -> None:
        warned = False
        while not self._removed.wait(KEEP_EVERY_S):
            try:
                self.keep(time.time())
            except OSError as error:
                if not warned:
                    log.warning(
                        "%s is gone, which restarts need, and cannot be written again: %s", self.path, error
                    )
                warned = True

    def keep(self, now: float) -> None:
        """So that restarts find the file, and cleaners no old one. Raises OSError."""
        with self._change:
            if self._held < 0:
                return
            try:
                if self.path.stat().st_mtime < now - RENEW_AFTER_S:
                    os.utime(self.path)
                return
            except FileNotFoundError:
                pass
            held, path = _new_file(own_folder(FOLDER))
            try:
                path.write_text(self._text)
                path.rename(self.path)
            except OSError:
                path.unlink(missing_ok=True)
                os.close(held)
                raise
            os.close(self._held)
            self._held = held

    def __enter__(self) -> StartFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def begin(start: Mapping[str, Any]) -> None:
    """In a worker: what the start file calls."""
    from torch.distributed.elastic.multiprocessing.errors import record

    def train() -> None:
        arguments = _arguments(start, WorkerEnv.of(os.environ).generation)
        trainer = _class_at(start["trainer"])(**arguments)
        getattr(trainer, start["method"])()

    record(train)()


def _arguments(start: Mapping[str, Any], generation: int) -> dict[str, Any]:
    arguments: dict[str, Any] = value_of(start["arguments"])
    resumes = generation > 1 and start["if_exists"] is not None and os.path.exists(start["if_exists"])
    return merged(arguments, value_of(start["on_restart"])) if resumes else arguments


def absolute_entries(path: Iterable[Any], folders: Iterable[str | None]) -> list[str]:
    """Of `sys.path`, in which a relative entry means one in the current folder: with those in each of `folders`, which
    have been that. What is no text Python does not look at."""
    entries: dict[str, None] = {}
    for entry in path:
        if isinstance(entry, str):
            entries.update(
                (os.path.join(folder, entry) if entry else folder, None) for folder in folders if folder
            )
    return list(entries)


# ---------------------------------------------------------------- classes by name


def _place_of(kind: type) -> dict[str, str]:
    module, name = kind.__module__, kind.__qualname__
    known: Any = sys.modules.get(module)
    for part in name.split("."):
        known = getattr(known, part, None)
    if known is not kind:
        raise TypeError(f"workers cannot import {module}.{name}: define the class at the top of a module")
    if module != "__main__":
        return {"module": module, "name": name}
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return {"main_module": main.__spec__.name, "name": name}
    script = getattr(main, "__file__", None)
    if script is None or not os.path.isfile(script):
        raise TypeError(
            f"{name} is defined in a notebook or a shell, which workers cannot import: move it into a module, or give "
            "a function to elastic_agent.launcher.elastic_launch, which needs cloudpickle for that"
        )
    return {"script": os.path.abspath(script), "name": name}


def _class_at(place: Mapping[str, str]) -> Callable[..., Any]:
    if "module" in place:
        found: Any = importlib.import_module(place["module"])
    elif "main_module" in place:
        found = _as_main(runpy.run_module(place["main_module"], run_name=_MAIN, alter_sys=True))
    else:
        found = _as_main(runpy.run_path(place["script"], run_name=_MAIN))
    for part in place["name"].split("."):
        found = getattr(found, part)
    result: Callable[..., Any] = found
    return result


def _as_main(names: Mapping[str, Any]) -> ModuleType:
    """What pickles and spawned processes know as the main module from now on."""
    module = ModuleType(_MAIN)
    vars(module).update(names)
    sys.modules["__main__"] = sys.modules[_MAIN] = module
    return module


# ---------------------------------------------------------------- files


def _new_file(folder: Path) -> tuple[int, Path]:
    """Locked and empty."""
    with _one_at_a_time(folder):
        _remove_leftovers(folder)
        descriptor, name = tempfile.mkstemp(_SUFFIX, _PREFIX, folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor, Path(name)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A file that is being made is not taken for one that was left."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode) and not _is_held(path) and not _is_in_a_command(path):
                path.unlink(missing_ok=True)


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True  # not for us to judge
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _is_in_a_command(path: Path) -> bool:
    """An agent that has outlived its owner will start workers again."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.fsencode(path) in (entry / "cmdline").read_bytes().split(b"\0"):
                    return True
    return False
