"""Answers this node's rank 0 before it commits: is its generation still the present one (I5)?

The answer rests on the key `world` as it stands in the store at that moment, never on what a watch has delivered: a
node that was frozen hears last of what was decided without it. While this node is a member of the world there, the
next generation can begin in three ways only: this node has stopped its workers and said so; its agent has ended, and
its workers with it; its lease has ended. So a grant holds for as long as the lease was proven before the store was
asked.

`judge` decides. `CommitGate` brings it question and world, in threads that may wait for the store.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..rendezvous.errors import RecordInvalid, StoreError
from ..rendezvous.records import WORLD_KEY, World
from ..rendezvous.store import Store
from ..worker.commits import (
    MAX_REASON_CHARS,
    Answer,
    Granted,
    MessageError,
    Question,
    Refused,
    Undecided,
    decode_question,
    encode_answer,
    receive_line,
    send_line,
)

log = logging.getLogger(__name__)

CLIENT_S = 2.0
"""How long a worker may take to ask once it is connected, and to take its answer."""

MAX_CLIENTS = 8
"""One asks at a time. More are broken, and cost a thread each for `CLIENT_S`; the next then wait in the backlog."""

ACCEPT_PAUSE_S = 1.0
"""The rest after this process ran out of file descriptors."""


@dataclass(frozen=True, slots=True)
class Standing:
    """This agent's place among the others, as its main loop last knew it."""

    incarnation: str
    proven_until: float
    """Monotonic instant; until then the lease cannot have ended."""


NOBODY = Standing("", -math.inf)


def judge(question: Question, world: World | None, standing: Standing, now: float) -> Answer:
    """`world` is what the store held after `standing` was taken and before `now`.

    The phase does not matter. A generation that stops may still save, and one that the leaving host of the store
    has ended too: no other begins before this node's workers are gone.
    """
    if world is None:
        return Refused("the rendezvous store holds no world")
    if world.generation > question.generation:
        return Refused(f"generation {world.generation} has replaced it")
    if world.generation < question.generation:
        return Refused(f"the rendezvous store has fallen back to generation {world.generation}")
    if world.member(standing.incarnation) is None:
        return Refused("this node, which joined anew, is no member of it")
    left_s = standing.proven_until - now
    if left_s <= 0:
        return Undecided("the rendezvous store does not confirm this node's lease")
    return Granted(left_s)


class CommitGate:
    """One thread accepts, and one for each client asks the store: who hangs delays nobody else."""

    def __init__(self, path: Path, store: Store, clock: Callable[[], float]) -> None:
        self.path = path
        self.standing = NOBODY
        """For the main loop to replace as a whole, so that no thread ever sees half of a change."""
        self._store = store
        self._clock = clock
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()

    def start(self) -> None:
        threading.Thread(target=self._accept, name="commit-gate", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone does not
        self._socket.close()

    def answer(self, question: Question) -> Answer:
        # First, and only then the read: a lease that ended while the store was asked is not mistaken for a new one.
        standing = self.standing
        try:
            entries = self._store.read((WORLD_KEY,)).entries
            world = next((World.from_json(entry.value) for entry in entries), None)
        except (StoreError, RecordInvalid) as error:
            return Undecided(str(error)[:MAX_REASON_CHARS])
        return judge(question, world, standing, self._clock())

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                self._places.release()
                if self._closed.is_set():
                    return
                log.warning("cannot accept a question about a commit: %s", error)
                self._closed.wait(ACCEPT_PAUSE_S)
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="commit-client", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                question = decode_question(receive_line(connection, CLIENT_S))
                answer = self.answer(question)
                if not isinstance(answer, Granted):
                    log.warning(
                        "generation %d may not commit: %s: %s",
                        question.generation,
                        answer.kind,
                        answer.reason,
                    )
                send_line(connection, encode_answer(answer), CLIENT_S)
        except (OSError, MessageError) as error:
            log.warning("a question about a commit is left without an answer: %s", error)
        finally:
            self._places.release()
