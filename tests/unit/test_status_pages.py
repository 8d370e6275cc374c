"""The pages for an operator: what one agent writes another's command reads back, and nothing else gets through."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.agent.main.heartbeat import Probes
from elastic_agent.agent.observability.status import (
    JOB_PAGE,
    MAX_JOB_BYTES,
    MAX_STATUS_BYTES,
    SCHEMA,
    STATUS_PAGE,
    Checkpoint,
    JobStatus,
    NodeStatus,
    StatusPages,
    job_page,
)
from elastic_agent.codec import Invalid
from elastic_agent.rendezvous.node.snapshot import NodeSnapshot
from elastic_agent.rendezvous.records import (
    MAX_TEXT,
    Cause,
    CauseKind,
    Endpoint,
    Failure,
    Introduction,
    NodeRecord,
    Phase,
    Restarts,
    World,
    line_up,
)
from elastic_agent.rendezvous.statements.exclusion import MAX_EXCLUSION_REASON, Exclusion
from elastic_agent.worker.wire.messages import LoadReport, SaveReport

STATUS = NodeStatus(
    job="digits",
    node="a",
    incarnation="a-1",
    version="0.1.0",
    agent_age_s=20.0,
    state="running",
    waiting_for="",
    coordinates=True,
    world=3,
    phase="running",
    phase_s=4.5,
    generation=3,
    workers=2,
    running_s=4.0,
    step=17,
    step_age_s=0.5,
    checkpoint=Checkpoint(12, 3.25),
    memory=Checkpoint(17, 0.5),
    replica=None,
    lease_age_s=0.25,
    lease_ttl_s=5.0,
    max_restarts=None,
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
    members=line_up(NODES),
    master=Endpoint("10.0.0.1", 4711),
    cause=Cause(CauseKind.FAILURE, "b", FAILURE.summary, FAILURE),
)
JOB = JobStatus("digits", WORLD, NODES, "a", complete=True)


@pytest.mark.parametrize(
    "status",
    [
        STATUS,
        replace(STATUS, phase_s=None, running_s=None, step_age_s=None, lease_age_s=None, checkpoint=None),
        replace(STATUS, max_restarts=3, checkpoint=Checkpoint(12, None)),
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
    pages = StatusPages(
        "digits", "b", "b-1", "1", lease_ttl_s=5.0, max_restarts=3, clock=lambda: 0.0, secrets={CANARY}
    )
    waiting_for = f"excluded: {excluded.reason}"
    pages.update(NodeSnapshot("b", "b-1", world=world, waiting_for=waiting_for), None, "joining", 0.0)
    assert CANARY not in pages.job() + pages.node()
    shown = JOB_PAGE.decode(pages.job()).world
    assert shown is not None
    assert shown.cause.detail == "exit code 1: ValueError: *** is no number"
    found = shown.cause.failure
    assert found is not None
    assert found.summary == shown.cause.detail
    assert shown.exclusions[0].reason == f"its workers failed: {shown.cause.detail}"
    assert status_of(pages).waiting_for == f"excluded: its workers failed: {shown.cause.detail}"


def test_nor_in_the_answer_to_who_asks_whether_an_excluded_node_is_ready() -> None:
    snapshot = NodeSnapshot("b", "b-1", waiting_for=f"excluded: exit code 1: ValueError: {CANARY}")
    probes = Probes(Introduction("b", "b-1", generation=0), lambda: 0.0, secrets={CANARY})
    probes.begin(SimpleNamespace(snapshot=snapshot), SimpleNamespace())  # type: ignore[arg-type]
    assert probes.readiness().detail == "waiting: excluded: exit code 1: ValueError: ***"


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
    ("job", "a job"),
    ("job", "x" * 129),
    ("node", "\x1b[2J"),
    ("incarnation", None),
    ("version", "v" * 65),
    ("agent_age_s", None),
    ("agent_age_s", -1),
    ("agent_age_s", "1"),
    ("agent_age_s", float("nan")),
    ("agent_age_s", float("inf")),
    ("state", "run ning"),
    ("waiting_for", "x" * 4097),
    ("waiting_for", 7),
    ("coordinates", 1),
    ("world", -1),
    ("phase", "x" * 17),
    ("phase_s", True),
    ("generation", 1.5),
    ("generation", 2**63),
    ("workers", 4097),
    ("running_s", []),
    ("step", "17"),
    ("step_age_s", {}),
    ("checkpoint", []),
    ("checkpoint", {"step": 1}),
    ("checkpoint", {"step": -1, "age_s": None}),
    ("checkpoint", {"step": 1, "age_s": "old"}),
    ("lease_age_s", False),
    ("lease_ttl_s", None),
    ("max_restarts", -1),
    ("max_restarts", "auto"),
    ("backoff_s", None),
    ("notice", None),
    ("notice_s", "soon"),
    ("partners_unreachable", "c"),
    ("partners_unreachable", ["c"] * 9),
    ("checks", {}),
    ("checks", [{"check": "gpu-ecc"}]),
    ("checks", [{"check": "a b", "outcome": "fail", "summary": "", "advice": ""}]),
    ("checks", [{"check": "gpu-ecc", "outcome": "fail", "summary": "x" * 513, "advice": ""}]),
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
    world = replace(WORLD, members=line_up(nodes))
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
def pages(clock: Clock) -> StatusPages:
    return StatusPages("digits", "a", "a-1", "0.1.0", lease_ttl_s=5.0, max_restarts=3, clock=clock)


def status_of(pages: StatusPages) -> NodeStatus:
    return STATUS_PAGE.decode(pages.node())


def test_before_it_has_found_the_store_an_agent_waits_for_it(pages: StatusPages, clock: Clock) -> None:
    clock.now += 2.0
    status = status_of(pages)
    assert (status.state, status.waiting_for, status.agent_age_s) == ("init", "the rendezvous store", 2.0)
    assert (status.generation, status.checkpoint, status.lease_age_s, status.phase_s) == (0, None, None, None)
    assert JOB_PAGE.decode(pages.job()) == JobStatus("digits", None, (), None, complete=False)


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
    pages: StatusPages, clock: Clock, reports: list[Any], expected: Checkpoint | None
) -> None:
    for report in reports:
        pages.reported(report, clock())
        clock.now += 1.0
    assert status_of(pages).checkpoint == expected


def test_a_step_is_as_old_as_its_end_and_no_checkpoint(pages: StatusPages, clock: Clock) -> None:
    pages.reported(saved(5), clock())
    for step in (7, 8):
        pages.stepped(step, clock() - 0.25)
        clock.now += 1.5
    status = status_of(pages)
    assert (status.step, status.step_age_s) == (8, 1.75)
    assert status.checkpoint == Checkpoint(5, 3.0)
