"""Answers this node's workers: may rank 0 commit (I5)? Was this step the last one, while a planned change waits?

Both are read in the store at that moment, never from what a watch has delivered, in threads that may wait for it.

*May it commit* rests on the key `world`: a node that was frozen is the last to see what was decided without it. While
this node is a member of the world there, the next generation can begin in three ways only: this node has written that
it stopped its workers; its agent has ended, and its workers with it; its lease has ended. So a grant holds for as long
as the lease was proven before the store was asked, and no longer than LONGEST_GRANT_S.

*Was it the last step* is decided by `rendezvous.node.drain`. Where the store does not answer in time the worker goes
on, and asks again after its next step: the time of the drain ends that. Every answer that ends a worker is posted
before it is sent, so that the main loop knows why that worker ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ...codec import kind_of
from ...rendezvous.errors import RecordInvalid, StoreError
from ...rendezvous.node.drain import WHAT_STANDS, Answer, Ask, Beyond, End, GoOn, concerns, judge, written
from ...rendezvous.node.session import NodeSnapshot
from ...rendezvous.node.transactions import WriteStop
from ...rendezvous.records import WORLD_KEY, StopAt, World
from ...rendezvous.store.interface import Store
from ...threads import Thread
from ...worker.wire.messages import (
    MAX_REASON_CHARS,
    CommitAnswer,
    CommitGranted,
    CommitQuestion,
    CommitRefused,
    CommitUndecided,
    FromGuard,
    StepAnswer,
    StepEnded,
    StepStatus,
    Verdict,
)
from ..common.events import Event

log = logging.getLogger(__name__)

LONGEST_GRANT_S = 60.0
"""A lease may be long, or without end. A grant is used at once, and who comes later asks again."""

GIVES_UP_S = 3.0
"""After so long nothing is written any more: the worker that asked may be about to go on without an answer."""

PAUSE_S = 0.05
"""Between two questions to a store that gives no answer."""


class MessageReceiver(Protocol):
    """The supervisor: what the main loop does with workers' messages, as their links post them."""

    def guard_sent(self, generation: int, local_rank: int, message: FromGuard | None) -> None:
        """By a worker that takes part in just-in-time saves. None: it no longer does."""

    def worker_answered(self, generation: int, local_rank: int, step: int, answer: End | Beyond) -> None:
        """To its question after `step`, in a planned change."""

    def worker_kept(self, generation: int, local_rank: int) -> None:
        """One that was to end has kept the state after its last step, and ends now."""


def judge_commit(
    question: CommitQuestion, world: World | None, latest: NodeSnapshot, now: float
) -> CommitAnswer:
    """`world` is what the store held after `latest` was taken and before `now`.

    The phase does not matter. A generation that stops may still save, and one that the leaving host of the store
    has ended too: no other begins before this node's workers are gone.
    """
    if world is None:
        return CommitRefused("the rendezvous store holds no world")
    if world.generation > question.generation:
        return CommitRefused(f"generation {world.generation} has replaced it")
    if world.generation < question.generation:
        return CommitRefused(f"the rendezvous store has fallen back to generation {world.generation}")
    if world.member(latest.incarnation) is None:
        return CommitRefused("this node, which joined anew, is no member of it")
    left_s = latest.proven_until - now
    if left_s <= 0:
        return CommitUndecided("the rendezvous store does not confirm this node's lease")
    return CommitGranted(min(left_s, LONGEST_GRANT_S))


class WorkerAnswers:
    """`commit` and `step` may wait for the store."""

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
        """Questions after a step that are open, by generation and local rank."""
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- may it commit

    def commit(self, question: CommitQuestion) -> CommitAnswer:
        answer = self._commit(question)
        if not isinstance(answer, CommitGranted):
            word = kind_of(type(answer)).removeprefix("commit_")
            log.warning("generation %d may not commit: %s: %s", question.generation, word, answer.reason)
        return answer

    def _commit(self, question: CommitQuestion) -> CommitAnswer:
        # First, and only then the read: a lease that ended while the store was asked is not mistaken for a new one.
        latest = self._latest()
        try:
            entries = self._store.read((WORLD_KEY,)).entries
            world = next((World.from_json(entry.value) for entry in entries), None)
        except (StoreError, RecordInvalid) as error:
            return CommitUndecided(str(error)[:MAX_REASON_CHARS])
        return judge_commit(question, world, latest, self._clock())

    # ---------------------------------------------------------------- was it the last step

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
                in_time = self._clock() < give_up_at
                if in_time and self._store.transact(verdict.compares, verdict.writes).succeeded:
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

    def step(self, word: StepEnded, receiver: MessageReceiver) -> StepAnswer:
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
