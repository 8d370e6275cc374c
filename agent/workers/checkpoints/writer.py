"""The disk writer: a process of the agent that brings copies in memory to the disk while the workers train on.

`disk_writer` starts it through `shim`, so that it dies with the agent. Its standard input is a listening socket, over
which rank 0 sends orders (`worker/storage/disk/background_write.py`). An order outlives the rank 0 that gave it; its
outcome is sent to that rank 0, and to the agent as a report; before anything becomes visible the agent's commit fence
is asked whether the generation that ordered it is still the present one.

Orders are carried out one after the other: the disk is one. On the agent's `FinishWrites` it does what it has begun,
tries again what has failed, tells the agent over that connection what is not on disk yet (`UnsavedSteps`), and ends
when nothing is left that another try could help. The agent ends it when the time is over. It ignores SIGTERM: a
service manager sends that to all at once, and workers in their grace still save.

No torch here, nor anything else that takes long to import.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace

from ....codec import Invalid
from ....rendezvous.store.requests import RETRY
from ....threads import Thread
from ....worker.errors import CheckpointError, Fenced, SaveFailed
from ....worker.storage.disk.background_write import outcome_of, write_copy
from ....worker.storage.disk.checkpoint_files import CheckpointFiles
from ....worker.storage.disk.commit_permission import CommitPermission
from ....worker.storage.memory.slots import HeldSlot, Slots
from ....worker.wire.channel import receive, send
from ....worker.wire.messages import (
    MAX_BYTES,
    MAX_REASON_CHARS,
    WRITE_CANCELS,
    WRITE_ORDERS,
    FinishWrites,
    SaveReport,
    SaveResult,
    UnsavedStep,
    UnsavedSteps,
    WriteOrder,
    WriteOutcome,
    encode,
)
from ....worker.wire.run import Run
from ..processes.guard import IGNORED

ORDER_S = 5.0
"""How long an order may take to come, and its outcome to go."""

FAILURES = (CheckpointError, OSError, ValueError)
"""Of a write: of these only `SaveFailed` and OSError may be gone at the next try."""


def main(agent: str, reports: str) -> None:
    """Until `FinishWrites`, or the agent's end."""
    os.nice(10)  # training comes first
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    writer = _Writer(agent, reports)
    Thread(writer.work, "orders", lambda: os._exit(1)).start()
    listener = socket.socket(fileno=0)
    while True:
        connection, _ = listener.accept()
        writer.take(connection)


class _Writer:
    """One thread takes orders, and holds what they name; another carries them out in the order in which they came."""

    def __init__(self, agent: str, reports: str) -> None:
        self._questions = agent
        self._reports = reports
        self._orders: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        self._files: dict[tuple[str, int, str], CheckpointFiles] = {}
        self._lock = threading.Lock()
        self._unsaved: dict[str, tuple[WriteOrder, UnsavedStep]] = {}
        """By directory, the newest order, until it is done or its generation was fenced."""
        self._agent: socket.socket | None = None
        """Where the agent waits for the end."""

    def take(self, connection: socket.socket) -> None:
        try:
            order = receive(connection, WRITE_ORDERS, ORDER_S)
            if isinstance(order, FinishWrites):
                with self._lock:
                    self._agent = connection
                    self._send_unsaved()
                self._orders.put(None)
                return
        except (OSError, Invalid) as error:
            with contextlib.suppress(OSError):  # the agent's console stands still
                print(f"elastic-agent: an order to write a checkpoint is left: {error}", file=sys.stderr)
            connection.close()
            return
        with self._lock:
            self._unsaved[order.directory] = order, UnsavedStep(order.step, order.directory)
        self._orders.put(_Taken(order, connection, _hold(order), time.monotonic()))

    def work(self) -> None:
        while (taken := self._orders.get()) is not None:
            order = taken.order
            outcome = self._carry_out(taken)
            self._report(order, outcome, time.monotonic() - taken.at)
            try:
                send(taken.connection, outcome, ORDER_S)
            except OSError:
                pass  # the rank 0 that gave the order has ended
            taken.connection.close()
        attempt, rng = 0, random.Random()
        while failed := self._to_try_again():
            time.sleep(RETRY.wait_s(attempt, rng))
            attempt += 1
            for order in failed:
                self._try_again(order)
        os._exit(0)

    def _carry_out(self, taken: _Taken) -> WriteOutcome:
        order = taken.order
        try:
            size = self._write(order, taken.copy, taken.connection)
        except FAILURES as error:
            self._failed(order, error)
            return outcome_of(order.step, error, order.directory)
        self._settled(order)
        return WriteOutcome(order.step, size)

    def _to_try_again(self) -> list[WriteOrder]:
        with self._lock:
            return [order for order, left in self._unsaved.values() if not left.final]

    def _try_again(self, order: WriteOrder) -> None:
        """Without the one who gave it: no worker trains on, so that the slot still holds what it did, or never will."""
        at = time.monotonic()
        try:
            CommitPermission(self._questions, order.generation).check()
            if _is_on_disk(self._files_of(order), order):
                self._settled(order)
                return
            copy = _hold(order)
            if isinstance(copy, Exception):
                self._failed(order, None)
                return
            size = self._write(order, copy, None)
        except FAILURES as error:
            self._failed(order, error)
            return
        self._report(order, WriteOutcome(order.step, size), time.monotonic() - at)
        self._settled(order)

    def _write(
        self, order: WriteOrder, copy: tuple[Slots, HeldSlot] | Exception, connection: socket.socket | None
    ) -> int:
        """Its size. `connection` leads to the one who gave the order and may take it back. Raises `FAILURES`."""
        permission = CommitPermission(self._questions, order.generation)

        def may_change() -> None:
            permission.check()
            if connection is not None and _cancelled(connection):
                raise SaveFailed(f"step {order.step}: rank 0 no longer waits for the disk writer")

        if isinstance(copy, Exception):
            raise copy
        slots, held = copy
        with contextlib.closing(slots), held:
            if held.header.version != (order.copied_by, order.step):
                raise ValueError(f"slot {order.slot} holds step {held.header.step} by now")
            return write_copy(self._files_of(order), slots, held, order.generation, may_change).size

    def _failed(self, order: WriteOrder, error: Exception | None) -> None:
        """None: the copy is gone, and what was wrong before is why it was not written."""
        if isinstance(error, Fenced):  # others go on, and save what they do
            self._settled(order)
            return
        with self._lock:
            newest, unsaved = self._unsaved.get(order.directory, (None, None))
            if newest is order and unsaved is not None:
                retry = isinstance(error, SaveFailed | OSError)
                reason = (str(error) or repr(error))[:MAX_REASON_CHARS] if error else unsaved.reason
                self._unsaved[order.directory] = order, replace(unsaved, reason=reason, final=not retry)
                self._send_unsaved()

    def _settled(self, order: WriteOrder) -> None:
        with self._lock:
            newest, _ = self._unsaved.get(order.directory, (None, None))
            if newest is order:
                del self._unsaved[order.directory]
                self._send_unsaved()

    def _send_unsaved(self) -> None:
        """The lock is held."""
        if self._agent is not None:
            with contextlib.suppress(OSError):  # the agent no longer waits
                send(self._agent, UnsavedSteps(tuple(left for _, left in self._unsaved.values())), ORDER_S)

    def _files_of(self, order: WriteOrder) -> CheckpointFiles:
        """The same for all orders, since it knows what it wrote."""
        key = order.directory, order.keep, order.run
        files = self._files.get(key)
        if files is None:
            files = CheckpointFiles(order.directory, keep=order.keep, run=Run(order.run))
            self._files[key] = files
        files.trust(*order.good)
        return files

    def _report(self, order: WriteOrder, outcome: WriteOutcome, duration_s: float) -> None:
        result: SaveResult = "error" if outcome.error else "ok"
        report = SaveReport(order.generation, 0, order.step, result, duration_s, outcome.size)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as agent:
                agent.sendto(encode(report), self._reports)
        except OSError:
            pass  # the agent has too much to do, or is ending


@dataclass(frozen=True, slots=True)
class _Taken:
    order: WriteOrder
    connection: socket.socket
    copy: tuple[Slots, HeldSlot] | Exception
    at: float
    """Seconds, monotonic."""


def _hold(order: WriteOrder) -> tuple[Slots, HeldSlot] | Exception:
    """What it names; or why it cannot be had."""
    try:
        slots = Slots(order.memory, order.directory)
    except OSError as error:
        return error
    try:
        return slots, slots.hold(order.slot)
    except (OSError, ValueError) as error:
        slots.close()
        return error


def _is_on_disk(files: CheckpointFiles, order: WriteOrder) -> bool:
    """Whether this run has come as far there already: rank 0 may have written it itself."""
    newest = files.newest_manifest(lambda manifest: not files.claim.is_ours(manifest))
    return (
        newest is not None
        and files.claim.is_ours(newest)
        and (newest.generation, newest.step) >= (order.generation, order.step)
    )


def _cancelled(connection: socket.socket) -> bool:
    try:
        if not select.select([connection], [], [], 0)[0]:
            return False
        WRITE_CANCELS.decode(connection.recv(MAX_BYTES))
    except (OSError, Invalid):
        return False
    return True
