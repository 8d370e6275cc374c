"""Starts a job of a trainer that no pickle can carry: a small start file names its class and holds its arguments.

    from elastic_agent.launcher import LaunchConfig
    from elastic_agent.trainer_start import StartFile

    resume = {"overrides": {"resume": str(last)}}
    with StartFile(Trainer, {"overrides": vars(args)}, on_restart=resume, if_exists=last) as start:
        start.run(LaunchConfig(nproc_per_node=2))

Each worker makes `Trainer(**arguments)` and calls its `train()`. The file has plain data, and no code of the caller's:
a class is found by its module, and one of the script itself by the script's path, which is run again with another
`__name__` than `__main__`, as `multiprocessing` does it.

The files lie in one folder that is private to the user. Who has written one holds a lock on it, which ends with its
process however that ends: the next start removes what has neither lock nor a process that names it in its command.
Nothing else is ever removed, and of a trainer's own folders nothing at all.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import runpy
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from types import ModuleType, TracebackType
from typing import Any

from .launcher import run_agent, words_of

FOLDER = "elastic-agent-starts-"
_PREFIX, _SUFFIX = "start-", ".py"
_AS_THEY_ARE = (type(None), bool, int, float, str)
_MAIN = "__mp_main__"
"""What a script is called in a process that is not its own, as `multiprocessing` has it."""

_TEXT = """\
# Written by elastic_agent.trainer_start for one job, and removed with it.
if __name__ == "__main__":
    import json
    import sys

    start = json.loads({start!r})
    sys.path[:] = start["path"]

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
        if_exists: Path | None = None,
    ) -> None:
        """`trainer` is a class, or an object of it; `arguments` are for its constructor, by name.

        They may be None, numbers, texts, paths, and lists, tuples, sets and dicts of these. From the second generation
        on `on_restart` is put into them, dict by dict: so a trainer resumes there instead of beginning anew. With
        `if_exists`, only where that file is there: a worker may die before its first checkpoint.
        Raises TypeError for what cannot be written, and OSError.
        """
        kind = trainer if isinstance(trainer, type) else type(trainer)
        start = {
            "trainer": _place_of(kind),
            "method": method,
            "arguments": _plain(dict(arguments or {}), "arguments"),
            "on_restart": _plain(dict(on_restart or {}), "on_restart"),
            "if_exists": str(if_exists.absolute()) if if_exists is not None else None,
            "path": [entry or os.getcwd() for entry in sys.path],
        }
        text = _TEXT.format(start=json.dumps(start))
        self._owner = os.getpid()
        self._held, self.path = _new_file(_private_folder())
        try:
            self.path.write_text(text)
        except OSError:
            self.remove()
            raise

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
        if self._held < 0 or os.getpid() != self._owner:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._held)
        self._held = -1

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
        arguments = _arguments(start, int(os.environ.get("ELASTIC_AGENT_GENERATION", "1")))
        trainer = _class_at(start["trainer"])(**arguments)
        getattr(trainer, start["method"])()

    record(train)()


def _arguments(start: Mapping[str, Any], generation: int) -> dict[str, Any]:
    arguments: dict[str, Any] = _value(start["arguments"])
    resumes = generation > 1 and (start["if_exists"] is None or os.path.exists(start["if_exists"]))
    return _put_into(arguments, _value(start["on_restart"])) if resumes else arguments


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


# ---------------------------------------------------------------- arguments as data


def _plain(value: Any, where: str) -> Any:
    """In JSON: what it has no form for is an object with one key that names the type."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, dict):
        return {
            "dict": [
                [_plain(key, f"a key of {where}"), _plain(one, f"{where}[{key!r}]")]
                for key, one in value.items()
            ]
        }
    for kind in (list, tuple, set):
        if type(value) is kind:
            found = [_plain(one, f"{where}[{number}]") for number, one in enumerate(value)]
            return found if kind is list else {kind.__name__: found}
    raise TypeError(
        f"{where} is a {type(value).__name__}, and a start file holds numbers, texts, paths, lists, tuples, sets and "
        "dicts: name a file instead, or make the object in the trainer"
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "path":
        return Path(content)
    if kind == "dict":
        return {_value(key): _value(one) for key, one in content}
    return {"tuple": tuple, "set": set}[kind](map(_value, content))


def _put_into(arguments: dict[Any, Any], more: Mapping[Any, Any]) -> dict[Any, Any]:
    together = dict(arguments)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(together.get(key), dict)
        together[key] = _put_into(together[key], value) if both else value
    return together


# ---------------------------------------------------------------- files


def _private_folder() -> Path:
    """Raises OSError where another user has made one by this name, or may write to it."""
    folder = Path(tempfile.gettempdir(), f"{FOLDER}{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder of this user alone: remove it, or name another in TMPDIR"
        )
    return folder


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
        if not _is_held(path) and not _is_in_a_command(path):
            path.unlink(missing_ok=True)


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
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
