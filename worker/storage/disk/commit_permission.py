"""Leave to change what a checkpoint directory shows, from the agent, which asks the rendezvous store.

A rank 0 that stood still (SIGSTOP, a frozen machine, a disk that hung) may wake when others train in its place, and
must not undo what they have committed. So it asks before its manifest becomes visible, and what it is granted holds
only for a while, by a clock that goes on while the process stands still. Of the agent's three answers

    granted      lets the change be made now, and until the grant runs out
    refused      raises Fenced: another generation has begun, this process has no future
    undecided    raises Unconfirmed: nothing was committed, training may go on

and an agent that gives none (it ended, it stands still itself) counts as undecided, and so does one of another version
that gives its workers no address to ask at. Without an agent, under torchrun and plain python, everything is permitted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

from ....codec import Invalid
from ...errors import Fenced, Unconfirmed
from ...wire.channel import ask
from ...wire.messages import COMMIT_ANSWERS, CommitGranted, CommitQuestion, CommitRefused
from ...wire.shared_progress import clock

ANSWER_S = 5.0
"""How long the agent may take, and with it the store that it asks."""

MAX_QUESTIONS = 3
"""For one change. A grant holds for seconds and is used at once: who outlives three is not fit to commit."""


class CommitPermission:
    """For one checkpoint of one generation. `address` is the agent's socket. Without it the permit is unlimited, unless
    `has_agent` is true."""

    def __init__(
        self,
        address: str,
        generation: int,
        *,
        has_agent: bool = False,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = clock,
    ) -> None:
        self._address = address
        self._generation = generation
        self._answer_s = answer_s
        self._clock = clock
        self._valid_until = -math.inf if address or has_agent else math.inf

    def check(self) -> None:
        """Returns only while this generation is the present one. Call it right before each change, and no earlier.

        Raises Fenced, or Unconfirmed when that could not be found out in `MAX_QUESTIONS` times `ANSWER_S` at most.

        What remains: a process that is stopped between this clock reading and the system call that makes the
        change, some microseconds, makes it when it wakes, however late. No file system compares a generation as it
        renames.
        The harm is bounded: that rename fails once the present has begun its first save in this directory, which
        removes the temporary manifest; and `load` verifies what it finds and takes the highest step, of one step
        the newest generation's, so the next commits of the present outrun what the past has left.
        """
        questions = 0
        while self._clock() >= self._valid_until:
            if questions == MAX_QUESTIONS:
                raise Unconfirmed(
                    f"{questions} questions to the agent took so long that it ended their connections, or that its "
                    "grants ran out before they could be used"
                )
            questions += 1
            # Where this process stood still between connecting and asking, the agent has ended the connection.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._ask()

    def _ask(self) -> None:
        if not self._address:
            raise self._unknown(
                "it gives this process no address to ask at: agent and worker library are of different versions, "
                "let the job's environment have the agent's version of elastic-agent"
            )
        # Read before the question leaves: the answer says how long after it no other can take this node's place.
        asked_at = self._clock()
        try:
            answer = ask(self._address, CommitQuestion(self._generation), COMMIT_ANSWERS, self._answer_s)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except (OSError, Invalid) as error:
            raise self._unknown(f"the agent does not answer: {error}") from error
        if isinstance(answer, CommitGranted):
            self._valid_until = asked_at + answer.valid_s
        elif isinstance(answer, CommitRefused):
            raise Fenced(
                f"generation {self._generation} is over: this process belongs to the past and must not commit "
                f"({answer.reason})"
            )
        else:
            raise self._unknown(answer.reason)

    def _unknown(self, why: str) -> Unconfirmed:
        return Unconfirmed(
            f"the agent does not confirm that generation {self._generation} may still commit: {why}"
        )
