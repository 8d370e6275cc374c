"""The fork server: imports what workers import, once, and forks *spares* that wait to become workers.

`spares` starts it, through `shim`, as `python -u fork_server.py AGENT_PID NAME,NAME...`, with one end of a socket pair
as its standard input (`wire`). It imports the modules of these names, tells the result, and is then asked for spares,
each with its own socket to the agent. It is never the parent of a spare: it forks an intermediate process, which forks
the spares and ends, so that they become children of the agent, which adopts orphans. From then on a spare has nothing
to do with this process: it dies with the agent, survives this process, and waits for the one message with what it shall
be: `python -u script.py args`.

Environment, command line, streams, signals, `__main__` and `sys.path` are the worker's; the modules that were imported
stay, as if the script had imported them, with what they registered for the end of the process. Where that would not do,
because of the environment or the script, the spare starts cold: it executes the worker's command, and says why.

A spare may also become the server of the workers' store, which starts cold as `python fork_server.py store`.

Invariants: a spare receives one message, and closes its socket then; there is no second one. What it was to become
and cannot be as a fork it becomes by exec, with the same pid, session and descriptors.

In the job's interpreter, which need not have this package installed: standard library, and modules of ours.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

HERE = Path(__file__).resolve().parent

if TYPE_CHECKING:
    from ....worker.steps import torch_workarounds
    from ....worker.wire.environment import NAMES
    from ....worker.wire.shared_progress import register_stacks
    from . import shim
    from . import spare_wire as wire
    from .imported import ROOM_NAME, Imported, Unfit, obstacle, set_threads, set_too_late
else:
    # Our package by a name that is not used elsewhere: scripts may have another version of it, or none.
    package = sys.modules["elastic_agent_preloader"] = types.ModuleType("elastic_agent_preloader")
    package.__path__ = [str(Path(__file__).parents[3])]
    from elastic_agent_preloader.agent.workers.processes import shim
    from elastic_agent_preloader.agent.workers.processes import spare_wire as wire
    from elastic_agent_preloader.agent.workers.processes.imported import (
        ROOM_NAME,
        Imported,
        Unfit,
        obstacle,
        set_threads,
        set_too_late,
    )
    from elastic_agent_preloader.worker.steps import torch_workarounds
    from elastic_agent_preloader.worker.wire.environment import NAMES
    from elastic_agent_preloader.worker.wire.shared_progress import register_stacks

    wire.CODEC.prepare()

TORCH_SEED = 67280421310721
"""With which older versions of torch begin in every process."""

Run: TypeAlias = tuple[Any, ...]
"""A function, and what it is to be called with, where no frames of ours are below it: `exec` and a script's code, or
what Python itself calls for `python -m`."""


def main(agent_pid: int, names: Sequence[str]) -> Run:
    """In a worker its script; all other processes end here: this one when the agent closes its end, or has ended."""
    channel = socket.socket(fileno=os.dup(0))
    channel.set_inheritable(False)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    ignored = [number for number in shim.STAY_IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    for number in shim.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.environ.pop(ROOM_NAME, None)  # a wrapper may have cleaned the environment
    show_process(sys.orig_argv[:-1], os.environ.copy())
    imported = load(names)
    try:
        imported.check()
        wire.send(channel, wire.Preloaded(imported.count, imported.skipped, tuple(sorted(imported.reads))))
        born = _serve(channel, imported)
    except Unfit as unfit:
        wire.send(channel, wire.CannotFork(str(unfit)))
        os._exit(0)
    if born is None:
        os._exit(0)  # what modules have registered for the end is for workers to do
    return live(born, imported, agent_pid, ignored)


def load(names: Sequence[str]) -> Imported:
    """Imports the modules named."""
    gc.disable()
    imported = Imported(names)
    torch_workarounds.install()
    gc.collect()
    gc.freeze()
    return imported


def _serve(channel: socket.socket, imported: Imported) -> socket.socket | None:
    """None at the end of this process' work. Raises Unfit."""
    while (received := wire.receive(channel)) is not None:
        imported.check()
        if (born := fork_spares(received[1])) is not None:
            channel.close()
            return born
    return None


# --- Birth


def fork_spares(sockets: Sequence[int]) -> socket.socket | None:
    """One for each socket, which is its own to the agent: returned in the spare. In this process None; where the system
    lets none be made the agent sees the socket closed."""
    try:
        intermediate = os.fork()
    except OSError:
        intermediate = -1
    if intermediate == 0:
        return _fork_twice(sockets)
    for descriptor in sockets:
        os.close(descriptor)
    if intermediate > 0:
        os.waitpid(intermediate, 0)
    return None


def _fork_twice(sockets: Sequence[int]) -> socket.socket:
    """Returns in the spares only, when the agent is their parent."""
    intermediate = os.getpid()
    for mine in sockets:
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child == 0:
            for other in sockets:
                if other != mine:
                    os.close(other)
            while os.getppid() == intermediate:
                time.sleep(0.0005)
            return socket.socket(fileno=mine)
    os._exit(0)


def live(channel: socket.socket, imported: Imported, agent_pid: int, stay_ignored: Collection[int]) -> Run:
    """A spare, from its birth until it receives what to become. `stay_ignored`: the signals that this process was
    started to ignore, as all that it becomes shall."""
    for number in shim.IGNORED:
        if signal.getsignal(number) is signal.SIG_IGN and number not in stay_ignored:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    if problem := shim.tie(agent_pid):
        _refuse(problem)
    wire.send(channel, wire.Ready(os.getpid()))
    received = wire.receive(channel)
    if received is None:
        os._exit(0)
    message, descriptors = received
    if isinstance(message, wire.ServeStore):
        channel.close()
        _become_store(*descriptors)
    assert isinstance(message, wire.BecomeWorker), message
    return _become_worker(message, descriptors, channel, imported)


def _refuse(problem: str) -> NoReturn:
    os.write(2, f"elastic-agent: {problem}\n".encode())
    os._exit(1)


def _become_store(listener: int, stderr: int) -> NoReturn:
    os.setsid()
    for number, descriptor in ((0, listener), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number in shim.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    show_process([sys.executable, wire.FORK_SERVER, wire.STORE], os.environ.copy())
    serve_store()


def serve_store() -> NoReturn:
    """Serves one generation's on the listening socket that is standard input, until it is killed. The keys die with
    it: who still asks is cut off."""
    from torch.distributed import TCPStore

    listener = socket.socket(fileno=0)
    host, port = listener.getsockname()[:2]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while store:
        signal.pause()
    raise AssertionError


def _become_worker(
    start: wire.BecomeWorker, descriptors: list[int], channel: socket.socket, imported: Imported
) -> Run:
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if problem := shim.keep_to(start.cpus):
        _refuse(problem)

    def report(problem: str) -> None:
        with contextlib.suppress(OSError):  # the agent has ended
            wire.send(channel, wire.CannotFork(problem))

    run = become(start, imported, report)
    channel.close()
    return run


# --- The worker


def become(start: wire.BecomeWorker, imported: Imported, report: Callable[[str], None]) -> Run:
    """What the script is run by. In a process with one thread, whose first three descriptors are the worker's.
    `report` is called with why a worker starts cold."""
    os.chdir(start.cwd)
    first = _first_on_path(start)
    shadowed = "" if _safe_path() else imported.shadowed(first)
    if problem := obstacle(imported.base, start.environment, imported.reads):
        _start_cold(start, report, problem)
    if shadowed:
        _start_cold(start, report, f"{first} has its own {shadowed}")
    run: Run = runpy._run_module_as_main, start.target  # type: ignore[attr-defined]  # Python calls it by this name
    if start.target_kind == wire.SCRIPT:
        try:
            text, run = _script(os.path.join(os.getcwd(), start.target))
        except (OSError, SyntaxError, ValueError) as error:  # Python itself says it best
            _start_cold(start, report, f"{start.target} is no script that can be read: {error}")
        if problem := set_too_late(text, imported.reads):
            _start_cold(start, report, f"{start.target} is not forked: {problem}")
    _take_environment(start, imported)
    _take_interpreter(start, first)
    _renew()
    return run


def _start_cold(start: wire.BecomeWorker, report: Callable[[str], None], why: str) -> NoReturn:
    report(why)
    os.execve(start.cold[0], start.cold, start.environment)


def _first_on_path(start: wire.BecomeWorker) -> str:
    return (
        os.path.dirname(os.path.realpath(start.target)) if start.target_kind == wire.SCRIPT else os.getcwd()
    )


def _safe_path() -> bool:
    return getattr(sys.flags, "safe_path", False)  # 3.11


def _take_environment(start: wire.BecomeWorker, imported: Imported) -> None:
    wanted = start.environment
    show_process([sys.orig_argv[0], *start.command], wanted)
    set_by_modules = {
        name: value
        for name, value in imported.variables.items()
        if wanted.get(name) == imported.base.get(name)
    }
    os.environ.update(set_by_modules)
    time.tzset()
    set_threads()
    if wanted.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    register_stacks(wanted.get(NAMES["stacks"], ""))


def _take_interpreter(start: wire.BecomeWorker, first_on_path: str) -> None:
    sys.argv[:] = [start.target if start.target_kind == wire.SCRIPT else "-m", *start.args]
    sys.orig_argv[:] = [sys.orig_argv[0], *start.command]
    if not _safe_path():
        sys.path.insert(0, first_on_path)
    importlib.invalidate_caches()
    gc.enable()  # what the fork server has frozen stays so: to look through it would copy all of it


def _renew() -> None:
    """What must not be equal in two processes, and is in two forks. (`random` renews itself.)"""
    modules: dict[str, Any] = dict(sys.modules)
    if (torch := modules.get("torch")) and torch.default_generator.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()
    if numpy_random := modules.get("numpy.random"):
        numpy_random.seed()
    if multiprocessing := modules.get("multiprocessing"):
        multiprocessing.current_process().authkey = os.urandom(32)
    if tempfile := modules.get("tempfile"):
        tempfile.tempdir = None
    if (threading := modules.get("threading")) and hasattr(threading.main_thread(), "_set_native_id"):
        threading.main_thread()._set_native_id()  # Python keeps that of the process that has forked


# --- The script


def _script(path: str) -> tuple[str, Run]:
    """Its text as far as that can be read, and what Python would execute."""
    with io.open_code(path) as file:
        data = file.read()
    code = compile(data, path, "exec", dont_inherit=True)
    main = new_main()
    main.__dict__.update(__loader__=SourceFileLoader("__main__", path), __file__=path, __cached__=None)
    return data.decode(errors="replace"), (exec, code, main.__dict__)


def new_main() -> types.ModuleType:
    """In place of this module, as in a new process."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    if "multiprocessing" in sys.modules:
        sys.modules["__mp_main__"] = main
    return main


# --- What /proc shows of this process


def show_process(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Shows these words to ps and py-spy, and these variables, which become the process' own, to all who look for
    workers by their marks.

    The kernel shows what lay on the stack at exec: that of the fork server, which was started with room for more.
    What finds no room is not shown."""
    os.environ.clear()
    os.environ.update(environment)  # C's `getenv` finds copies from here on
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        words, words_end, variables, variables_end = map(int, file.read().rpartition(")")[2].split()[45:49])
    shown = (f"{name}={value}" for name, value in environment.items())
    for start, end, texts in ((words, words_end, command), (variables, variables_end, shown)):
        text = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


# --- Where it runs


def without_our_frames(shown: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for an exception that has left the script, as `shown` would be called under `python script.py`."""

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> Any:
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        return shown(kind, error.with_traceback(trace), trace)

    return show


def run_script(function: Callable[..., object], *arguments: object) -> None:
    """Nothing of ours holds the script's module afterwards: at the end its globals must go before those of the
    libraries that they need, so that a file left open is written whole."""
    if function is not exec:
        new_main()
    function(*arguments)


if __name__ == "__main__":
    # Python looks first where this file lies, but what lies here is never imported by its bare name.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != str(HERE)]
    if sys.argv[1] == wire.STORE:
        serve_store()
    try:
        run_script(*main(int(sys.argv[1]), sys.argv[2].split(",")))
    except BaseException:
        sys.excepthook = without_our_frames(sys.excepthook)
        raise
