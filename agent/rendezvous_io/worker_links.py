"""The agent's ends of all that ties it to its workers: what they send, the answers, and their pages.

What they send (`worker/wire/messages.py`) is read in the io thread.

There are two sockets, in a folder that only this user can enter. On the stream socket a worker either asks one question
over a connection of its own, and is answered once, in a thread of its own: the store may have to be asked. Or it guards
its last step: then its connection lasts as long as it does, its messages are posted, and the main loop answers them.

Datagrams are reports, and hints: they wait here until the main loop turns, which none of them wakes. One that does not
decode is counted and dropped, and so is one for which there is no room: training never waits for us. With one kind
comes an open file: the lock of a checkpoint directory (see `worker/storage/disk/ownership.py`), which stays locked
between two generations, until this process ends or the job begins another run. A thread of its own has these files,
because to close one may take as long as a disk does not answer.

`RefusedSaves` remembers which saves the disk has refused, so that a job whose last state is on no disk does not end
with success. The disk writer says by itself what it has not written (`UnsavedSteps`). A save that a worker writes
while training waits, as without copies in memory, is known from that worker's reports alone. One Checkpointer is told
from another by its directory, and by the rank that reports.

The pages (`WorkerPages`) are made before a generation starts, and read as the main loop turns. Reading costs some loads
from memory and nothing on the worker's side: there is no event for a step. Pages outlive their workers, so that what
one did last is there when it has exited. `PaceWatch` reports how fast this node's ranks work: their own times for a
step, every `OFTEN_S`. In a job of many nodes that is rarer, so that the coordinator gets at most `REPORTS_PER_S`
reports from all of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ...codec import Invalid, kind_of
from ...health.stragglers import Paces
from ...threads import Thread
from ...worker.wire.channel import Lines
from ...worker.wire.channel import send as send_answer
from ...worker.wire.environment import WorkerEnv
from ...worker.wire.messages import (
    FROM_WORKERS,
    MAX_BYTES,
    REPORTS,
    CommitAnswer,
    CommitQuestion,
    FromGuard,
    Guarding,
    LentLock,
    Question,
    ReplicationReport,
    Report,
    SaveReport,
    StepAnswer,
    ToGuard,
    encode,
)
from ...worker.wire.shared_progress import (
    ALL_SIGNALLED,
    LEAVES_SIGTERM,
    PENDING,
    SCRIPT_AT,
    Reading,
    SharedProgress,
)
from ..common.events import Event, IoThread
from .worker_answers import MessageReceiver, WorkerAnswers

log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.1
"""The rest of the listener after this process ran out of file descriptors; the connection waits."""

ANSWER_S = 2.0
"""How long a worker may take to take its answer."""

BACKLOG = 512

MAX_WAITING_REPORTS = 10_000
"""While the main loop has too much to do."""

MAX_LOCKS = 64
"""Checkpoint directories of one job whose locks are kept: each is a descriptor of this process, of which a script that
saves to a new directory now and then must not take them all."""


class WorkerLinks:
    """`reports` and `send` are for the main loop."""

    def __init__(
        self,
        env: WorkerEnv,
        answers: WorkerAnswers,
        io: IoThread,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        count_dropped: Callable[[], None],
    ) -> None:
        self._answers = answers
        self._io, self._post, self._clock = io, post, clock
        self._count_dropped = count_dropped
        self._warned = False
        """That reports are dropped."""
        self._locks = _LentLocks()
        self._waiting: deque[tuple[Report | ReplicationReport, float]] = deque()
        self._receiver: MessageReceiver | None = None
        """Since `start`."""
        self._clients: dict[socket.socket, _WorkerClient] = {}
        """Those that have not asked yet, and those that guard. For the io thread."""
        self._guards: dict[tuple[int, int], socket.socket] = {}
        """By generation and local rank. For the io thread."""
        self._out_of_descriptors = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(env.socket)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.bind(env.reports)

    def start(self, receiver: MessageReceiver) -> None:
        """`receiver` is told what workers send, in the main loop."""
        self._receiver = receiver
        self._io.watch(self._reports.fileno(), self._read_report)
        self._listen()

    def close(self) -> None:
        if not self._io.post(self._end):
            self._end()

    def reports(self) -> Iterator[tuple[Report | ReplicationReport, float]]:
        """Those that have come since the last call, each with the instant when it did."""
        while self._waiting:
            yield self._waiting.popleft()

    def send(self, generation: int, local_rank: int, message: ToGuard) -> None:
        self._io.post(partial(self._send, (generation, local_rank), message))

    # ---------------------------------------------------------------- reading

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:  # it was not closed while it rested
            self._io.watch(self._listener.fileno(), self._accept)

    def _end(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        for ours in (self._listener, self._reports):
            self._io.forget(ours.fileno())
            ours.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if not self._out_of_descriptors:
                log.warning("cannot accept a worker's connection: %s", error)
            self._out_of_descriptors = True
            self._io.forget(self._listener.fileno())
            self._io.later(ACCEPT_PAUSE_S, self._listen)
            return
        self._out_of_descriptors = False
        client = self._clients[connection] = _WorkerClient(connection)
        self._io.watch(connection.fileno(), partial(self._read, client))

    def _read(self, client: _WorkerClient) -> None:
        try:
            data = client.connection.recv(MAX_BYTES, socket.MSG_DONTWAIT)
            for message in client.lines.add(data):
                if isinstance(message, Question):
                    self._forget(client)
                    answer = partial(self._answer, client.connection, message)
                    Thread(answer, "worker-answer", client.connection.close).start()
                    return
                self._pass_on(client, message)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""  # it was killed with words of ours unread
        except (OSError, Invalid) as error:
            log.warning("a worker's connection is closed: %s", error)
            data = b""
        if not data:
            self._drop(client)

    def _pass_on(self, client: _WorkerClient, message: FromGuard) -> None:
        if isinstance(message, Guarding):
            if client.guards is not None:
                raise Invalid("a second Guarding from a worker")
            client.guards = message.generation, message.local_rank
            self._guards[client.guards] = client.connection
        if client.guards is None:
            raise Invalid(f"{kind_of(type(message))} from a worker that has sent no Guarding")
        self._post_of_guard(client.guards, message)

    def _post_of_guard(self, guard: tuple[int, int], message: FromGuard | None) -> None:
        assert self._receiver is not None, "no worker connects before `start`"
        self._post(partial(self._receiver.guard_sent, *guard, message))

    def _send(self, guard: tuple[int, int], message: ToGuard) -> None:
        connection = self._guards.get(guard)
        if connection is not None:
            try:
                connection.send(encode(message), socket.MSG_DONTWAIT)
            except OSError as error:
                log.debug("local rank %d does not take %s: %s", guard[1], kind_of(type(message)), error)

    def _forget(self, client: _WorkerClient) -> None:
        self._io.forget(client.connection.fileno())
        del self._clients[client.connection]
        if client.guards is not None and self._guards.get(client.guards) is client.connection:
            del self._guards[client.guards]
            self._post_of_guard(client.guards, None)

    def _drop(self, client: _WorkerClient) -> None:
        self._forget(client)
        client.connection.close()

    def _read_report(self) -> None:
        """One, as other sockets have their turn, too. Raises OSError."""
        try:
            datagram, lent, flags, _ = self._reports.recvmsg(
                MAX_BYTES + 1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        descriptors = [number for _, _, raw in lent for number in array("i", raw)]
        if flags & socket.MSG_CTRUNC:
            self._drop_report("the lock of a checkpoint directory: this agent has no descriptors left")
        try:
            report = REPORTS.decode(datagram)
        except Invalid as error:
            self._drop_report("a report that does not decode: %s", error)
            report = None
        if descriptors or isinstance(report, LentLock):
            self._locks.put(report if isinstance(report, LentLock) else None, descriptors)
        if report is None or isinstance(report, LentLock):
            return
        if len(self._waiting) < MAX_WAITING_REPORTS:
            self._waiting.append((report, self._clock()))
        else:
            self._drop_report("reports: the agent is too busy")

    def _drop_report(self, why: str, *details: object) -> None:
        self._count_dropped()
        if not self._warned:
            self._warned = True
            log.warning("dropping " + why + " (logged once; later ones are only counted)", *details)

    # ---------------------------------------------------------------- answering

    def _answer(self, connection: socket.socket, question: Question) -> None:
        answer: CommitAnswer | StepAnswer
        with connection:
            if isinstance(question, CommitQuestion):
                answer = self._answers.commit(question)
            else:
                assert self._receiver is not None, "no worker asks before `start`"
                answer = self._answers.step(question, self._receiver)
            try:
                send_answer(connection, answer, ANSWER_S)
            except OSError as error:
                log.warning("a worker does not take its answer to %s: %s", question, error)


class _WorkerClient:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Lines(FROM_WORKERS)
        self.guards: tuple[int, int] | None = None
        """Its generation and local rank, of one that guards its last step."""


class _LentLocks:
    """Of checkpoint directories, in a thread that starts with the first."""

    def __init__(self) -> None:
        self._lent: queue.SimpleQueue[tuple[LentLock | None, list[int]]] = queue.SimpleQueue()
        self._thread: Thread | None = None

    def put(self, message: LentLock | None, descriptors: list[int]) -> None:
        self._lent.put((message, descriptors))
        if self._thread is None:
            self._thread = Thread(self._keep, "directory-locks")
            self._thread.start()

    def _keep(self) -> None:
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
        """The newest that was refused."""

    def add(self, report: SaveReport) -> None:
        """A report of any generation. Only those of a whole checkpoint on disk count."""
        if report.tier != "local" or report.generation < self._generation:
            return
        if report.generation > self._generation:
            self._generation, self._saved, self._refused = report.generation, {}, {}
        newest, where = (
            self._saved if report.result == "ok" else self._refused,
            (report.local_rank, report.directory),
        )
        newest[where] = max(report.step, newest.get(where, report.step))

    def lost_in(self, generation: int) -> str:
        """What of this generation, which has ended with success, is not on disk; empty: nothing that is known."""
        lost = [
            (step, where[1]) for where, step in self._refused.items() if step > self._saved.get(where, -1)
        ]
        if generation != self._generation or not lost:
            return ""
        step, directory = max(lost)
        place = f" in {directory}" if directory else ""
        return f"step {step} is NOT on disk{place}: its save was refused, a warning of its worker says why"


# --- Pages


class WorkerPages:
    """Those of one generation's workers on this node, by local rank. For the main thread."""

    def __init__(self, generation: int, *, all_signalled: bool = False) -> None:
        """`all_signalled`: workers get the signals of the agent's scheduler, too."""
        self._generation = generation
        self._all_signalled = all_signalled
        self.by_rank: dict[int, SharedProgress] = {}
        """By local rank."""

    def make(self, local_rank: int) -> str:
        """The page of a worker that is to be started; returns its path, for `WorkerEnv.page`. Raises OSError."""
        page = self.by_rank[local_rank] = SharedProgress.make(self._generation)
        page.words[ALL_SIGNALLED] = self._all_signalled
        return page.path

    def process_made(self, local_rank: int, at: float) -> None:
        """At `at` this worker's process began. When its script begins is not known."""
        self.by_rank[local_rank].words[SCRIPT_AT] = round(at * 1e9)

    def read(self) -> dict[int, Reading]:
        return {local_rank: page.read() for local_rank, page in self.by_rank.items()}

    def newest_step(self) -> int | None:
        """That any of them has finished, and None before the first."""
        return max(
            (reading.step for reading in self.read().values() if reading.step is not None), default=None
        )

    def leave_sigterm(self) -> frozenset[int]:
        """The local ranks of those that a SIGTERM does not end, and only because they leave it to the agent."""
        return frozenset(rank for rank, page in self.by_rank.items() if page.words[LEAVES_SIGTERM])

    def raise_flags(self) -> None:
        """A planned change waits for these workers."""
        for page in self.by_rank.values():
            page.words[PENDING] = 1

    def close(self) -> None:
        """The generation is over."""
        for page in self.by_rank.values():
            page.close()
        self.by_rank.clear()


REPORTS_PER_S = 20
OFTEN_S = 5.0
"""Each report is a write to the store, of which all nodes hear."""
WARM_UP = 3
"""The first steps of a generation, which load, compile and tune, are ignored."""
CUT_AT = 2.0
"""In medians of the steps of one look: a longer step, such as one with a checkpoint, counts as this long."""


class PaceWatch:
    """The reports of one generation. For the main thread, which no report wakes; `now` is monotonic."""

    def __init__(self, pages: WorkerPages, generation: int, members: int) -> None:
        self._pages = pages
        self._generation = generation
        self._often_s = max(OFTEN_S, members / REPORTS_PER_S)
        self._due_at = -math.inf
        """When to look next; once that is past, the next turn after a step looks."""
        self._read: dict[int, int] = {}
        """By local rank: how many steps were timed at the newest look."""
        self._looked: tuple[int, float] | None = None
        """The number of timed steps of the first rank at the newest look, and the instant of its newest step."""

    def turn(self, now: float) -> Paces | None:
        """The report that is due now, if any."""
        if now < self._due_at:
            return None
        times = {
            rank: page.own_times(self._read.get(rank, WARM_UP)) for rank, page in self._pages.by_rank.items()
        }
        if not times or not all(own for _, own in times.values()):
            return None
        self._due_at = now + self._often_s
        self._read = {rank: count for rank, (count, _) in times.items()}
        before, self._looked = self._looked, self._newest()
        if before is None or self._looked is None or self._looked[0] <= before[0]:
            return None
        step_s = (self._looked[1] - before[1]) / (self._looked[0] - before[0])
        return Paces(
            self._generation,
            timed=min(self._read.values()),
            step_us=max(0, round(step_s * 1e6)),
            own_us=tuple(pace_us(own) for _, (_, own) in sorted(times.items())),
        )

    def _newest(self) -> tuple[int, float] | None:
        first = min(self._read)
        stepped_at = self._pages.by_rank[first].read().stepped_at
        return (self._read[first], stepped_at) if stepped_at is not None else None


def pace_us(own_ns: Sequence[int]) -> int:
    """The mean time of a step, in which no step counts for more than `CUT_AT` medians.

    >>> pace_us([1_000_000] * 9 + [50_000_000])
    1100
    """
    most = CUT_AT * sorted(own_ns)[(len(own_ns) - 1) // 2]
    return round(sum(min(own, most) for own in own_ns) / len(own_ns) / 1000)
