"""The check of an excluded node: when it runs, what it looks at, and what its record says then."""

from __future__ import annotations

import json
import queue
import socket
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.rendezvous_io.node_checks import HANGS, Recheck, peers_of
from elastic_agent.health.checks import machine as arithmetic
from elastic_agent.health.checks.finding import Finding, NodeNeeds, Outcome
from elastic_agent.health.checks.machine import check_peers
from elastic_agent.health.checks.runner import run_checks
from elastic_agent.health.checks.table import RECHECKS, checks_for, rechecks_for
from elastic_agent.rendezvous.coordinator.exclusions import exclude
from elastic_agent.rendezvous.records import WORLD_KEY, Phase
from elastic_agent.threads import Thread

from .bench import POLICY, TTL_S, Bench, Peer
from .test_join_checks import FAILS, GOOD, FakeRun

NEEDS = NodeNeeds()


class Scenery:
    """The third of three nodes is excluded. `found` by each run, in turn."""

    def __init__(self, *found: Sequence[object], hangs: bool = False) -> None:
        self.found, self.hangs = list(found), hangs
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.asked: list[Sequence[str]] = []
        self.recheck = Recheck(self.new_run, self.events.put)
        self.bench = Bench()
        self.bench.joined("a", "b")
        self.bad: Peer = self.bench.join("c")
        self.bench.settle()
        world = self.bench.world()
        assert world is not None
        rows = exclude((), "c", "c-1", "ecc", "GPU 3 is sick")
        self.bench.put(WORLD_KEY, replace(world, exclusions=rows).to_json())
        self.bench.settle()
        assert self.bench.members() == ["a", "b"]

    def new_run(self, peers: Sequence[str]) -> FakeRun:
        self.asked.append(peers)
        return FakeRun(self.found.pop(0), self.hangs)  # type: ignore[arg-type]

    def turn(self) -> None:
        self.recheck.turn(self.bad.part, self.bench.now)

    def hear(self) -> None:
        event = self.events.get(timeout=5.0)
        assert callable(event)
        event()
        assert self.recheck.take(self.bad.part, self.bench.now) is not None
        self.bench.settle()


def test_it_runs_once_after_the_cool_down_and_asks_the_world_s_agents() -> None:
    scene = Scenery([GOOD])
    scene.turn()
    assert scene.asked == []
    scene.bench.after(POLICY.cool_down_s)
    scene.turn()
    scene.turn()
    assert scene.asked == [("host-a:80", "host-b:80")]
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
    assert len(scene.asked) == 1
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
    scene.recheck.runs.close()


def test_no_more_than_eight_peers_are_asked() -> None:
    bench = Bench()
    policy = replace(POLICY, max_nodes=10)
    peers = bench.joined(*(f"n{index}" for index in range(10)), policy=policy)
    out = bench.join("out", policy=policy)
    bench.settle()
    assert peers_of(out.part) == tuple(f"host-n{index}:80" for index in range(8))
    assert peers_of(peers[0].part) == tuple(f"host-n{index}:80" for index in range(1, 9)), "not itself"


def test_while_the_job_stands_still_none_is_asked_that_may_be_dead() -> None:
    """The members of the last world may all be gone, or have new addresses."""
    scene = Scenery([GOOD])
    scene.bench.kill(scene.bench.peers[1])
    scene.bench.after(2 * TTL_S)
    assert scene.bench.phase() is Phase.STOPPING
    assert peers_of(scene.bad.part) == ("host-a:80",), "the coordinator"
    assert peers_of(scene.bench.peers[0].part) == ("host-c:80",), "who coordinates knows who lives"


def test_it_looks_at_what_is_checked_before_a_join_and_more() -> None:
    names = [check.name for check in rechecks_for(NodeNeeds(peers=("h:1",), log_directory="/c"))]
    before = [check.name for check in checks_for(NodeNeeds(log_directory="/c"))]
    assert names == [*before, "arithmetic", "peers"]
    assert {"shared-memory", "log-directory"} <= set(before)
    assert "peers" not in [check.name for check in rechecks_for(NEEDS)]


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


@pytest.mark.parametrize(
    ("asked", "silent", "outcome"),
    [
        (3, (), Outcome.OK),
        (3, ("a:1",), Outcome.WARN),
        (2, ("a:1",), Outcome.WARN),
        (3, ("a:1", "b:1"), Outcome.FAIL),
        (1, ("a:1",), Outcome.FAIL),
    ],
)
def test_a_node_that_hardly_any_peer_answers_fails(
    monkeypatch: pytest.MonkeyPatch, asked: int, silent: tuple[str, ...], outcome: Outcome
) -> None:
    monkeypatch.setattr(arithmetic, "answers", lambda peer: peer not in silent)
    assert check_peers(NodeNeeds(peers=("a:1", "b:1", "c:1")[:asked])).outcome is outcome


def test_peers_are_asked_over_http() -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    Thread(server.serve_forever, "answers").start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refused = f"127.0.0.1:{closed.getsockname()[1]}"
        here = f"127.0.0.1:{server.server_port}"
        found = check_peers(NodeNeeds(peers=(here, refused)))
    assert (found.outcome, found.summary) == (Outcome.WARN, f"no answer over HTTP from {refused}")
    server.shutdown()
    server.server_close()


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


def test_without_torch_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    assert isinstance(sys.modules["torch"], types.NoneType)
    arithmetic.main()
    assert capsys.readouterr().out == '{"devices": []}\n'


def test_a_process_that_fails_or_hangs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(text: str) -> Finding:
        monkeypatch.setattr(arithmetic, "probe_command", lambda python, module: [python, "-c", text])
        return arithmetic.check_arithmetic(NEEDS)

    broken = found("import sys; sys.exit('CUDA error: device-side assert')")
    assert (broken.outcome, broken.summary) == (
        Outcome.FAIL,
        "ended with 1: CUDA error: device-side assert",
    )
    monkeypatch.setattr(arithmetic, "WITHIN_S", 0.2)
    assert found("import time; time.sleep(60)").summary == "no result within 0.2 s"
