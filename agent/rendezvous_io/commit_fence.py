"""Answers this node's rank 0 before it commits: is its generation still the present one (I5)?

The answer rests on the key `world` as it stands in the store at that moment, never on what a watch has delivered: a
node that was frozen is the last to see what was decided without it. While this node is a member of the world there, the
next generation can begin in three ways only: this node has written that it stopped its workers; its agent has ended,
and its workers with it; its lease has ended. So a grant holds for as long as the lease was proven before the store was
asked, and no longer than LONGEST_GRANT_S.

`judge` decides. `CommitFence` brings it question and world, in threads that may wait for the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...codec import kind_of
from ...rendezvous.errors import RecordInvalid, StoreError
from ...rendezvous.node.snapshot import NodeSnapshot
from ...rendezvous.records import WORLD_KEY, World
from ...rendezvous.store.interface import Store
from ...worker.wire.messages import (
    MAX_REASON_CHARS,
    CommitAnswer,
    CommitGranted,
    CommitQuestion,
    CommitRefused,
    CommitUndecided,
)

log = logging.getLogger(__name__)

LONGEST_GRANT_S = 60.0
"""A lease may be long, or without end. A grant is used at once, and who comes later asks again."""


def judge(question: CommitQuestion, world: World | None, latest: NodeSnapshot, now: float) -> CommitAnswer:
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


class CommitFence:
    """`answer` may wait for the store."""

    def __init__(self, store: Store, latest: Callable[[], NodeSnapshot], clock: Callable[[], float]) -> None:
        self._store = store
        self._latest = latest
        self._clock = clock

    def answer(self, question: CommitQuestion) -> CommitAnswer:
        answer = self._answer(question)
        if not isinstance(answer, CommitGranted):
            word = kind_of(type(answer)).removeprefix("commit_")
            log.warning("generation %d may not commit: %s: %s", question.generation, word, answer.reason)
        return answer

    def _answer(self, question: CommitQuestion) -> CommitAnswer:
        # First, and only then the read: a lease that ended while the store was asked is not mistaken for a new one.
        latest = self._latest()
        try:
            entries = self._store.read((WORLD_KEY,)).entries
            world = next((World.from_json(entry.value) for entry in entries), None)
        except (StoreError, RecordInvalid) as error:
            return CommitUndecided(str(error)[:MAX_REASON_CHARS])
        return judge(question, world, latest, self._clock())
