"""A process that answers each line on its standard input with a line, because what it asks may hang: NVML, on a sick
driver. It dies with the agent. Nothing waits for it here, and a process that no signal ends is left behind.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

from ...common.io_thread import IoThread
from ...workers.processes.workers import start_helper

LONGEST_ANSWER = 1 << 18
"""Bytes. A process that says more without the end of a line counts as ended."""

_CHUNK = 4096


class AskedProcess:
    """For the main thread: it dies with the thread that starts it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        io: IoThread,
        post: Callable[[int, bytes], None],
    ) -> None:
        """`post` is called in the thread of `io`, with the pid and each answer; empty: it has ended. Raises OSError."""
        self._io = io
        self._post = post
        self._process = process = start_helper(
            command, environment, subprocess.PIPE, subprocess.PIPE, subprocess.DEVNULL
        )
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self._begun = b""
        """Of the next answer. For the io thread."""
        io.watch(self._descriptor, self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self) -> None:
        """It answers later, or its end comes."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, and its last event comes

    def kill(self) -> None:
        self._process.kill()

    def _read(self) -> None:
        data = os.read(self._descriptor, _CHUNK)
        *answers, self._begun = (self._begun + data).split(b"\n")
        for answer in answers:
            self._post(self.pid, answer)
        if not data or len(self._begun) > LONGEST_ANSWER:
            self._io.forget(self._descriptor)
            self._post(self.pid, b"")
