"""The checks before a join, in the main loop: what waits for them, how often they run, and what is said."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.config import CheckMode
from elastic_agent.agent.rendezvous_io.node_checks import AGAIN_S, CHECKING, NodeChecks
from elastic_agent.health.checks.finding import Finding, Outcome
from elastic_agent.health.checks.runner import CheckRun
from elastic_agent.rendezvous.node.participant import Participant

from .bench import ALONE, Bench
from .test_loop import POLICY as LOOP_POLICY
from .test_loop import Scene

GOOD = Finding("open-files", Outcome.OK, "many")
WARNS = Finding("interface", Outcome.WARN, "100 Mbit/s", "check the cable")
FAILS = Finding("gpu-ecc", Outcome.FAIL, "3 errors", "reset it")


class FakeRun(CheckRun):
    """Finds at once what it is made with."""

    def __init__(self, found: Sequence[Finding], hangs: bool = False) -> None:
        self.found, self.hangs, self.closed = tuple(found), hangs, False

    @property
    def pid(self) -> int | None:
        return 4711 if self.hangs and not self.closed else None

    def start(self) -> None:
        pass

    def findings(self) -> tuple[Finding, ...]:
        return self.found

    def end(self) -> None:
        self.closed = not self.hangs

    def close(self) -> None:
        self.closed = True


@dataclass
class Scenery:
    """What the runs find, in turn."""

    mode: CheckMode
    found: list[Sequence[Finding]]
    hangs: bool = False
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    runs: list[FakeRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checks = NodeChecks(self.mode, self.new_run, self.events.put)
        bench = Bench()
        self.part: Participant = bench.join("a", ALONE, held_back=self.checks.held_back).part

    def new_run(self, of_excluded: bool) -> FakeRun:
        assert not of_excluded
        self.runs.append(FakeRun(self.found[len(self.runs)], self.hangs))
        return self.runs[-1]

    def hear(self, now: float = 0.0) -> None:
        event = self.events.get(timeout=5.0)
        assert callable(event)
        event()
        assert self.checks.take(self.part, now) is not None


def test_with_fail_a_node_is_held_back_until_it_is_checked() -> None:
    scene = Scenery("fail", [[GOOD, WARNS]])
    scene.checks.begin("a-1")
    assert scene.part.held_back == CHECKING
    scene.hear()
    assert scene.part.held_back == ""
    assert scene.checks.turn(scene.part, 1000.0) is None
    assert len(scene.runs) == 1


def test_with_fail_a_node_that_fails_is_checked_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastic_agent")
    scene = Scenery("fail", [[FAILS, GOOD]] * 5 + [[GOOD]])
    scene.checks.begin("a-1")
    now = 0.0
    for failures in range(5):
        scene.hear(now)
        assert scene.part.held_back.endswith("(--check fail): gpu-ecc: 3 errors")
        again_at = scene.checks.turn(scene.part, now)
        assert again_at is not None
        assert again_at - now == AGAIN_S
        now = again_at
        scene.checks.turn(scene.part, now)
        assert len(scene.runs) == failures + 2
        assert scene.checks.turn(scene.part, now + 1) is None, "one run at a time"
    scene.hear(now)
    assert scene.part.held_back == ""
    assert [text for text in caplog.messages if "gpu-ecc" in text] == [
        "check gpu-ecc failed: 3 errors. To do: reset it"
    ], "once, however often it fails alike"
    assert caplog.messages[-1] == "no check of this node fails any more: it joins"


def test_with_warn_nothing_waits_and_the_log_says_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scenery("warn", [[GOOD, WARNS, FAILS]])
    assert scene.part.held_back == ""
    scene.checks.begin("a-1")
    scene.hear()
    assert scene.part.held_back == ""
    assert scene.checks.turn(scene.part, 1000.0) is None
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "check gpu-ecc failed: 3 errors. To do: reset it"),
        ("WARNING", "check interface warns: 100 Mbit/s. To do: check the cable"),
    ]


def test_a_node_that_comes_back_is_checked_again_and_one_that_stays_is_not() -> None:
    scene = Scenery("warn", [[GOOD], [GOOD]])
    scene.checks.begin("a-1")
    scene.hear()
    assert scene.part.incarnation == "a-1"
    scene.checks.turn(scene.part, 1.0)
    assert len(scene.runs) == 1
    scene.part._session.lease = 7
    scene.part.lease_gone(7)
    scene.checks.turn(scene.part, 2.0)
    scene.hear()
    scene.checks.turn(scene.part, 3.0)
    assert len(scene.runs) == 2


def test_a_process_that_hangs_is_the_checks_own_child_until_the_agent_ends() -> None:
    scene = Scenery("warn", [[FAILS]], hangs=True)
    scene.checks.begin("a-1")
    scene.hear()
    assert list(scene.checks.runs.pids) == [4711]
    scene.checks.runs.close()
    assert list(scene.checks.runs.pids) == []


def test_while_a_probe_hangs_none_is_added_to_it() -> None:
    scene = Scenery("fail", [[FAILS], [GOOD]], hangs=True)
    scene.checks.begin("a-1")
    scene.hear()
    now = 0.0
    for _ in range(3):
        again_at = scene.checks.turn(scene.part, now)
        assert again_at is not None
        assert again_at >= now
        now = again_at
        scene.checks.turn(scene.part, now)
        assert len(scene.runs) == 1
    assert "gpu-ecc" in scene.part.held_back
    scene.runs[0].close()
    now = scene.checks.turn(scene.part, now) or 0.0
    scene.checks.turn(scene.part, now)
    scene.hear(now)
    assert scene.part.held_back == ""


# --- In the main loop


class Checked(Scene):
    """A loop whose checks find the next of `found` each time they run."""

    found: Iterator[Sequence[Finding]]

    def new_run(self, of_excluded: bool) -> CheckRun:
        return FakeRun(next(self.found))


def _loop(mode: CheckMode, *found: Sequence[Finding]) -> Checked:
    scene = Checked(policy=LOOP_POLICY, check=mode)
    scene.found = iter(found)
    scene.checks.begin("a-1")
    deadline = time.monotonic() + 5.0
    while scene.events.empty():  # the run has a thread of its own
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return scene


def test_a_node_that_is_not_fit_ends_with_exit_code_73() -> None:
    scene = _loop("fail", *[[FAILS]] * 500)
    ending = scene.loop.run()
    assert ending.code is ExitCode.NOT_HERE
    assert ending.reason.endswith(
        "this node does not join before its checks pass (--check fail): gpu-ecc: 3 errors"
    )
    assert scene.training.started == []
    assert scene.state.findings == (FAILS,)
    assert scene.state.readiness().detail.endswith("gpu-ecc: 3 errors")
