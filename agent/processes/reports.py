"""Receives what this node's workers report: a UNIX datagram socket in a folder that only this user can enter.

Reports are hints. A datagram that does not decode is counted and dropped, and so is one that comes while the main
loop has too much to do: training never waits for us.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from ...worker.reports import MAX_BYTES, ReportError, decode
from ..events import Event, Reported

log = logging.getLogger(__name__)


class ReportReceiver:
    """One named thread that turns datagrams into events."""

    def __init__(
        self,
        path: Path,
        post: Callable[[Event], None],
        has_room: Callable[[], bool],
        clock: Callable[[], float],
        count_dropped: Callable[[], None],
    ) -> None:
        self.path = path
        self._post = post
        self._has_room = has_room
        self._clock = clock
        self._count_dropped = count_dropped
        self._said = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def start(self) -> None:
        threading.Thread(target=self._receive, name="reports", daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> None:
        while True:
            try:
                datagram = self._socket.recv(MAX_BYTES + 1)
            except OSError:
                return
            try:
                report = decode(datagram)
            except ReportError as error:
                self._drop("a report that does not decode: %s", error)
                continue
            if self._has_room():
                self._post(Reported(report, self._clock()))
            else:
                self._drop("reports: the agent is too busy")

    def _drop(self, why: str, *details: object) -> None:
        self._count_dropped()
        if not self._said:
            self._said = True
            log.warning("dropping " + why + " (said once; later ones are only counted)", *details)
