"""What the page is made of: the rate of steps, the state that it draws, what a viewer is sent, and what it may load."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest

from elastic_agent.agent.common.exits import CannotDo, ExitCode
from elastic_agent.agent.observability.job_report import (
    MOST_EVENTS,
    Board,
    JobReport,
    as_json,
    read_page,
    report,
)
from elastic_agent.agent.observability.sources import FoundJob, JobSource
from elastic_agent.agent.observability.status import Checkpoint, JobStatus, NodeState, StepRate
from elastic_agent.agent.output.journal import EVENT, EventKind, Journal
from elastic_agent.health.http import PageRequest
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    Failure,
    Member,
    NodeRecord,
    Phase,
    World,
)
from tests.observed import a_node
from tests.unit.test_status_pages import STATUS

# --- The rate of steps


def test_totals_are_kept_at_some_instants_and_a_pause_is_none_of_steps() -> None:
    rate = StepRate(every_s=2.0)
    rate.add(101.0, 101.5, 5, 0)
    rate.add(101.5, 103.5, 2, 0)
    rate.add(113.5, 114.0, 0, 3)
    assert rate.read(115.0) == [(14.0, 0, 0), (11.5, 7, 0), (1.5, 7, 0), (1.0, 7, 3)]


@pytest.mark.parametrize("hours", [1, 5, 100])
def test_the_whole_job_is_there_in_bounded_memory(hours: int) -> None:
    rate = StepRate(most=100)
    for minute in range(hours * 60):
        rate.add(minute * 60, minute * 60 + 60, 10, 1)
    totals = rate.read(hours * 3600)
    assert len(totals) <= 101
    assert totals[0] == (hours * 3600, 0, 0)
    assert totals[-1] == (0.0, hours * 600, hours * 60)


# --- The state


def found_job(nodes: int) -> FoundJob:
    """A job of so many nodes of 8 workers each."""
    records = tuple(NodeRecord(f"n{place}", f"n{place}-1", f"h{place}", 1000, 8) for place in range(nodes))
    members = tuple(
        Member(record.node, record.incarnation, 8, 8 * place) for place, record in enumerate(records)
    )
    world = World("digits", 3, Phase.RUNNING, members, Endpoint("h0", 29500), Cause(CauseKind.START))
    return FoundJob("agent h0:9100", JobStatus("digits", world, records, "n0", complete=True))


def job_of(nodes: int, **changes: Any) -> JobReport:
    """The last of them does not answer."""
    found = found_job(nodes)
    answers = {
        record.incarnation: replace(
            STATUS, node=record.node, incarnation=record.incarnation, state="running", **changes
        )
        for record in found.job.nodes[:-1]
    }
    return report(found, answers)


class OneJob(JobSource):
    """Where the state comes from, in a test."""

    def __init__(self) -> None:
        self.looks = 0
        self.problem: Exception | None = None
        self.nodes = 2

    def jobs(self) -> list[FoundJob]:
        self.looks += 1
        if self.problem is not None:
            raise self.problem
        return [found_job(self.nodes)]


@pytest.fixture
def source() -> OneJob:
    return OneJob()


@pytest.fixture
def journal() -> Journal:
    return Journal("a", lambda: 1000.0)


@pytest.fixture
def node() -> NodeState:
    return a_node(wall_clock=lambda: 1000.0, secrets=["s3cr3t"])


@pytest.fixture
def board(source: OneJob, journal: Journal, node: NodeState) -> Board:
    about = {"job": "digits", "node": "a", "incarnation": "a-1", "version": "1"}
    return Board(journal, about, node, source)


def state(board: Board) -> Any:
    page = board.overview(PageRequest({}))
    assert page.status is HTTPStatus.OK
    return json.loads(page.body)


def test_the_newest_checkpoint_of_each_tier_has_its_age() -> None:
    disk, memory = Checkpoint(12, 3.25), Checkpoint(17, None)
    shown = as_json(job_of(3, checkpoint=disk, memory=memory))
    assert [(node["node"], node["first_rank"], node["state"]) for node in shown["nodes"]] == [
        ("n0", 0, "running"),
        ("n1", 8, "running"),
        ("n2", 16, "hidden"),
    ]
    assert shown["checkpoint"] == {"step": 12, "age_s": 3.25}
    assert shown["memory"] == {"step": 17, "age_s": None}
    assert shown["replica"] is None


def test_the_last_failure_comes_with_its_traceback(board: Board, node: NodeState) -> None:
    assert state(board)["failure"] is None
    node.failure = Failure(
        *(2, "print", "ValueError: lr < 0"),
        node="b",
        rank=3,
        local_rank=1,
        traceback="Traceback ...",
        log_tail=("last",),
        log_file="/l",
    )
    shown = state(board)["failure"]
    assert (shown["rank"], shown["node"], shown["generation"]) == (3, "b", 2)
    assert (shown["traceback"], shown["log_tail"], shown["log_file"]) == ("Traceback ...", "last", "/l")
    told = replace(node.failure, traceback="hf_abcdefgh12 and s3cr3t", log_tail=("TOKEN=x1", "s3cr3t"))
    node.failure = replace(told, summary="s3cr3t")
    shown = state(board)
    assert "s3cr3t" not in json.dumps(shown)
    assert shown["failure"]["traceback"] == "*** and ***"
    assert shown["failure"]["log_tail"] == "TOKEN=***\n***"
    node.failure = Failure(2, "print", "gone")
    bare = state(board)["failure"]
    assert (bare["summary"], bare["rank"], bare["traceback"]) == ("gone", None, "")


def test_the_state_is_read_when_a_page_asks(board: Board, source: OneJob, node: NodeState) -> None:
    assert source.looks == 0
    node.rate.add(-3.0, -2.0, 4, 1)
    shown = state(board)
    assert (shown["job"]["job"], shown["at"], shown["problem"]) == ("digits", 1000.0, "")
    assert shown["rates"] == [[3.0, 0, 0], [2.0, 4, 1]]
    assert source.looks == 1


@pytest.mark.parametrize(
    ("problem", "shown"),
    [
        (CannotDo(ExitCode.NO_ANSWER, "it stands still"), "it stands still"),
        (
            RuntimeError("can't start new thread"),
            'the agent could not look: RuntimeError("can\'t start new thread")',
        ),
    ],
)
def test_what_fails_while_it_looks_is_shown_and_ends_nothing(
    board: Board, source: OneJob, problem: Exception, shown: str
) -> None:
    source.problem = problem
    found = state(board)
    assert (found["job"], found["problem"]) == (None, shown)
    source.problem = None
    assert state(board)["job"]["job"] == "digits"


def test_events_are_given_from_a_number_on(board: Board, journal: Journal) -> None:
    for number in range(MOST_EVENTS + 2):
        journal.note(EventKind.DRAIN, f"{number} \u2028 <script>")
    page = board.events(PageRequest({"since": "1"}))
    document = json.loads(page.body)
    assert page.status is HTTPStatus.OK
    assert [event["number"] for event in document["events"]] == list(range(2, MOST_EVENTS + 2))
    assert (document["schema"], document["newest"], document["incarnation"]) == (1, MOST_EVENTS + 2, "a-1")
    assert EVENT.decode(json.dumps(document["events"][0])).text.startswith("1 ")


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "", "٣", "9" * 40])
def test_a_number_that_is_none_is_refused_with_what_was_expected(board: Board, since: str) -> None:
    page = board.events(PageRequest({"since": since}))
    assert page.status is HTTPStatus.BAD_REQUEST
    assert b"expected a whole number" in page.body


# --- What it may load


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    page = read_page()
    headers = dict(page.headers)
    rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    text = page.body.decode()
    for name in ("script", "style"):
        [part] = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        assert (
            rules[f"{name}-src"]
            == f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
        )
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_is_complete() -> None:
    """Nothing is loaded from elsewhere: the only addresses in it are made of a node's own, and that of SVG."""
    text = read_page().body.decode()
    assert re.findall(r"(?:src|href)\s*=\s*\"(?!data:,\")", text) == []
    assert set(re.findall(r"https?://[^\"`\s]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://${node.address}/",
    }
