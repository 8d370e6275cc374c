"""Starts modules of this package as processes that probe, and bounds them: what hangs, in the network, a disk or torch,
is killed.

Each leads a session of its own, so that no signal of a terminal ends it. A `Probe` gets its order as a line of JSON on
standard input, and answers with a line. Those that stay (a server, a file that is held) end when standard input does,
so that they end with the one that started them, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import __file__ as _package
from ...codec import Invalid, load_object

MOST_BYTES = 1 << 22
"""Of an answer."""
KILLED_S = 1.0
"""What SIGKILL does not end within that time hangs in the kernel, and is left."""

PROGRAM = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; from {module} import {main}; {main}()"
)
"""An empty entry is the current directory, whose modules are not to be imported. This package comes last."""

ISOLATED = ("-I", "-S")
"""For a probe that needs the standard library and this package only: no module of PYTHONPATH is imported, and nothing
that is installed runs at its start."""

_PACKAGES = Path(_package).parents[1]


def probe_command(python: str, module: str, main: str = "main", flags: Sequence[str] = ()) -> list[str]:
    """`main` is a function of `module`."""
    return [python, *flags, "-c", PROGRAM.format(module=module, main=main), str(_PACKAGES)]


def start_probe_process(
    python: str,
    module: str,
    environ: Mapping[str, str],
    main: str = "main",
    *,
    flags: Sequence[str] = (),
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """`descriptors` are open there, too. Raises OSError."""
    return subprocess.Popen(
        probe_command(python, module, main, flags),
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=tuple(descriptors),
        start_new_session=True,
    )


class NoAnswer(Exception):
    """The process has given none; the text says what became of it."""


class Probe:
    """One process. Close it in the end: it is killed if it still runs."""

    def __init__(
        self,
        name: str,
        *,
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """`name` is a probe of `pair_probes`. `descriptors` are open there, too. Raises NoAnswer."""
        self._name = name
        module, main = f"{__package__}.pair_probes", f"{name}_main"
        environ = os.environ if environ is None else environ
        try:
            self._process = start_probe_process(python, module, environ, main, descriptors=descriptors)
        except OSError as error:
            raise NoAnswer(f"the probe {name} could not be started: {error.strerror}") from error

    def order(self, order: Mapping[str, Any]) -> None:
        """Once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that there is no answer says it
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Its next one. Raises NoAnswer."""
        assert self._process.stdout is not None
        descriptor, until, data = self._process.stdout.fileno(), time.monotonic() + limit_s, b""
        poll = select.poll()  # select refuses descriptors from 1024 on
        poll.register(descriptor, select.POLLIN)
        while not data.endswith(b"\n"):
            left_s = until - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise NoAnswer(f"no answer of the probe {self._name} within {limit_s:g} s")
            more = os.read(descriptor, 1 << 16)
            data += more
            if not more or len(data) > MOST_BYTES:
                raise NoAnswer(f"the probe {self._name} has ended without an answer")
        try:
            return load_object(data, "answer")
        except Invalid as error:
            raise NoAnswer(f"the probe {self._name}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)

    def end(self, limit_s: float) -> None:
        """Let it end by itself, with what it has to clear away, and kill it after that time."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        self.close()


def ask(name: str, order: Mapping[str, Any], wanted: str, limit_s: float, **options: Any) -> Any:
    """What the only answer of a process has under the name `wanted`. Raises NoAnswer."""
    with contextlib.closing(Probe(name, **options)) as probe:
        probe.order(order)
        answer = probe.answer(limit_s)
    if wanted not in answer:
        raise NoAnswer(f"the probe {name} has answered something else: {list(answer)[:8]}")
    return answer[wanted]


def read_order() -> dict[str, Any]:
    """In the process."""
    return load_object(sys.stdin.readline(), "order")


def say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def wait_for_end() -> None:
    """Until the one that started this process closes its end, or is gone."""
    sys.stdin.read()
