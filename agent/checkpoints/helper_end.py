"""Tells when a helper process of the agent has ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

from ..common.io_thread import IoThread
from ..workers.processes.proc import has_ended

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks, where the kernel gives no descriptor to wait on."""


class HelperEnd:
    """Calls `ended` in the io thread once for each process that it was to wait for, until `close`."""

    def __init__(self, name: str, io: IoThread, ended: Callable[[], None]) -> None:
        self._name = name
        self._io = io
        self._ended = ended
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def wait_for(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended()
        except OSError as error:  # no descriptor is left: a look now and then does as well
            log.warning("the %s is watched by looking now and then: %s", self._name, error)
            self._io.later(LOOK_S, partial(self._look, pid))
        else:
            self._io.watch(pidfd, partial(self._readable, pidfd))

    def _readable(self, pidfd: int) -> None:
        self._io.forget(pidfd)
        os.close(pidfd)
        self._ended()

    def _look(self, pid: int) -> None:
        """After `close` the number may be another process'."""
        if self._closed:
            return
        if has_ended(pid):
            self._ended()
        else:
            self._io.later(LOOK_S, partial(self._look, pid))
