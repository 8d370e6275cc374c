"""The disk writer: a process of the agent that brings copies in memory to the disk while the workers train on.

`processes` starts it through `shim`, so that it dies with the agent. Its standard input is a listening socket, over
which workers send orders (`worker/storage/disk/async_save.py`). An order outlives the rank that gave it; its outcome is
sent to that rank, and to the agent as a report; before anything becomes visible the agent's commit fence is asked
whether the generation that ordered it is still the present one.

What is to be written is written one after the other: the disk is one. Each rank of this node that has a part of a state
orders it; where rank 0 is, a thread of its own waits for the parts of all nodes and commits. On the agent's
`FinishWrites` the process does what it has begun, tries again what has failed, tells the agent over that connection
what is not on disk yet (`UnsavedSteps`), and ends when nothing is left that another try could help. The agent ends it
when the time is over. It ignores SIGTERM: a service manager sends that to all at once, and workers in their grace still
save.

No torch here, nor anything else that takes long to import.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import select
import socket
import threading
import time
from dataclasses import dataclass, field, replace

from ...codec import Invalid
from ...rendezvous.node.transactions import RETRY
from ...threads import Thread
from ...worker.errors import CheckpointError, Fenced, SaveFailed
from ...worker.storage.disk.checkpoint_files import CheckpointFiles
from ...worker.storage.disk.commit import commit
from ...worker.storage.disk.commit_permission import CommitPermission
from ...worker.storage.disk.parts import Part, outcome_of, refuse_part, write_held
from ...worker.storage.memory.slot_folders import SlotFolder
from ...worker.storage.memory.slots import HeldSlot, Slots
from ...worker.wire.channel import receive, send
from ...worker.wire.environment import Run
from ...worker.wire.messages import (
    MAX_BYTES,
    MAX_REASON_CHARS,
    MOST_DIRECTORY_CHARS,
    WRITE_CANCELS,
    WRITE_ORDERS,
    CommitOrder,
    FinishWrites,
    SaveReport,
    SaveResult,
    ShardOrder,
    Tier,
    UnsavedStep,
    UnsavedSteps,
    WriteOutcome,
    encode,
)
from ..workers.processes.proc import say

ORDER_S = 5.0
"""How long an order may take to come, and its outcome to go."""

COMMIT_AGAIN_S = 1.0
"""How long a commit that is tried again waits for parts: those of this node are tried again in between."""

MAX_METADATA_BYTES = 1 << 30

Order = ShardOrder | CommitOrder

FAILURES = (CheckpointError, OSError, ValueError)
"""Of a write: of these only `SaveFailed` and OSError may be gone at the next try."""


def main(agent: str, reports: str) -> None:
    """Until `FinishWrites`, or the agent's end."""
    os.nice(10)  # training comes first
    writer = _Writer(agent, reports)
    Thread(writer.work, "orders", lambda: os._exit(1)).start()
    Thread(writer.commit, "commits", lambda: os._exit(1)).start()
    listener = socket.socket(fileno=0)
    while True:
        connection, _ = listener.accept()
        writer.take(connection)


class _Writer:
    """One thread takes orders, and holds what they name; others carry them out in the order in which they came."""

    def __init__(self, agent: str, reports: str) -> None:
        self._questions = agent
        self._reports = reports
        self._orders: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._commits: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._committed = threading.Event()
        """All commits that were ordered have come to an end, and no other is to come."""
        self._part_written = threading.Event()
        self._files: dict[tuple[str, int, str], CheckpointFiles] = {}
        self._lock = threading.Lock()
        self._unsaved: dict[tuple[str, int | None], tuple[_Task, UnsavedStep]] = {}
        """By directory, and rank if it is its part, the newest order, until it is done or its generation was fenced."""
        self._agent: socket.socket | None = None
        """Where the agent waits for the end."""

    def take(self, connection: socket.socket) -> None:
        files: list[int] = []
        try:
            connection.settimeout(ORDER_S)
            if not connection.recv(1, socket.MSG_PEEK):  # a rank looks whether this process stands still
                connection.close()
                return
            order = receive(connection, WRITE_ORDERS, ORDER_S, files)
            if isinstance(order, FinishWrites):
                with self._lock:
                    self._agent = connection
                    self._send_unsaved()
                self._orders.put(None)
                self._commits.put(None)
                return
            metadata = _content(files) if isinstance(order, CommitOrder) else b""
        except (OSError, Invalid) as error:
            say(f"an order to write a checkpoint is left: {error}")
            connection.close()
            return
        finally:
            for descriptor in files:
                os.close(descriptor)
        is_commit = isinstance(order, CommitOrder)
        task = _Task(order, metadata, connection, None if isinstance(order, CommitOrder) else _hold(order))
        with self._lock:
            self._unsaved[_key(order)] = task, UnsavedStep(order.step, order.directory, rank=_key(order)[1])
        (self._commits if is_commit else self._orders).put(task)

    def work(self) -> None:
        self._carry_out_all(self._orders)
        self._committed.wait()
        attempt, rng = 0, random.Random()
        while failed := self._to_try_again():
            time.sleep(RETRY.wait_s(attempt, rng))
            attempt += 1
            for task in failed:
                self._try_again(task)
        os._exit(0)

    def commit(self) -> None:
        self._carry_out_all(self._commits)
        self._committed.set()

    def _carry_out_all(self, orders: queue.SimpleQueue[_Task | None]) -> None:
        """Until there are no more."""
        while (task := orders.get()) is not None:
            outcome = self._carry_out(task)
            self._report(task.order, outcome, time.monotonic() - task.at)
            assert task.connection is not None
            with contextlib.suppress(OSError):  # the rank that gave the order has ended
                send(task.connection, outcome, ORDER_S)
            task.connection.close()

    def _carry_out(self, task: _Task) -> WriteOutcome:
        order = task.order
        try:
            size = self._write(task)
        except _TakenBack as error:
            self._failed(task, error)
            return WriteOutcome(order.step, error=SaveFailed.__name__, reason=str(error))
        except FAILURES as error:
            if isinstance(order, ShardOrder):
                refuse_part(self._files_of(order), order.attempt, order.rank, error)
                self._part_written.set()
            self._failed(task, error)
            return outcome_of(order.step, error, order.directory)
        self._settled(task)
        return WriteOutcome(order.step, size)

    def _to_try_again(self) -> list[_Task]:
        """Parts first, which a commit of this node waits for."""
        with self._lock:
            failed = [task for task, left in self._unsaved.values() if not left.final]
        return sorted(failed, key=lambda task: isinstance(task.order, CommitOrder))

    def _try_again(self, task: _Task) -> None:
        """Without the one who gave it: no worker trains on, so that the slot still holds what it did, or never will."""
        at, order = time.monotonic(), task.order
        try:
            CommitPermission(self._questions, order.generation).check()
            if _is_on_disk(self._files_of(order), order):
                self._report(order, WriteOutcome(order.step, 0), time.monotonic() - at)
                self._settled(task)
                return
            if isinstance(order, CommitOrder):
                soon = replace(order, within_s=min(order.within_s, COMMIT_AGAIN_S))
                size = self._write(replace(task, order=soon, connection=None))
            else:
                copy = _hold(order)
                if isinstance(copy, Exception):
                    self._failed(task, None)
                    return
                size = self._write(replace(task, copy=copy, connection=None))
        except FAILURES as error:
            self._failed(task, error)
            return
        self._report(order, WriteOutcome(order.step, size), time.monotonic() - at)
        self._settled(task)

    def _write(self, task: _Task) -> int:
        """Its size. Raises `FAILURES`."""
        order, copy, connection = task.order, task.copy, task.connection
        permission = CommitPermission(self._questions, order.generation)

        def may_change() -> None:
            permission.check()
            if connection is not None and _cancelled(connection):
                raise _TakenBack(f"step {order.step}: its worker no longer waits for the disk writer")

        files = self._files_of(order)
        if isinstance(order, CommitOrder):
            return commit(files, order, task.metadata, may_change, sleep=self._await_part).size
        assert copy is not None
        if isinstance(copy, Exception):
            raise copy
        slots, held = copy
        with contextlib.closing(slots), held:
            if held.header.version != (order.copied_by, order.step):
                raise ValueError(f"slot {order.slot} holds step {held.header.step} by now")
            part = Part(order.attempt, order.generation, order.twin_of)
            size = write_held(files, part, slots, held, may_change)
        self._part_written.set()
        return size

    def _await_part(self, within_s: float) -> None:
        """Between two looks for parts: those of other nodes come without a word."""
        self._part_written.wait(within_s)
        self._part_written.clear()

    def _failed(self, task: _Task, error: Exception | None) -> None:
        """None: the copy is gone, and what was wrong before is why it was not written."""
        if isinstance(error, Fenced):  # others go on, and save what they do
            self._settled(task)
            return
        key = _key(task.order)
        with self._lock:
            newest, unsaved = self._unsaved.get(key, (None, None))
            if newest is task and unsaved is not None:
                retry = isinstance(error, SaveFailed | OSError)
                reason = (str(error) or repr(error))[:MAX_REASON_CHARS] if error else unsaved.reason
                self._unsaved[key] = task, replace(unsaved, reason=reason, final=not retry)
                self._send_unsaved()

    def _settled(self, task: _Task) -> None:
        key = _key(task.order)
        with self._lock:
            newest, _ = self._unsaved.get(key, (None, None))
            if newest is task:
                del self._unsaved[key]
                self._send_unsaved()

    def _send_unsaved(self) -> None:
        """The lock is held."""
        if self._agent is not None:
            with contextlib.suppress(OSError):  # the agent no longer waits
                send(self._agent, UnsavedSteps(tuple(left for _, left in self._unsaved.values())), ORDER_S)

    def _files_of(self, order: Order) -> CheckpointFiles:
        """The same for all orders, since it knows what it wrote. One who writes a part keeps and drops nothing."""
        keep = 0 if isinstance(order, ShardOrder) else order.keep
        key = order.directory, keep, order.run
        files = self._files.get(key)
        if files is None:
            files = CheckpointFiles(order.directory, keep=max(1, keep), run=Run(order.run))
            self._files[key] = files
        if not isinstance(order, ShardOrder):
            files.trust(*order.good)
            files.claim.bad_steps = set(order.given_up)
        return files

    def _report(self, order: Order, outcome: WriteOutcome, duration_s: float) -> None:
        result: SaveResult = "error" if outcome.error else "ok"
        tier: Tier = "part" if isinstance(order, ShardOrder) else "local"
        report = SaveReport(
            order.generation,
            _local_rank(order),
            order.step,
            result,
            duration_s,
            outcome.size,
            tier,
            directory=order.directory[-MOST_DIRECTORY_CHARS:],
        )
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as agent:
                agent.sendto(encode(report), self._reports)
        except OSError:
            pass  # the agent has too much to do, or is ending


class _TakenBack(SaveFailed):
    """By the worker, which writes by itself what it has ordered."""


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """One order, with DCP's index if it is for a commit."""

    order: Order
    metadata: bytes
    connection: socket.socket | None
    """To the one who gave it, who may take it back; None: it is tried again."""
    copy: tuple[Slots, HeldSlot] | Exception | None
    """That is to be written, or why it cannot be had; None: the order is for a commit."""
    at: float = field(default_factory=time.monotonic)
    """When it came, seconds, monotonic."""


def _key(order: Order) -> tuple[str, int | None]:
    return order.directory, order.rank if isinstance(order, ShardOrder) else None


def _local_rank(order: Order) -> int:
    folder = SlotFolder.parse(order.folder) if isinstance(order, ShardOrder) else None
    return folder.local_rank or 0 if folder is not None else 0


def _content(files: list[int]) -> bytes:
    """Of the file that has come with an order. Raises OSError, Invalid."""
    if not files:
        raise Invalid("a commit_order without DCP's index")
    size = os.fstat(files[0]).st_size
    if size > MAX_METADATA_BYTES:
        raise Invalid(f"an index of {size} bytes, at most {MAX_METADATA_BYTES} are taken")
    return os.pread(files[0], size, 0)


def _hold(order: ShardOrder) -> tuple[Slots, HeldSlot] | Exception:
    """What it names; or why it cannot be had."""
    folder = SlotFolder.parse(order.folder)
    if folder is None:
        return Invalid(f"shard_order.folder is {order.folder!r}, which has no slots")
    try:
        slots = Slots(order.memory, folder, create=False)
    except OSError as error:
        return error
    try:
        return slots, slots.hold(order.slot)
    except (OSError, ValueError) as error:
        slots.close()
        return error


def _is_on_disk(files: CheckpointFiles, order: Order) -> bool:
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
