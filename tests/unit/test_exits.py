"""What the end of a worker means: every combination of what was asked of it, and every code that matters."""

from __future__ import annotations

import itertools
import signal

import pytest

from elastic_agent.agent.workers.stopping import AS_ASKED, HANG_SIGNAL, LEAVING, DrainState, Exit
from elastic_agent.worker.steps.drain import DRAINED

TERMINATED, SHELL_TERMINATED, KILLED, ABORTED, CRASHED = (
    -signal.SIGTERM,
    128 + signal.SIGTERM,
    -signal.SIGKILL,
    -HANG_SIGNAL,
    1,
)
CODES = (0, CRASHED, DRAINED, TERMINATED, SHELL_TERMINATED, KILLED, ABORTED)
E, D, Q, A, H, F = Exit.ENDED, Exit.DRAINED, Exit.UNDETERMINED, Exit.AS_ASKED, Exit.HUNG, Exit.FAILED


def meaning(code: int, *, stopping: bool, hung: bool, draining: bool, finished: bool, kept: bool) -> Exit:
    since = 1.0 if draining else None
    state = DrainState(1, since, finished={0} if finished else set(), kept={0} if kept else set())
    return state.exited(0, code, 2.0, stopping=stopping, hung=hung)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param("", (E, F, F, F, F, F, F), id="on its own"),
        pytest.param("draining", (E, Q, Q, Q, Q, Q, Q), id="a planned change is announced"),
        pytest.param("draining finished", (D, F, D, D, D, F, F), id="after its last step"),
        pytest.param("draining finished kept", (D, D, D, D, D, D, D), id="its state is kept"),
        pytest.param("stopping", (E, F, A, A, A, A, F), id="asked to end"),
        pytest.param("stopping hung", (E, F, A, A, A, A, H), id="it did not move"),
        pytest.param("stopping draining", (E, F, A, A, A, A, F), id="asked to end, in a planned change"),
        pytest.param(
            "stopping draining finished kept", (E, F, A, A, A, A, F), id="signalled after it kept its state"
        ),
    ],
)
def test_each_code_means(flags: str, expected: tuple[Exit, ...]) -> None:
    given = {name: name in flags.split() for name in ("stopping", "hung", "draining", "finished", "kept")}
    assert tuple(meaning(code, **given) for code in CODES) == expected


def test_in_every_combination() -> None:
    for stopping, hung, draining, finished, kept in itertools.product((False, True), repeat=5):
        for code in CODES:
            kind = meaning(
                code, stopping=stopping, hung=hung, draining=draining, finished=finished, kept=kept
            )
            if code == 0:
                assert kind in (Exit.ENDED, Exit.DRAINED), "success is never held against a worker"
            if stopping:
                assert kind not in (Exit.DRAINED, Exit.UNDETERMINED), "the planned change is over"
            if kind is Exit.AS_ASKED:
                assert stopping
                assert code in AS_ASKED
            if kind is Exit.DRAINED:
                assert kept or code in LEAVING
