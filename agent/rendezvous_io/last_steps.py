"""Answers this node's workers at the end of a step while a planned change waits: was that the last one?

What is answered is decided by `rendezvous.node.drain`; here the questions meet the store, in threads that may wait for
it. The store itself is asked for each answer, never what a watch has delivered. Where it does not answer in time the
worker goes on, and asks again after its next step: the time of the drain ends that.

Every answer that ends a worker is posted before it is sent, so that the main loop knows why that worker ends.

`Receiver` is what the main loop does with the messages of workers: the calls that the links post.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ...rendezvous.errors import RecordInvalid, StoreError
from ...rendezvous.node.drain import WHAT_STANDS, Answer, Ask, Beyond, End, GoOn, concerns, judge, written
from ...rendezvous.node.snapshot import NodeSnapshot
from ...rendezvous.node.transactions import WriteStop
from ...rendezvous.records import StopAt
from ...rendezvous.store.interface import Store
from ...threads import Thread
from ...worker.wire.messages import (
    FromGuard,
    ReplicationReport,
    Report,
    StepAnswer,
    StepEnded,
    StepStatus,
    Verdict,
)
from ..common.events import Event

log = logging.getLogger(__name__)

GIVES_UP_S = 3.0
"""After so long nothing is written any more: the worker that asked may be about to go on without an answer."""

PAUSE_S = 0.05
"""Between two questions to a store that gives no answer."""


class LastSteps:
    def __init__(
        self,
        store: Store,
        latest: Callable[[], NodeSnapshot],
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._latest = latest
        self._post = post
        self._clock = clock
        self._asking: dict[tuple[int, int], int] = {}
        """Questions that are open, by generation and local rank."""
        self._lock = threading.Lock()

    def asks(self, generation: int, local_rank: int) -> bool:
        """This worker waits for an answer now."""
        return self._asking.get((generation, local_rank), 0) > 0

    def read_stop(self, generation: int, then: Callable[[int, StopAt | None], object]) -> None:
        """Find out where the workers of this generation are to end; `then` is posted. None: the store does not have it,
        or did not answer."""
        unknown = partial(then, generation, None)
        work = partial(self._read_stop, generation, then)
        Thread(work, "drain-look", partial(self._post, unknown)).start()

    def judge(self, ask: Ask) -> Answer:
        """From the store, or GoOn when that gives no answer."""
        give_up_at = self._clock() + GIVES_UP_S
        latest = self._latest()
        while concerns(ask, latest) and self._clock() < give_up_at:
            try:
                verdict = judge(ask, latest, next(iter(self._store.read(WHAT_STANDS.scopes).entries), None))
                if not isinstance(verdict, WriteStop):
                    return verdict
                if self._clock() < give_up_at and self._write(verdict):
                    return written(ask, verdict)
            except (StoreError, RecordInvalid) as error:
                log.warning(
                    "rank %d asks whether step %d was its last; the store gave no answer: %s",
                    ask.rank,
                    ask.step,
                    error,
                )
                threading.Event().wait(PAUSE_S)
            latest = self._latest()
        return GoOn()

    def _write(self, verdict: WriteStop) -> bool:
        return self._store.transact(verdict.compares, verdict.writes).succeeded

    def answer(self, word: StepEnded, receiver: Receiver) -> StepAnswer:
        if word.status is StepStatus.KEPT:
            self._post(partial(receiver.worker_kept, word.generation, word.local_rank))
            return StepAnswer(Verdict.GO_ON, leaves=False)
        key = word.generation, word.local_rank
        self._count(key, 1)
        try:
            answer = self.judge(Ask(word.generation, word.rank, word.step, word.status is StepStatus.PAUSING))
            if not isinstance(answer, GoOn):
                ended = partial(receiver.worker_answered, word.generation, word.local_rank, word.step, answer)
                self._post(ended)
        finally:
            self._count(key, -1)
        return StepAnswer(_verdict(answer), self._latest().leaving)

    def _count(self, key: tuple[int, int], by: int) -> None:
        with self._lock:
            self._asking[key] = self._asking.get(key, 0) + by
            if not self._asking[key]:
                del self._asking[key]

    def _read_stop(self, generation: int, then: Callable[[int, StopAt | None], object]) -> None:
        stop: StopAt | None = None
        try:
            entries = self._store.read(WHAT_STANDS.scopes).entries
            stop = next((StopAt.from_json(entry.value) for entry in entries), None)
        except (StoreError, RecordInvalid) as error:
            log.warning("where the workers of generation %d are to end is not known: %s", generation, error)
        self._post(partial(then, generation, stop))


def _verdict(answer: Answer) -> Verdict:
    if isinstance(answer, End):
        return Verdict.END_ALONE if answer.alone else Verdict.END
    return Verdict.GO_ON


class Receiver(Protocol):
    """The supervisor. All of it is called in the main loop."""

    def reported(self, report: Report, at: float) -> None:
        """A worker's report, and when it was received."""

    def replicated(self, report: ReplicationReport) -> None:
        """What the memory server says of the replicas."""

    def guard_sent(self, generation: int, local_rank: int, message: FromGuard | None) -> None:
        """A message of a worker that takes part in just-in-time saves. None: it no longer does."""

    def worker_answered(self, generation: int, local_rank: int, step: int, answer: End | Beyond) -> None:
        """A worker that asked after `step` whether a planned change lets it go on got this answer."""

    def worker_kept(self, generation: int, local_rank: int) -> None:
        """A worker that was to end has kept the state after its last step, and ends now."""
