"""Starts a job from Python: a function runs on every worker, and its results come back by rank.

    from elastic_agent.launcher import LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(nproc_per_node=2), train)(learning_rate)

The shape is that of `torch.distributed.launcher`. The job is that of the command `elastic-agent`, which runs beside
this process and ends with it: restarts, planned changes and checkpoints are the same. The function is called anew in
every generation. `python -m elastic_agent.launcher --run-path SCRIPT ARGS...` is what a worker runs with `--run-path`.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .agent.common.exits import ExitCode
from .agent.workers.processes.helper import tied

WORKER = "elastic_agent.launcher"
"""What workers run, with the function's name as its argument."""
FUNCTION, PATH = "function.pickle", "path.json"
FOLDER = "LAUNCHED_FUNCTION_FOLDER"
"""The variable by which workers find it: an argument would differ from node to node, and agents compare these."""
RESULTS = "results-"
"""A folder for each generation, with a file for each rank of this node."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How to start a job. What has a name in torch's `LaunchConfig` means the same, but for the defaults."""

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int | str = 1
    """Also "auto", "gpu" or "cpu"."""
    run_id: str = ""
    rdzv_backend: str = ""
    rdzv_endpoint: str = ""
    """Empty: this node alone, or, with `max_nodes` above 1, an agent that hosts the store and prints where."""
    rdzv_configs: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int | None = None
    """None: as long as there is progress."""
    local_addr: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Other options of `elastic-agent`, by their names without the dashes."""


class LaunchError(RuntimeError):
    """The job has failed. The text has the first failed worker's own traceback; `exit_code` is the agent's."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class elastic_launch:
    """Runs `entrypoint` on the workers of a job; call it with the arguments of `entrypoint`.

    A function gives {rank: result} of the workers on this node. A text is a program, and gives an empty dict.
    Raises LaunchError when the job fails, and TypeError for a function that cannot be sent to other processes, or a
    `LaunchConfig` of torch: what it has besides goes into `options` of ours.
    """

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str

    def __call__(self, *args: Any) -> dict[int, Any]:
        if not isinstance(self.config, LaunchConfig):
            raise TypeError(
                f"expected {LaunchConfig}, with what else there is in its options, not {type(self.config)}"
            )
        with tempfile.TemporaryDirectory(prefix="elastic-agent-launch-") as name:  # for this user alone
            folder = Path(name)
            if isinstance(self.entrypoint, str):
                target = ["--no-python", "--", self.entrypoint, *map(str, args)]
            else:
                (folder / FUNCTION).write_bytes(_pickled(self.entrypoint, args))
                (folder / PATH).write_text(json.dumps(sys.path))
                target = ["-m", WORKER, _name(self.entrypoint)]
            run_agent([*words_of(self.config), *target], {FOLDER: name})
            return _results(folder)


def _name(function: Callable[..., Any]) -> str:
    """By which agents compare what they run: nodes that launch other functions are told so."""
    qualified = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{qualified}"


def words_of(config: LaunchConfig) -> list[str]:
    """The options of `elastic-agent` for this `LaunchConfig`."""
    options = {
        "min-nodes": config.min_nodes,
        "max-nodes": config.max_nodes,
        "nproc-per-node": config.nproc_per_node,
        "rdzv-endpoint": config.rdzv_endpoint,
        "rdzv-backend": config.rdzv_backend if config.rdzv_endpoint else "",
        "rdzv-id": config.run_id,
        "rdzv-conf": ",".join(f"{key}={value}" for key, value in config.rdzv_configs.items()),
        "max-restarts": config.max_restarts,
        "local-addr": config.local_addr,
        **config.options,
    }
    return [f"--{name}={value}" for name, value in options.items() if value not in (None, "")]


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """By cloudpickle, which also takes functions of a notebook, where it is installed. Only workers of this user read
    it, from a folder that no other user may write to."""
    pickler: Any = pickle
    with suppress(ImportError):
        pickler = importlib.import_module("cloudpickle")
    if pickler is pickle and getattr(function, "__module__", "") == "__main__":
        raise TypeError(
            f"{function} is defined in the script or notebook itself, which workers cannot import: pip install "
            "cloudpickle, or move it into a module"
        )
    try:
        return bytes(pickler.dumps((function, args)))
    except Exception as error:
        raise TypeError(f"{function} and its arguments cannot be sent to other processes: {error}") from error


def run_agent(words: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Runs `elastic-agent` with these words beside this process. Raises LaunchError when it ends with a code but 0.

    `variables` are added to the environment of agent and workers.

    A signal or Ctrl-C for this process is one for the agent.
    """
    with tempfile.TemporaryDirectory(prefix="elastic-agent-launch-") as folder:
        error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or f"{folder}/error.json")
        error_file.unlink(missing_ok=True)
        code = _exit_code(
            words, {**os.environ, **(variables or {}), "TORCHELASTIC_ERROR_FILE": str(error_file)}
        )
        if code != ExitCode.SUCCESS:
            raise LaunchError(_why(code, error_file), code)


def _exit_code(words: list[str], environment: Mapping[str, str]) -> int:
    # Cells of a notebook show what this process prints, and not what others write to its terminal.
    shown = not hasattr(sys.stdout, "fileno") or type(sys.stdout).__module__.startswith("ipykernel")
    process = subprocess.Popen(
        tied([sys.executable, "-m", "elastic_agent", *words]),
        env=dict(environment),
        stdout=subprocess.PIPE if shown else None,
        stderr=subprocess.STDOUT if shown else None,
        text=shown,
        start_new_session=True,  # a terminal's Ctrl-C comes through here, and once
    )
    with _forwarding_to(process):
        for line in process.stdout or ():
            print(line, end="")
        return process.wait()


@contextmanager
def _forwarding_to(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Only the main thread may have handlers; elsewhere a signal is the program's own matter, and so is one that it
    ignores."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _FORWARDED}
    taken = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _why(code: int, error_file: Path) -> str:
    text = f"the job has ended with exit code {code} of elastic-agent"
    try:
        message = json.loads(error_file.read_text())["message"]
        return f"{text}: {message['message']}\n{message['extraInfo']['py_callstack']}".rstrip()
    except (OSError, ValueError, KeyError, TypeError):
        return text


def _results(folder: Path) -> dict[int, Any]:
    """Of the newest generation: in those before it some ranks may have ended, too. Workers of this user have pickled
    them into a folder that no other user may write to."""
    generations = sorted(folder.glob(f"{RESULTS}*"), key=lambda path: int(path.name.removeprefix(RESULTS)))
    files = sorted(generations[-1].iterdir(), key=lambda path: int(path.name)) if generations else []
    return {int(file.name): pickle.loads(file.read_bytes()) for file in files}


# --- In a worker


def _call(folder: Path) -> None:
    """The folder is private to the user who called the launcher, who also wrote what is unpickled here."""
    # A module beside the caller's script is no less there for its workers.
    sys.path += [place for place in json.loads((folder / PATH).read_text()) if place not in sys.path]
    function, args = pickle.loads((folder / FUNCTION).read_bytes())
    result = function(*args)
    results = folder / f"{RESULTS}{os.environ['ELASTIC_AGENT_GENERATION']}"
    results.mkdir(exist_ok=True)
    file = results / os.environ["RANK"]
    scratch = file.with_name(f".{file.name}")
    try:
        scratch.write_bytes(pickle.dumps(result))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        scratch.unlink(missing_ok=True)
        problem = f"the result of rank {file.name}, a {type(result).__name__}, cannot be sent back"
        raise TypeError(f"{problem}: {error}") from error
    scratch.rename(file)


def _run_path() -> None:
    """As torchrun does it there: the folder in which Python looks first is the current one, not the script's."""
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    if sys.argv[1] == "--run-path":
        record(_run_path)()
    else:
        record(_call)(Path(os.environ[FOLDER]))
