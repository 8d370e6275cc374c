"""The pages for an operator: what one agent writes another's command reads back, and nothing else gets through."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_agent.agent.observability.status import (
    JOB_PAGE,
    MAX_JOB_BYTES,
    MAX_STATUS_BYTES,
    SCHEMA,
    STATUS_PAGE,
    Checkpoint,
    JobStatus,
    NodeState,
    NodeStatus,
    job_page,
)
from elastic_agent.codec import Invalid
from elastic_agent.health.checks.finding import Finding, Outcome
from elastic_agent.health.metrics import Metrics
from elastic_agent.health.stragglers import PaceComparison, Paces, Straggler
from elastic_agent.rendezvous.messages import MAX_EXCLUSION_REASON, Exclusion
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.records import (
    MAX_TEXT,
    Cause,
    CauseKind,
    Endpoint,
    Failure,
    Limits,
    NodeRecord,
    Phase,
    Restarts,
    World,
    assign_ranks,
)
from elastic_agent.worker.wire.messages import LoadReport, SaveReport
from tests.observed import a_metrics, a_node

STATUS = NodeStatus(
    node="a",
    incarnation="a-1",
    state="running",
    waiting_for="",
    phase_s=4.5,
    workers=2,
    step=17,
    step_age_s=0.5,
    checkpoint=Checkpoint(12, 3.25),
    memory=Checkpoint(17, 0.5),
    replica=None,
    lease_age_s=0.25,
    lease_ttl_s=5.0,
    backoff_s=0.0,
    notice="",
    notice_s=None,
    checks=(),
    partners_unreachable=(),
)
FAILURE = Failure(
    2,
    "ValueError",
    "exit code 1: ValueError: lr < 0",
    "exception",
    node="b",
    rank=3,
    local_rank=1,
    returncode=1,
    exception="ValueError: lr < 0",
    traceback="the traceback",
    log_tail=("the output",),
    log_file="/the/log",
)
NODES = (
    NodeRecord("a", "a-1", "10.0.0.1", 4711, 2, Endpoint("10.0.0.1", 9100)),
    NodeRecord("b", "b-1", "10.0.0.2", 4711, 2, Endpoint("10.0.0.2", 9100), failure=FAILURE),
)
WORLD = World(
    job="digits",
    generation=3,
    phase=Phase.RUNNING,
    members=assign_ranks(NODES),
    master=Endpoint("10.0.0.1", 4711),
    cause=Cause(CauseKind.FAILURE, "b", FAILURE.summary, FAILURE),
)
JOB = JobStatus("digits", WORLD, NODES, "a", complete=True)


@pytest.mark.parametrize(
    "status",
    [
        STATUS,
        replace(STATUS, phase_s=None, step_age_s=None, lease_age_s=None, checkpoint=None),
        replace(STATUS, checkpoint=Checkpoint(12, None)),
    ],
)
def test_a_status_comes_back_as_it_was(status: NodeStatus) -> None:
    assert STATUS_PAGE.decode(STATUS_PAGE.encode(status)) == status


@pytest.mark.parametrize("job", [replace(JOB, world=None, nodes=(), coordinator=None), JOB])
def test_a_job_comes_back_without_what_workers_have_printed(job: JobStatus) -> None:
    text = job_page(job)
    back = JOB_PAGE.decode(text)
    assert (back.job, back.coordinator, back.complete) == (job.job, job.coordinator, job.complete)
    assert [node.node for node in back.nodes] == [node.node for node in job.nodes]
    for secret in ("the traceback", "the output", "/the/log"):
        assert secret not in text
    if back.world is not None:
        failure = back.world.cause.failure
        assert failure is not None
        assert (failure.rank, failure.summary) == (3, FAILURE.summary)
        assert replace(back.world, cause=WORLD.cause) == WORLD


CANARY = "canary-of-a-token"


def test_no_secret_is_on_the_pages_that_a_failure_has_in_its_text() -> None:
    """Everything that `/job` has is in the state of the page, too, which is made of it."""
    text = f"exit code 1: ValueError: {CANARY} is no number"
    failure = replace(
        FAILURE, fingerprint=f"exit code 1: {CANARY}", summary=text, exception=f"ValueError: {CANARY}"
    )
    excluded = Exclusion("b", "b-1", "exception", f"its workers failed: {text}")
    world = replace(
        WORLD,
        cause=Cause(CauseKind.FAILURE, "b", text, failure),
        restarts=Restarts(1, fingerprint=failure.fingerprint),
        exclusions=(excluded,),
    )
    node = a_node(node="b", secrets={CANARY})
    waiting_for = f"excluded: {excluded.reason}"
    node.update(NodeSnapshot("b", "b-1", world=world, waiting_for=waiting_for), None, "joining")
    assert CANARY not in node.job() + node.node()
    shown = JOB_PAGE.decode(node.job()).world
    assert shown is not None
    assert shown.cause.detail == "exit code 1: ValueError: *** is no number"
    found = shown.cause.failure
    assert found is not None
    assert found.summary == shown.cause.detail
    assert shown.exclusions[0].reason == f"its workers failed: {shown.cause.detail}"
    assert status_of(node).waiting_for == f"excluded: its workers failed: {shown.cause.detail}"


def test_nor_in_the_answer_to_who_asks_whether_an_excluded_node_is_ready() -> None:
    snapshot = NodeSnapshot("b", "b-1", waiting_for=f"excluded: exit code 1: ValueError: {CANARY}")
    node = a_node(node="b", secrets={CANARY})
    node.update(snapshot, None, "joining")
    assert node.readiness().detail == "waiting: excluded: exit code 1: ValueError: ***"


def test_texts_that_grow_by_a_mask_are_cut_to_what_a_reader_takes() -> None:
    text = "token=a " * (MAX_TEXT // 8)
    failure = replace(FAILURE, summary=text)
    exclusion = Exclusion("b", "b-1", "exception", text[:MAX_EXCLUSION_REASON])
    world = replace(WORLD, cause=Cause(CauseKind.FAILURE, "b", text, failure), exclusions=(exclusion,))
    shown = JOB_PAGE.decode(job_page(replace(JOB, world=world))).world
    assert shown is not None
    assert "token=a" not in f"{shown.cause} {shown.exclusions}"


HOSTILE: list[tuple[str, Any]] = [
    ("v", SCHEMA + 1),
    ("v", True),
    ("v", None),
    ("node", "\x1b[2J"),
    ("node", "a node"),
    ("node", "x" * 129),
    ("incarnation", None),
    ("state", "run ning"),
    ("waiting_for", "x" * 4097),
    ("waiting_for", 7),
    ("phase_s", True),
    ("step", 1.5),
    ("step", 2**63),
    ("workers", 4097),
    ("step", "17"),
    ("step_age_s", {}),
    ("checkpoint", []),
    ("checkpoint", {"step": 1}),
    ("checkpoint", {"step": -1, "age_s": None}),
    ("checkpoint", {"step": 1, "age_s": "old"}),
    ("lease_age_s", False),
    ("lease_ttl_s", None),
    ("backoff_s", None),
    ("backoff_s", -1),
    ("backoff_s", "1"),
    ("backoff_s", float("nan")),
    ("backoff_s", float("inf")),
    ("notice", None),
    ("notice_s", "soon"),
    ("partners_unreachable", "c"),
    ("partners_unreachable", ["c"] * 9),
    ("checks", {}),
    ("checks", [{"check": "gpu-ecc"}]),
    ("checks", [{"check": "a b", "outcome": "fail", "summary": "", "advice": ""}]),
    ("checks", [{"check": "gpu-ecc", "outcome": "fail", "summary": "x" * 6145, "advice": ""}]),
    ("checks", [{"check": "gpu-ecc", "outcome": "bad", "summary": "", "advice": ""}]),
]


@pytest.mark.parametrize(("name", "value"), HOSTILE, ids=[f"{name}={str(v)[:20]}" for name, v in HOSTILE])
def test_a_field_that_no_agent_writes_is_refused_by_name(name: str, value: object) -> None:
    page = json.loads(STATUS_PAGE.encode(STATUS)) | {name: value}
    with pytest.raises(Invalid, match="version" if name == "v" else name):
        STATUS_PAGE.decode(json.dumps(page))


@pytest.mark.parametrize("name", json.loads(STATUS_PAGE.encode(STATUS)))
def test_a_status_has_all_its_fields(name: str) -> None:
    page = json.loads(STATUS_PAGE.encode(STATUS))
    del page[name]
    with pytest.raises(Invalid, match=name):
        STATUS_PAGE.decode(json.dumps(page))


@pytest.mark.parametrize(
    "change",
    [
        {"v": 0},
        {"job": ""},
        {"world": []},
        {"world": {"v": 3}},
        {"nodes": None},
        {"nodes": {}},
        {"nodes": ["a"]},
        {"nodes": [{}]},
        {"coordinator": 7},
        {"complete": None},
    ],
    ids=str,
)
def test_a_job_that_no_agent_writes_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        JOB_PAGE.decode(json.dumps(json.loads(job_page(JOB)) | change))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "\0"], ids=lambda text: text[:3])
def test_what_is_no_page_at_all_is_refused(text: str) -> None:
    for read in (STATUS_PAGE.decode, JOB_PAGE.decode):
        with pytest.raises(Invalid):
            read(text)


def test_a_page_beyond_its_size_is_not_even_parsed() -> None:
    with pytest.raises(Invalid, match="characters"):
        STATUS_PAGE.decode(STATUS_PAGE.encode(STATUS).ljust(MAX_STATUS_BYTES + 1))
    with pytest.raises(Invalid, match="characters"):
        JOB_PAGE.decode(job_page(JOB).ljust(MAX_JOB_BYTES + 1))


def test_a_job_of_2000_nodes_fits() -> None:
    nodes = tuple(
        NodeRecord(
            f"gpu-node-{n:04}", f"{n:012}", f"10.0.{n // 256}.{n % 256}", 4711, 8, Endpoint("10.0.0.1", 1)
        )
        for n in range(2000)
    )
    world = replace(WORLD, members=assign_ranks(nodes))
    back = JOB_PAGE.decode(job_page(JobStatus("digits", world, nodes, None, complete=False)))
    assert back.nodes == nodes


# ---------------------------------------------------------------- what workers report


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> Metrics:
    return a_metrics(workers=2)


@pytest.fixture
def node(metrics: Metrics, clock: Clock) -> NodeState:
    """Its machine's monotonic clock shows 900 s less than the one on the wall."""
    return a_node(metrics, clock=clock, wall_clock=lambda: clock() + 900.0)


def status_of(node: NodeState) -> NodeStatus:
    return STATUS_PAGE.decode(node.node())


def test_before_it_has_found_the_store_an_agent_waits_for_it(node: NodeState) -> None:
    status = status_of(node)
    assert (status.state, status.waiting_for) == ("init", "the rendezvous store")
    assert (status.workers, status.checkpoint, status.lease_age_s, status.phase_s) == (0, None, None, None)
    alone = JobStatus("digits", None, (), None, complete=False, agent=status_of(node))
    assert JOB_PAGE.decode(node.job()) == alone


def saved(step: int, result: Any = "ok") -> SaveReport:
    return SaveReport(1, 0, step, result, 0.1, 10)


def loaded(step: int, result: Any = "ok") -> LoadReport:
    return LoadReport(1, 0, step, result, 0.1)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([saved(5)], Checkpoint(5, 1.0)),
        ([saved(5), saved(6, "error")], Checkpoint(5, 2.0)),
        ([saved(5), saved(6)], Checkpoint(6, 1.0)),
        ([loaded(5)], Checkpoint(5, None)),
        ([loaded(0, "none")], None),
        ([loaded(5, "corrupt"), loaded(4)], Checkpoint(4, None)),
        ([saved(5), loaded(5)], Checkpoint(5, 2.0)),
        ([saved(5), loaded(5, "corrupt"), loaded(4)], Checkpoint(4, None)),
        ([loaded(5), saved(5)], Checkpoint(5, 1.0)),
    ],
    ids=lambda value: str(value) if isinstance(value, Checkpoint) else None,
)
def test_the_checkpoint_is_the_one_to_go_on_from(
    node: NodeState, clock: Clock, reports: list[Any], expected: Checkpoint | None
) -> None:
    for report in reports:
        node.reported(report, clock())
        clock.now += 1.0
    assert status_of(node).checkpoint == expected


def test_a_step_is_as_old_as_its_end_and_no_checkpoint(node: NodeState, clock: Clock) -> None:
    node.reported(saved(5), clock())
    for step in (7, 8):
        node.stepped(step, clock() - 0.25)
        clock.now += 1.5
    status = status_of(node)
    assert (status.step, status.step_age_s) == (8, 1.75)
    assert status.checkpoint == Checkpoint(5, 3.0)


# ---------------------------------------------------------------- the same in numbers


def shown(node: NodeState) -> dict[str, float]:
    """The gauges of `/metrics`, by name and the value of their label, if they have one."""
    found = {}
    for family in text_string_to_metric_families(node.metrics().decode()):
        for sample in family.samples if family.type == "gauge" else ():
            label = [value for name, value in sample.labels.items() if name not in ("run_id", "node")]
            found[":".join((sample.name.removeprefix("elastic_agent_"), *label))] = sample.value
    return found


def test_levels_are_what_the_node_knows_when_it_is_asked(node: NodeState, clock: Clock) -> None:
    excluded = Exclusion("a", "a-0", "exception", "its workers failed")
    world = replace(WORLD, exclusions=(excluded,), limits=Limits(1, 4, 1.0, 3), restarts=Restarts(2))
    seen = NodeSnapshot(
        "a", "a-1", world=world, known_nodes=NODES[:1], coordinates=True, confirmed_at=98.0, backoff_s=1.5
    )
    node.update(seen, None, "running")
    node.started, node.trains = world, True
    node.stepped(17, clock() - 0.5)
    node.reported(saved(12), clock())
    node.hangs = "watching", 60.0
    node.spent |= {"productive": 7.0, "stop": 2.0}
    node.partners_unreachable = ("b",)
    node.findings = (Finding("gpu-ecc", Outcome.FAIL, "errors", "replace it"),)
    clock.now += 1.0
    expected = {
        "state:init": 0,
        "state:running": 1,
        "coordinator": 1,
        "lease_age_seconds": 3.0,
        "backoff_seconds": 1.5,
        "node_excluded": 1,
        "rendezvous_generation": 3,
        "world_size": 4,
        "group_world_size": 2,
        "restart_budget_remaining:failure": 1,
        "nodes:active": 2,
        "nodes:standby": 0,
        "nodes:waiting": 0,
        "nodes:lost": 1,
        "step": 17,
        "last_step_timestamp_seconds": 999.5,
        "checkpoint_last_step:local": 12,
        "checkpoint_last_success_timestamp_seconds:local": 1000.0,
        "hang_detector_state:watching": 1,
        "hang_detector_state:off": 0,
        "hang_timeout_seconds": 60.0,
        "replica_partners_unreachable": 1,
        "check_outcome:gpu-ecc": 2,
    }
    assert {name: value for name, value in shown(node).items() if name in expected} == expected
    page = node.metrics().decode()
    assert re.search(r"^elastic_agent_productive_time_seconds_total{.*} 7.0$", page, re.MULTILINE)
    assert re.search(r'^elastic_agent_lost_time_seconds_total{cause="stop",.*} 2.0$', page, re.MULTILINE)
    node.trains = False
    node.update(replace(seen, coordinates=False, confirmed_at=None), None, "stopping")
    now = shown(node)
    assert [now[name] for name in ("rendezvous_generation", "world_size", "group_world_size")] == [3, 0, 0]
    assert [now.get(f"nodes:{state}") for state in ("active", "standby", "lost")] == [2, None, None]
    assert (now["state:stopping"], now["state:running"], now["coordinator"]) == (1, 0, 0)
    assert "lease_age_seconds" not in now


def test_what_is_not_known_is_no_level(node: NodeState) -> None:
    """0 is a claim, too."""
    now = shown(node)
    assert now["state:init"] == 1
    assert (now["rendezvous_generation"], now["world_size"], now["nodes:active"]) == (0, 0, 0)
    unknown = "step", "last_step", "restart_budget", "lease_age", "hang_timeout", "replica", "checkpoint"
    assert [name for name in now if name.startswith((*unknown, "check_outcome", "nodes:lost"))] == []


def test_the_paces_are_those_of_this_node_s_ranks(node: NodeState) -> None:
    slow = PaceComparison(3, 200_000, (Straggler("b", 3, 280_000), Straggler("a", 1, 280_000)))
    paces = Paces(3, 20, 300_000, (210_000, 280_000))
    seen = NodeSnapshot("a", "a-1", world=WORLD, comparison=slow, paces=paces)
    node.update(seen, None, "running")
    now = shown(node)
    assert [now[f"step_time_skew_ratio:{rank}"] for rank in (0, 1)] == [1.05, 1.4]
    assert [now[f"straggler:{rank}"] for rank in (0, 1)] == [0, 1]
    for other in (replace(seen, comparison=None), replace(seen, paces=replace(paces, generation=2))):
        node.update(other, None, "running")
        now = shown(node)
        assert [now.get(f"step_time_skew_ratio:{rank}") for rank in (0, 1)] == [None, None]
        assert [now[f"straggler:{rank}"] for rank in (0, 1)] == [0, 0]
