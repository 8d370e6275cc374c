"""Receives what this node's workers report: a UNIX datagram socket in a folder that only this user can enter.

Reports are hints. A datagram that does not decode is counted and dropped, and so is one that comes while the main
loop has too much to do: training never waits for us.

With one kind comes an open file: the lock of a checkpoint directory (see `worker/storage/disk/ownership.py`), which
stays locked between two generations, until this process ends or the job begins another run. A thread of its own has
these files, because to close one may take as long as a disk does not answer.

`RefusedSaves` remembers which saves the disk has refused, so that a job whose last state is on no disk does not end
with success. The disk writer says by itself what it has not written (`UnsavedSteps`). A save that a worker writes
while training waits, as without copies in memory, is known from that worker's reports alone. They are hints: one that
was lost is not known here, and what is known changes nothing but the exit code.

One Checkpointer is told from another by its directory, and by the rank that reports: an error counts until the same
rank has brought that step, or a later one, to the same directory. Where a script reports saves of its own, which name
no directory, all of them are taken for those of one Checkpointer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...codec import Invalid
from ...threads import Thread
from ...worker.wire.messages import MAX_BYTES, REPORTS, LentLock, ReplicationReport, SaveReport
from ..common.events import Event
from .last_steps import Receiver

log = logging.getLogger(__name__)

MAX_LOCKS = 64
"""Checkpoint directories of one job whose locks are kept."""

MAX_AT_ONCE = 64
"""Datagrams that are read before other sockets have their turn."""


class ReportReceiver:
    """Posts what datagrams say; a thread keeps locks."""

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
        self._warned = False
        self._lent: queue.SimpleQueue[tuple[LentLock | None, list[int]]] = queue.SimpleQueue()
        self._keeper: Thread | None = None
        """Started with the first files."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))

    def read(self, receiver: Receiver) -> bool:
        """The datagrams that have come, `MAX_AT_ONCE` at most. Whether there may be more. Raises OSError."""
        for _ in range(MAX_AT_ONCE):
            try:
                datagram, lent, flags, _ = self.socket.recvmsg(
                    MAX_BYTES + 1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return False
            self._take(receiver, datagram, lent, flags)
        return True

    def _take(
        self, receiver: Receiver, datagram: bytes, lent: list[tuple[int, int, bytes]], flags: int
    ) -> None:
        descriptors = [number for _, _, raw in lent for number in array("i", raw)]
        if flags & socket.MSG_CTRUNC:
            self._drop("the lock of a checkpoint directory: this agent has no descriptors left")
        try:
            report = REPORTS.decode(datagram)
        except Invalid as error:
            self._drop("a report that does not decode: %s", error)
            report = None
        if descriptors or isinstance(report, LentLock):
            self._lent.put((report if isinstance(report, LentLock) else None, descriptors))
            self._start_keeper()
        if report is None or isinstance(report, LentLock):
            return
        if isinstance(report, ReplicationReport):
            self._post(partial(receiver.replicated, report))
        elif self._has_room():
            self._post(partial(receiver.reported, report, self._clock()))
        else:
            self._drop("reports: the agent is too busy")

    def _start_keeper(self) -> None:
        if self._keeper is None:
            self._keeper = Thread(self._keep_locks, "directory-locks")
            self._keeper.start()

    def _keep_locks(self) -> None:
        generation, run = 0, ""
        kept: dict[tuple[int, int], int] = {}
        while True:
            message, unneeded = self._lent.get()
            if message is not None and message.generation >= generation:
                generation, given = message.generation, unneeded
                unneeded = []
                if message.run != run:
                    unneeded, run, kept = list(kept.values()), message.run, {}
                for descriptor in given:
                    place = _place_of(descriptor)
                    if place is None or place in kept or len(kept) == MAX_LOCKS:
                        unneeded.append(descriptor)
                    else:
                        kept[place] = descriptor
            for descriptor in unneeded:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _drop(self, why: str, *details: object) -> None:
        self._count_dropped()
        if not self._warned:
            self._warned = True
            log.warning("dropping " + why + " (logged once; later ones are only counted)", *details)


def _place_of(descriptor: int) -> tuple[int, int] | None:
    """Device and inode; None where the file system has forgotten the file."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class RefusedSaves:
    """Of the newest generation that has reported: what an earlier one could not save is done again by the next."""

    def __init__(self) -> None:
        self._generation = 0
        self._saved: dict[tuple[int, str], int] = {}
        """The newest step that is on disk, by local rank and directory."""
        self._refused: dict[tuple[int, str], int] = {}
        """The newest that was refused since."""

    def add(self, report: SaveReport) -> None:
        """A report of any generation. Only those of a whole checkpoint on disk count."""
        if report.tier != "local" or report.generation < self._generation:
            return
        if report.generation > self._generation:
            self._generation, self._saved, self._refused = report.generation, {}, {}
        where, step = (report.local_rank, report.directory), report.step
        if report.result == "ok":
            self._saved[where] = max(step, self._saved.get(where, step))
            if self._refused.get(where, step + 1) <= step:
                del self._refused[where]
        elif where not in self._saved or step > self._saved[where]:
            # A step that is there already may be refused too: it does not grow, or its writer was told to leave it.
            self._refused[where] = max(step, self._refused.get(where, step))

    def lost_in(self, generation: int) -> str:
        """What of this generation, which has ended with success, is not on disk; empty: nothing that is known."""
        if generation != self._generation or not self._refused:
            return ""
        (_, directory), step = max(self._refused.items(), key=lambda one: one[1])
        place = f" in {directory}" if directory else ""
        return f"step {step} is NOT on disk{place}: its save was refused, a warning of its worker says why"
