"""The preloaded process: imports what workers import, once, and forks *spares* that wait to become workers.

`spares` starts it, through `shim`, as `python -u process.py AGENT_PID`, with one end of a socket pair as its standard
input (`wire`). It receives what to import, answers with the result, and is then asked for spares, each with its
own socket to the agent. It is never the parent of a spare: it forks an intermediate process, which forks the spares
and ends, so that they become children of the agent, which adopts orphans. From then on a spare has nothing to do with
this process: it dies with the agent, survives this process, and waits for the one message with what it shall be.

A fork has its parent's memory, and of its threads only the one that forked. So before each fork this process makes
sure that it has one thread, no CUDA context and no GPU's driver open, and that what it has imported is what lies on
disk. It never computes anything: OpenMP's threads do not survive a fork either. It reports what it finds wrong, and
then forks no more.

Invariants: a spare receives one message, and closes its socket then; there is no second one. What it was to become
and cannot be as a fork it becomes by exec, with the same pid, session, cgroup and descriptors.

In the job's interpreter, which need not have this package installed: standard library, and modules of ours.
"""

from __future__ import annotations

import sys

FRESH = frozenset(sys.modules) - {"__future__"}
"""What a process has imported that has just started. Asked for before anything else is imported."""

import contextlib  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sysconfig  # noqa: E402
import types  # noqa: E402
from collections.abc import Collection, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, NoReturn  # noqa: E402

HERE = Path(__file__).resolve().parent

CHECK_EVERY_S = 5.0
"""An idle process looks so often whether it is still fit."""

UNUSED_CHECK_EVERY_S = 60.0
"""One of which no spare was wanted yet, as no job is known: a look costs 6 ms, and the first fork is after another."""


if TYPE_CHECKING:
    from ....worker.ranks import gloo_threads, master_port
    from ...common import kernel_files
    from ..processes import shim, store_holder
    from . import fresh_process, gpu_drivers, import_profile, wire
    from .fidelity import import_cache, proc_title
else:
    # Our package by a name that is not used elsewhere, and now: later sys.modules is not ours any more.
    package = sys.modules["elastic_agent_preloader"] = types.ModuleType("elastic_agent_preloader")
    package.__path__ = [str(Path(__file__).parents[3])]
    from elastic_agent_preloader.agent.common import kernel_files
    from elastic_agent_preloader.agent.workers.preloader import (
        fresh_process,
        gpu_drivers,
        import_profile,
        wire,
    )
    from elastic_agent_preloader.agent.workers.preloader.fidelity import import_cache, proc_title
    from elastic_agent_preloader.agent.workers.processes import shim, store_holder
    from elastic_agent_preloader.worker.ranks import gloo_threads, master_port

    wire.CODEC.prepare()


class Unfit(Exception):
    """Why no spares can be forked. `stale`: another process, started now, could."""

    def __init__(self, why: str, *, stale: bool = False) -> None:
        super().__init__(why)
        self.stale = stale


def main(agent_pid: int) -> None:
    """Until the agent closes its end, or has ended. In a spare: until it receives what to become."""
    channel = socket.socket(fileno=os.dup(0))
    channel.set_inheritable(False)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Python looks first where this file lies, but what lies here is never imported by its bare name.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != str(HERE)]
    ignored = [number for number in shim.STAY_IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    for number in store_holder.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    received = wire.receive(channel)
    if received is None:
        return
    preload, _ = received
    assert isinstance(preload, wire.Preload), preload
    known = Imported(preload, ignored)
    try:
        known.check()
        wire.send(
            channel, wire.Loaded(known.count, dict(known.cache.skipped), tuple(sorted(known.cache.reads)))
        )
        born = _serve(channel, known)
    except Unfit as unfit:
        wire.send(channel, wire.Unfit(str(unfit), unfit.stale))
        return
    if born is not None:
        live(born, known, agent_pid)


def _serve(channel: socket.socket, known: Imported) -> Newborn | None:
    """None at the end of this process' work. Raises Unfit."""
    used = False
    while True:
        asked, _, _ = select.select([channel], [], [], CHECK_EVERY_S if used else UNUSED_CHECK_EVERY_S)
        sockets: list[int] = []
        if asked:
            received = wire.receive(channel)
            if received is None:
                return None
            _, sockets = received
        known.check()
        used |= bool(sockets)
        if sockets and (born := fork_spares(sockets)) is not None:
            channel.close()
            return born


def expanded(words: Sequence[str]) -> list[str]:
    """The names of modules that the words of --preload stand for."""
    several = {"default": import_cache.DEFAULT_PRELOAD, "auto": ()}
    return [name for word in words for name in several.get(word, (word,))]


class Imported:
    """What this process has imported. Forks have it too, and copy each page of it that they touch."""

    def __init__(self, preload: wire.Preload, stay_ignored: Collection[int] = ()) -> None:
        """Imports the modules named, and those installed that a worker has asked for.

        `stay_ignored`: the signals that this process was started to ignore, as all that it becomes shall."""
        gc.disable()
        names = dict.fromkeys([*expanded(preload.names), *import_profile.installed(preload.learned)])
        path = list(sys.path)
        if preload.first_on_path and not getattr(sys.flags, "safe_path", False):  # 3.11
            sys.path.insert(0, preload.first_on_path)  # where workers look first, too
        self.cache = import_cache.preload(list(names), FRESH)
        self.cache.path = tuple(path)
        sys.path[:] = path
        self.count = len(self.cache.tracer.modules)
        self.stay_ignored = stay_ignored
        self._cuda = sys.modules.get("torch.cuda")
        self.store_kind = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
        installed = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
        gloo_threads.watch()
        master_port.watch()
        self._edited = {path: was for path, was in self.cache.files.items() if not path.startswith(installed)}
        self.cache.hide()
        gc.collect()
        gc.freeze()

    def check(self) -> None:
        """Raises Unfit when a fork would not be like a process that imports all of this now."""
        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            names = ", ".join(
                sorted(kernel_files.read(f"/proc/self/task/{thread}/comm") or "?" for thread in threads)
            )
            raise Unfit(f"it has {len(threads)} threads ({names}), of which a fork has only one")
        if self._cuda is not None and self._cuda.is_initialized():
            raise Unfit("it has a CUDA context, which no fork can use")
        if driver := gpu_drivers.in_use():
            raise Unfit(
                f"something that it imports has opened {driver}, a GPU's driver, which no fork can use"
            )
        if changed := self.cache.changed():
            raise Unfit(f"{changed[0]} has changed since it was imported", stale=True)

    def edited(self) -> str:
        """A file that people edit and that has changed; empty if there is none. What is installed is only checked
        in the background, and before each fork."""
        return next((path for path, was in self._edited.items() if import_cache.version(path) != was), "")


# --- Birth


@dataclass(frozen=True, slots=True)
class Newborn:
    """Here a new process goes on. It has its own socket to the agent, and a pipe that ends when the agent is its
    parent."""

    channel: socket.socket
    orphaned: int


def fork_spares(sockets: Sequence[int]) -> Newborn | None:
    """One for each socket. In this process None; where the system lets none be made the agent sees the socket closed.

    It returns in each spare, too: who begins a script there must leave all Python code behind.
    """
    orphaned, parent = os.pipe()
    try:
        intermediate = os.fork()
    except OSError as error:
        print(f"elastic-agent: no spare can be forked: {error.strerror}", file=sys.stderr, flush=True)
        intermediate = -1
    if intermediate == 0:
        born = _fork_twice(sockets)
        os.close(parent)
        return Newborn(born, orphaned)
    for descriptor in sockets:
        os.close(descriptor)
    if intermediate > 0:
        os.waitpid(intermediate, 0)
    # Only now: when the intermediate process can be waited for, its children have got their new parent.
    os.close(parent)
    os.close(orphaned)
    return None


def _fork_twice(sockets: Sequence[int]) -> socket.socket:
    """Returns in the spares only."""
    for mine in sockets:
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child == 0:
            for other in sockets:
                if other != mine:
                    os.close(other)
            return socket.socket(fileno=mine)
    os._exit(0)


def live(born: Newborn, known: Imported, agent_pid: int) -> NoReturn:
    """A spare, from its birth until it receives what to become."""
    for number in store_holder.IGNORED:
        if signal.getsignal(number) is signal.SIG_IGN and number not in known.stay_ignored:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    os.read(born.orphaned, 1)
    os.close(born.orphaned)
    if problem := shim.tie(agent_pid):
        _refuse(problem)
    wire.send(born.channel, wire.Ready(os.getpid()))
    received = wire.receive(born.channel)
    if received is None:
        os._exit(0)
    message, descriptors = received
    if isinstance(message, wire.ServeStores):
        born.channel.close()
        _serve_stores(descriptors[0], known)
    assert isinstance(message, wire.BecomeWorker), message
    become_worker(message, descriptors, born.channel, known)


def _refuse(problem: str) -> NoReturn:
    os.write(2, f"elastic-agent: {problem}\n".encode())
    os._exit(1)


def _serve_stores(channel: int, known: Imported) -> NoReturn:
    """The spare becomes the holder of the workers' stores, which takes its orders on `channel`."""
    os.setsid()
    os.dup2(channel, 0)
    os.close(channel)
    with contextlib.suppress(OSError):  # then ps shows it as one of us
        proc_title.show([sys.executable, store_holder.__file__], os.environ)
    # Of a client that is cut off torch would write pages of C++ frames; errors go to the channel.
    for stream in (1, 2):
        os.dup2(nothing := os.open(os.devnull, os.O_RDWR), stream)
        os.close(nothing)
    store_holder.main(known.store_kind)
    os._exit(0)


# --- A worker


def become_worker(
    start: wire.BecomeWorker, descriptors: list[int], channel: socket.socket, known: Imported
) -> NoReturn:
    """Ends as the script ends."""
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if problem := shim.place(start.cpus, start.cgroup):
        _refuse(problem)

    def report(problem: str) -> None:
        with contextlib.suppress(OSError):  # the agent has ended, or the script runs already
            wire.send(channel, wire.Problem(problem))

    if edited := known.edited():
        report(f"{edited} has changed since it was imported")
        os.chdir(start.cwd)
        os.execve(start.cold[0], start.cold, start.environment)
    for profile in descriptors[3:]:
        import_profile.profile_imports(profile)
    try:
        fresh_process.run(start, known.cache, report, known.stay_ignored)
    except fresh_process.Become:
        channel.close()
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]))
