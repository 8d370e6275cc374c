"""Agents that are forked from a process that has imported what an agent imports, as a daemon's spare agent has.

Imports are nearly all that the start of an agent costs: 0.6 s of processor time, and 0.3 s more where it needs torch's
store. The suite starts hundreds of agents. What a forked one is to the kernel and to the test is what a cold one is:
its words, environment, directory, streams, signals and exit code; only its parent is another. It may be on a host with
a network of its own, as `ip netns exec` would bring it there. `test_fork_server` compares the two. An agent whose
environment Python or the C library reads at their start is not forked.

The module is both ends: `ForkServer` in the test's process, and, run as a program, the process that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn, Protocol

READ_AT_START = re.compile("PYTHON|LD_|LC_|LANG|TZ$|MALLOC_|GLIBC_|OPENBLAS_|OMP_|MKL_")
"""Variables that a process which runs already does not heed any more."""

ROOM = 100_000
"""Bytes for the words and for the environment of a forked agent, as /proc shows them."""


IMPORTED = (
    "__main__",
    "cli",
    "agent.machine.inventory",
    "agent.main.run",
    "agent.workers.processes.guard",
)
"""By an agent in any case, as a standby has it."""


class AgentProcess(Protocol):
    """What tests ask of an agent's process; `subprocess.Popen` has it, too."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class ForkedProcess:
    """One that the server has forked, and whose end it reports."""

    def __init__(self, pid: int, words: Sequence[str], ends: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._words, self._ends = words, ends

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
            self._ended()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        code = self._ends.recv(16)
        assert code, "the process that forks agents has ended: nobody knows what became of this one"
        self.returncode = int(code)
        self._ends.close()


class ForkServer:
    """The process that forks. `with_store`: it has imported torch's store."""

    def __init__(self, path: str, *, with_store: bool) -> None:
        """`path` is its PYTHONPATH, and that of all that it forks."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = {**os.environ, "PYTHONPATH": path}
        own = {
            "SYSTEM_TEST_WITHOUT_TORCH": "yes",
            "OPENBLAS_NUM_THREADS": "1",
            "FORK_SERVER_ROOM": " " * ROOM,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(int(with_store)), " " * ROOM],
                env=self._environment | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Whether what it would fork is what a start with this environment is."""
        return _read_at_start(environment) == _read_at_start(self._environment)

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], output: int, network: str = ""
    ) -> ForkedProcess:
        """`elastic-agent` with these words, in this process's directory; it reads nothing. `network`: the name of a
        network namespace."""
        request = {"words": list(words), "environment": dict(environment), "directory": os.getcwd()}
        request["network"] = network
        ends, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as nothing, open(os.memfd_create("request"), "w+") as file:
            json.dump(request, file)
            file.flush()
            streams = [file.fileno(), nothing.fileno(), output, theirs.fileno()]
            socket.send_fds(self._channel, [b"fork"], streams)
        pid = self._channel.recv(16)
        assert pid, "the process that forks agents has ended: see what it has printed"
        return ForkedProcess(int(pid), words, ends)


@cache
def fork_server(path: str, *, with_store: bool) -> ForkServer:
    """It lives as long as this process."""
    return ForkServer(path, with_store=with_store)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_START.match(name)}


# --- the process that forks


def serve(channel: socket.socket) -> None:
    """Until the test's process has ended."""
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for pytest
    ends: dict[int, socket.socket] = {}
    gc.freeze()
    while True:
        ready, _, _ = select.select([channel, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            report(ends)
        if channel in ready:
            message, received, _, _ = socket.recv_fds(channel, 16, 4)
            if not message:
                return
            request, nothing, output, end = received
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for one in (channel.fileno(), woken, wakes, end, *(each.fileno() for each in ends.values())):
                    os.close(one)
                become(request, nothing, output)
            ends[pid] = socket.socket(fileno=end)
            for one in (request, nothing, output):
                os.close(one)
            channel.send(b"%d" % pid)


def report(ends: dict[int, socket.socket]) -> None:
    """What has ended, to whom it may concern."""
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with ends.pop(pid) as end:
            try:
                end.send(b"%d" % os.waitstatus_to_exitcode(status))
            except OSError:
                pass  # the test does not ask for it


def become(request: int, nothing: int, output: int) -> NoReturn:
    """An agent, in the process that was forked for it."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(request) as file:
            file.seek(0)
            wanted = json.load(file)
        for stream, descriptor in enumerate((nothing, output, output)):
            os.dup2(descriptor, stream)
        for descriptor in (nothing, output):
            os.close(descriptor)
        if wanted["network"]:
            enter(wanted["network"])
        os.chdir(wanted["directory"])
        words, environment = wanted["words"], wanted["environment"]
        os.environ.clear()
        show([sys.executable, "-m", "elastic_agent", *words], environment)
        os.environ.update(environment)
        time.tzset()
        sys.orig_argv[1:] = ["-m", "elastic_agent", *words]
        sys.argv[1:] = words
        sys.path[0] = wanted["directory"]
        from elastic_agent.__main__ import start

        start()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def enter(network: str) -> None:
    """What `ip netns exec` does: /sys shows the interfaces of the network in which it is mounted."""
    new_mounts, new_network, detach, slave, recursive = 0x20000, 0x40000000, 2, 1 << 19, 1 << 14
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as namespace:
        done = [libc.setns(namespace.fileno(), new_network), libc.unshare(new_mounts)]
    done += [libc.mount(b"", b"/", b"none", slave | recursive, None), libc.umount2(b"/sys", detach)]
    done += [libc.mount(network.encode(), b"/sys", b"sysfs", 0, None)]
    assert not any(done), f"{done}: {os.strerror(ctypes.get_errno())}"


def show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Put them where /proc has those of this process: the kernel reads them from its memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words_at, words_until, environment_at, environment_until = map(int, fields[45:49])
    pairs = [f"{name}={value}" for name, value in environment.items()]
    for strings, at, until in (
        (words, words_at, words_until),
        (pairs, environment_at, environment_until),
    ):
        text = b"".join(os.fsencode(string) + b"\0" for string in strings)
        assert len(text) <= until - at, f"{len(text)} bytes are more than ROOM"
        ctypes.memmove(at, text.ljust(until - at, b"\0"), until - at)


def load(*, with_store: bool) -> None:
    for module in IMPORTED:
        importlib.import_module(f"elastic_agent.{module}")
    if with_store:
        from elastic_agent.agent.configuration.rendezvous import STORES

        sys.orig_argv[1:] = ["-m", "elastic_agent"]  # its torch asks who imports it
        STORES["c10d"].load()


if __name__ == "__main__":
    load(with_store=bool(int(sys.argv[2])))
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
