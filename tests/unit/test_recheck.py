"""The check of an excluded node: when it runs, what it looks at, and what its record says then."""

from __future__ import annotations

import json
import queue
from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.rendezvous_io.node_checks import HANGS, NodeChecks
from elastic_agent.health.checks import machine as arithmetic
from elastic_agent.health.checks.finding import Finding, NodeNeeds, Outcome
from elastic_agent.health.checks.runner import RECHECKS, run_checks
from elastic_agent.rendezvous.coordinator.exclusions import exclude
from elastic_agent.rendezvous.records import WORLD_KEY

from .bench import POLICY, Bench, Peer
from .test_join_checks import FAILS, GOOD, FakeRun

NEEDS = NodeNeeds()


class Scenery:
    """The third of three nodes is excluded. `found` by each run, in turn."""

    def __init__(self, *found: Sequence[object], hangs: bool = False) -> None:
        self.found, self.hangs = list(found), hangs
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.runs = 0
        self.checks = NodeChecks("off", self.new_run, self.events.put)
        self.checks.begin("c-1")
        self.bench = Bench()
        self.bench.joined("a", "b")
        self.bad: Peer = self.bench.join("c")
        self.bench.settle()
        world = self.bench.world()
        assert world is not None
        rows = exclude((), "c", "c-1", "gpu_fault", "GPU 3 is sick")
        self.bench.put(WORLD_KEY, replace(world, exclusions=rows).to_json())
        self.bench.settle()
        assert self.bench.members() == ["a", "b"]

    def new_run(self, of_excluded: bool) -> FakeRun:
        assert of_excluded
        self.runs += 1
        return FakeRun(self.found.pop(0), self.hangs)  # type: ignore[arg-type]

    def turn(self) -> None:
        self.checks.turn(self.bad.part, self.bench.now)

    def hear(self) -> None:
        event = self.events.get(timeout=5.0)
        assert callable(event)
        event()
        assert self.checks.take(self.bad.part, self.bench.now) is not None
        self.bench.settle()


def test_it_runs_once_after_the_cool_down() -> None:
    scene = Scenery([GOOD])
    scene.turn()
    assert scene.runs == 0
    scene.bench.after(POLICY.cool_down_s)
    scene.turn()
    scene.turn()
    assert scene.runs == 1
    scene.hear()
    assert scene.bench.members() == ["a", "b", "c"]


def test_what_fails_is_in_the_record_and_is_checked_again_after_twice_the_time() -> None:
    scene = Scenery([GOOD, FAILS], [GOOD])
    scene.bench.after(POLICY.cool_down_s)
    scene.turn()
    scene.hear()
    record = scene.bad.record
    assert record is not None
    assert record.recheck is not None
    assert not record.recheck.passed
    assert record.recheck.summary == "gpu-ecc: 3 errors"
    scene.bench.after(2 * POLICY.cool_down_s - 1.0)
    scene.turn()
    assert scene.runs == 1
    scene.bench.after(1.0)
    scene.turn()
    scene.hear()
    assert scene.bench.members() == ["a", "b", "c"]


def test_a_probe_that_hangs_in_the_kernel_is_a_check_that_fails() -> None:
    scene = Scenery([FAILS], hangs=True)
    scene.bench.after(POLICY.cool_down_s)
    scene.turn()
    scene.hear()
    scene.bench.after(2 * POLICY.cool_down_s)
    scene.turn()
    scene.bench.settle()
    record = scene.bad.record
    assert record is not None
    assert record.recheck is not None
    assert record.recheck.summary == HANGS
    scene.checks.runs.close()


@pytest.mark.parametrize(
    ("devices", "wrong", "sees_no_gpu", "gpus", "outcome", "said"),
    [
        (["cpu"], [], True, (), Outcome.OK, "agree on cpu"),
        (["cpu", "cuda:0"], [], False, ("0",), Outcome.OK, "agree on cpu, cuda:0"),
        (["cpu", "cuda:0"], ["cuda:0"], False, ("0",), Outcome.FAIL, "cuda:0: copies or matrix products"),
        (["cpu"], [], True, ("0", "1"), Outcome.FAIL, "torch finds none of the 2 GPUs"),
        (["cpu"], [], False, ("0", "1"), Outcome.OK, "agree on cpu"),
        ([], [], False, (), Outcome.UNKNOWN, "torch cannot be imported"),
    ],
)
def test_what_devices_compute_is_judged(
    monkeypatch: pytest.MonkeyPatch,
    devices: list[str],
    wrong: list[str],
    sees_no_gpu: bool,
    gpus: tuple[str, ...],
    outcome: Outcome,
    said: str,
) -> None:
    """Without its GPUs the products of the processor alone would be right, as where torch is built without CUDA."""
    answer = json.dumps({"devices": devices, "wrong": wrong, "sees_no_gpu": sees_no_gpu})
    monkeypatch.setattr(
        arithmetic, "probe_command", lambda python, module: [python, "-c", f"print({answer!r})"]
    )
    finding = arithmetic.check_arithmetic(replace(NEEDS, gpus=gpus))
    assert finding.outcome is outcome
    assert said in finding.summary
    assert bool(finding.advice) is (outcome is Outcome.FAIL)


@pytest.mark.long
def test_this_machine_passes() -> None:
    findings = run_checks(RECHECKS[:1], NEEDS)
    assert [(one.check, one.outcome) for one in findings] == [("arithmetic", Outcome.OK)]
    assert "cpu" in findings[0].summary or "processor" in findings[0].summary


def test_a_device_that_multiplies_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    right = torch.equal
    seen: list[int] = []

    def equal(*two: object) -> bool:
        seen.append(1)
        return len(seen) < 3 and right(*two)

    monkeypatch.setattr(torch, "equal", equal)
    arithmetic.main()
    assert '"wrong": ["cpu"' in capsys.readouterr().out


def test_a_process_that_fails_or_hangs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(text: str) -> Finding:
        monkeypatch.setattr(arithmetic, "probe_command", lambda python, module: [python, "-c", text])
        return arithmetic.check_arithmetic(NEEDS)

    broken = found("import sys; sys.exit('CUDA error: device-side assert')")
    assert (broken.outcome, broken.summary) == (Outcome.FAIL, "ended with 1: CUDA error: device-side assert")
    monkeypatch.setattr(arithmetic, "WITHIN_S", 0.2)
    assert found("import time; time.sleep(60)").summary == "no result within 0.2 s"
