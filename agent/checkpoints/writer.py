"""The disk writer: a process of the agent that brings copies in memory to the disk while the workers train on.

`disk_writer` starts it through `shim`, so that it dies with the agent. Its standard input is a listening socket, over
which rank 0 sends its orders (see `worker/writes`). An order outlives the rank 0 that gave it. What becomes of one is
told to whoever gave it, and to the agent as a report; before anything becomes visible the agent's commit gate is
asked whether the generation that ordered it is still the present one.

Orders are carried out one after the other: the disk is one. On the agent's word `FINISH` it does what it has begun,
and ends. It hears no SIGTERM: a service manager sends that to all at once, and workers in their grace still save.

No torch here, nor anything else that takes long to import.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass

from ...worker.errors import CheckpointError, SaveFailed
from ...worker.files import CheckpointFiles
from ...worker.lines import MessageError, receive_line, send_line
from ...worker.permit import Permit
from ...worker.reports import SaveReport, SaveResult
from ...worker.reports import encode as encode_report
from ...worker.slots import Held, Slots
from ...worker.writes import CANCEL, Order, OrderError, Outcome, decode, encode, write_copy

FINISH = b"finish\n"
ORDER_S = 5.0
"""How long an order may take to come, and its outcome to go."""


def main(commits: str, reports: str) -> None:
    """Until `FINISH`, or the agent's end."""
    os.nice(10)  # training comes first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    writer = _Writer(commits, reports)
    threading.Thread(target=writer.work, name="orders", daemon=True).start()
    listener = socket.socket(fileno=0)
    while True:
        connection, _ = listener.accept()
        writer.take(connection)


class _Writer:
    """One thread takes orders, and holds what they name; another carries them out in the order in which they came."""

    def __init__(self, commits: str, reports: str) -> None:
        self._commits = commits
        self._reports = reports
        self._orders: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        self._files: dict[tuple[str, int], CheckpointFiles] = {}

    def take(self, connection: socket.socket) -> None:
        try:
            line = receive_line(connection, ORDER_S)
            if line == FINISH:
                self._orders.put(None)
                return
            order = decode(Order, line)
        except (OSError, MessageError, OrderError) as error:
            print(f"elastic-agent: an order to write a checkpoint is left: {error}", file=sys.stderr)
            connection.close()
            return
        self._orders.put(_Taken(order, connection, _hold(order), time.monotonic()))

    def work(self) -> None:
        while (taken := self._orders.get()) is not None:
            order = taken.order
            outcome = self._carry_out(taken)
            self._report(order, outcome, time.monotonic() - taken.at)
            try:
                send_line(taken.connection, encode(outcome), ORDER_S)
            except OSError:
                pass  # whoever gave the order has ended
            taken.connection.close()
        os._exit(0)

    def _carry_out(self, taken: _Taken) -> Outcome:
        order = taken.order
        permit = Permit(self._commits, order.generation)

        def may_change() -> None:
            permit.check()
            if _cancelled(taken.connection):
                raise SaveFailed(f"step {order.step}: rank 0 no longer waits for the disk writer")

        try:
            if isinstance(taken.copy, Exception):
                raise taken.copy
            slots, held = taken.copy
            with contextlib.closing(slots), held:
                if held.header.age != (order.copied_by, order.step):
                    raise ValueError(f"slot {order.slot} holds step {held.header.step} by now")
                files = self._files_of(order)
                manifest = write_copy(files, slots, held, order.generation, may_change)
                return Outcome(order.step, manifest.size)
        except (CheckpointError, OSError, ValueError) as error:
            return Outcome.of(order.step, error, order.directory)

    def _files_of(self, order: Order) -> CheckpointFiles:
        """The same for all orders, since it knows what it wrote."""
        key = order.directory, order.keep
        files = self._files.setdefault(key, CheckpointFiles(order.directory, keep=order.keep))
        files.trust(*order.good)
        return files

    def _report(self, order: Order, outcome: Outcome, duration_s: float) -> None:
        result: SaveResult = "error" if outcome.error else "ok"
        report = SaveReport(order.generation, 0, order.step, result, duration_s, outcome.size)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as agent:
                agent.sendto(encode_report(report), self._reports)
        except OSError:
            pass  # the agent has too much to do, or is ending


@dataclass(frozen=True, slots=True)
class _Taken:
    order: Order
    connection: socket.socket
    copy: tuple[Slots, Held] | Exception
    at: float
    """Seconds, monotonic."""


def _hold(order: Order) -> tuple[Slots, Held] | Exception:
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


def _cancelled(connection: socket.socket) -> bool:
    try:
        return bool(select.select([connection], [], [], 0)[0]) and connection.recv(len(CANCEL)) == CANCEL
    except OSError:
        return False
