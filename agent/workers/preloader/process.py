"""The preloaded process: imports what workers import, once, and forks *spares* that wait to become workers.

`spares` starts it, through `shim`, as `python -u process.py AGENT_PID`, with one end of a socket pair as its standard
input (`wire`). It receives what to import, answers with the result, and is then asked for spares, each with its
own socket to the agent. It is never the parent of a spare: it forks an intermediate process, which forks the spares
and ends, so that they become children of the agent, which adopts orphans. From then on a spare has nothing to do with
this process: it dies with the agent, survives this process, and waits for the one message with what it shall be.

Invariants: a spare receives one message, and closes its socket then; there is no second one. What it was to become
and cannot be as a fork it becomes by exec, with the same pid, session, cgroup and descriptors.

In the job's interpreter, which need not have this package installed: standard library, and modules of ours.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

HERE = Path(__file__).resolve().parent

if TYPE_CHECKING:
    from ....worker.ranks import gloo_threads, master_port
    from ..processes import shim, store_server
    from ..processes import spare_wire as wire
    from .become import Script, become, show_process
    from .imported import ROOM_NAME, Imported, Unfit
else:
    # Our package by a name that is not used elsewhere: scripts may have another version of it, or none.
    package = sys.modules["elastic_agent_preloader"] = types.ModuleType("elastic_agent_preloader")
    package.__path__ = [str(Path(__file__).parents[3])]
    from elastic_agent_preloader.agent.workers.preloader.become import Script, become, show_process
    from elastic_agent_preloader.agent.workers.preloader.imported import ROOM_NAME, Imported, Unfit
    from elastic_agent_preloader.agent.workers.processes import shim, store_server
    from elastic_agent_preloader.agent.workers.processes import spare_wire as wire
    from elastic_agent_preloader.worker.ranks import gloo_threads, master_port

    wire.CODEC.prepare()


def main(agent_pid: int) -> Script:
    """In a worker its script; all other processes end here: this one when the agent closes its end, or has ended."""
    channel = socket.socket(fileno=os.dup(0))
    channel.set_inheritable(False)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Python looks first where this file lies, but what lies here is never imported by its bare name.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != str(HERE)]
    ignored = [number for number in shim.STAY_IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    for number in shim.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.environ.pop(ROOM_NAME, None)  # a wrapper may have cleaned the environment
    show_process(sys.orig_argv[:-1], os.environ.copy())
    received = wire.receive(channel)
    if received is None:
        os._exit(0)
    preload, _ = received
    assert isinstance(preload, wire.Preload), preload
    imported = load(preload)
    try:
        imported.check()
        wire.send(channel, wire.Loaded(imported.count, imported.skipped, tuple(sorted(imported.reads))))
        born = _serve(channel, imported)
    except Unfit as unfit:
        wire.send(channel, wire.Unfit(str(unfit), unfit.stale))
        os._exit(0)
    if born is None:
        os._exit(0)  # what modules have registered for the end is for workers to do
    return live(born, imported, agent_pid, ignored)


def load(preload: wire.Preload) -> Imported:
    """Imports the modules named."""
    gc.disable()
    imported = Imported(preload.names, preload.first_on_path)
    gloo_threads.watch()
    master_port.watch()
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


def live(channel: socket.socket, imported: Imported, agent_pid: int, stay_ignored: Collection[int]) -> Script:
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
        _serve_store(descriptors[0])
    assert isinstance(message, wire.BecomeWorker), message
    return _become_worker(message, descriptors, channel, imported)


def _refuse(problem: str) -> NoReturn:
    os.write(2, f"elastic-agent: {problem}\n".encode())
    os._exit(1)


def _serve_store(listener: int) -> NoReturn:
    """The spare becomes the server of the workers' store."""
    os.setsid()
    os.dup2(listener, 0)
    os.close(listener)
    for number in shim.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    show_process([sys.executable, store_server.__file__], os.environ.copy())
    store_server.main()


def _become_worker(
    start: wire.BecomeWorker, descriptors: list[int], channel: socket.socket, imported: Imported
) -> Script:
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if problem := shim.place(start.cpus, start.cgroup):
        _refuse(problem)

    def report(problem: str) -> None:
        with contextlib.suppress(OSError):  # the agent has ended
            wire.send(channel, wire.Problem(problem))

    script = become(start, imported, report)
    channel.close()
    return script


def without_our_frame(shown: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for an exception that has left the script, as `shown` would be called under `python script.py`."""

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> Any:
        own = trace and trace.tb_next
        return shown(kind, error.with_traceback(own), own)

    return show


def _code() -> tuple[types.CodeType, dict[str, Any]]:
    """Nothing of ours may hold the script's module: at the end its globals must go before those of the libraries that
    they need, so that a file left open is written whole."""
    script = main(int(sys.argv[1]))
    return script.code, script.main.__dict__


if __name__ == "__main__":
    try:
        exec(*_code())
    except BaseException:
        sys.excepthook = without_our_frame(sys.excepthook)
        raise
