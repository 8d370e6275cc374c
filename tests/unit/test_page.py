"""What the page is made of: the rate of steps, the state that it draws, what a viewer is sent, and what it may load."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.observability.job_report import JobReport, report
from elastic_agent.agent.observability.page import (
    COLUMNS,
    MOST_EVENTS,
    RESTS_S,
    Board,
    overview,
    read_page,
)
from elastic_agent.agent.observability.sources import CannotShow, Found
from elastic_agent.agent.observability.status import Checkpoint, JobStatus
from elastic_agent.agent.observability.steps import Rates, StepRate
from elastic_agent.agent.output.journal import EVENT, Journal, Kind
from elastic_agent.health.http import Request
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    Failure,
    Member,
    NodeRecord,
    Phase,
    Result,
    World,
)
from elastic_agent.rendezvous.statements.exclusion import Exclusion
from tests.unit.test_status_pages import STATUS

NO_RATES = Rates(2.0, 0.0, None)

# --- The rate of steps


def test_steps_are_in_the_slices_in_which_they_were_done() -> None:
    rate = StepRate(100.0, width_s=2.0)
    rate.add(101.0, 101.5, 5, 0)
    rate.add(101.5, 102.5, 2, 0)
    rate.add(103.0, 109.0, 0, 3)
    rates = rate.read(109.5)
    assert rates.new == (6.0, 1.0, 0.0, 0.0, 0.0)
    assert rates.again == (0.0, 0.5, 1.0, 1.0, 0.5)
    assert (rates.width_s, rates.left_s, rates.last_s) == (2.0, 0.5, 0.5)


def test_before_the_first_step_no_rate_is_known() -> None:
    assert StepRate(0.0).read(7.0).last_s is None


@pytest.mark.parametrize("hours", [1, 5, 100, 3000])
def test_the_whole_job_is_there_in_bounded_memory(hours: int) -> None:
    rate = StepRate(0.0, width_s=2.0, most=100)
    for minute in range(hours * 60):
        rate.add(minute * 60, minute * 60 + 60, 10, 1)
    rates = rate.read(hours * 3600)
    assert len(rates.new) <= 100
    assert rates.width_s * len(rates.new) - rates.left_s == hours * 3600
    assert sum(rates.new) == pytest.approx(hours * 600, abs=0.1)
    assert sum(rates.again) == pytest.approx(hours * 60, abs=0.1)


# --- The state


def job_of(nodes: int, **changes: Any) -> JobReport:
    """A job of so many nodes of 8 workers each, of which the last does not answer."""
    records = tuple(
        NodeRecord(f"n{place}", f"n{place}-1", f"h{place}", 1000, 8, http=Endpoint(f"h{place}", 9100))
        for place in range(nodes)
    )
    members = tuple(
        Member(record.node, record.incarnation, 8, 8 * place, http=record.http)
        for place, record in enumerate(records)
    )
    world = World("digits", 3, Phase.RUNNING, members, Endpoint("h0", 29500), Cause(CauseKind.START))
    status = JobStatus("digits", world, records, "n0", complete=True)
    answers = {
        record.incarnation: replace(
            STATUS, node=record.node, incarnation=record.incarnation, state="running", **changes
        )
        for record in records[:-1]
    }
    return report(Found("agent h0:9100", status), answers, {})


def test_a_node_is_a_row_and_the_newest_checkpoint_of_each_tier_has_its_age() -> None:
    disk, memory = Checkpoint(12, 3.25), Checkpoint(17, None)
    shown = overview(job_of(3, checkpoint=disk, memory=memory), "", None, NO_RATES, 1000.0)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in shown["nodes"]]
    assert [(row["node"], row["first_rank"], row["state"]) for row in rows] == [
        ("n0", 0, "running"),
        ("n1", 8, "running"),
        ("n2", 16, "hidden"),
    ]
    assert rows[0]["coordinates"]
    assert rows[0]["address"] == "h0:9100"
    assert shown["checkpoints"] == [
        {"tier": "memory", "step": 17, "age_s": None, "nodes": 2},
        {"tier": "disk", "step": 12, "age_s": 3.2, "nodes": 2},
    ]
    assert shown["job"]["state"] == "running"
    assert json.loads(json.dumps(shown))["at"] == 1000.0


def test_nodes_that_are_excluded_now_are_in_the_state_the_newest_first() -> None:
    rows = (
        Exclusion("n5", "l", "xid", "GPU 3 is lost, token=c4n4ry", readmitted=True),
        Exclusion("n6", "l", "xid", "GPU 3 is lost, token=c4n4ry", times=2),
        Exclusion("n7", "", "operator", "a fan is loud", by_operator=True),
    )
    job = replace(job_of(1), exclusions=rows)
    shown = overview(job, "", None, NO_RATES, 1000.0)["excluded"]
    assert [one["node"] for one in shown] == ["n7", "n6"]
    assert shown[0]["text"].startswith(
        "node n7 is excluded by an operator: a fan is loud. It stays out until"
    )
    assert shown[1]["text"].startswith("node n6 is excluded for the 2nd time: GPU 3 is lost, token=***")
    ended = overview(replace(job, result=Result.SUCCEEDED), "", None, NO_RATES, 1000.0)
    assert ended["excluded"] == []


def test_a_thousand_nodes_are_an_eighth_of_a_megabyte() -> None:
    text = json.dumps(overview(job_of(1000), "", None, NO_RATES, 0.0), separators=(",", ":"))
    assert len(text) < 128 * 1024


def test_a_job_that_cannot_be_looked_at_says_why() -> None:
    shown = overview(None, "no process listens", None, NO_RATES, 0.0)
    assert (shown["job"], shown["problem"]) == (None, "no process listens")


def test_the_last_failure_comes_with_its_traceback() -> None:
    failure = Failure(
        *(2, "print", "ValueError: lr < 0"),
        node="b",
        rank=3,
        local_rank=1,
        traceback="Traceback ...",
        log_tail=("last",),
        log_file="/l",
    )
    shown = overview(None, "", failure, NO_RATES, 0.0)["failure"]
    assert (shown["rank"], shown["node"], shown["generation"]) == (3, "b", 2)
    assert (shown["traceback"], shown["log_tail"], shown["log_file"]) == ("Traceback ...", "last", "/l")
    told = replace(failure, traceback="hf_abcdefgh12 and s3cr3t", log_tail=("TOKEN=x1", "s3cr3t"))
    shown = overview(None, "", replace(told, summary="s3cr3t"), NO_RATES, 0.0, ["s3cr3t"])
    assert "s3cr3t" not in json.dumps(shown)
    assert shown["failure"]["traceback"] == "*** and ***"
    assert shown["failure"]["log_tail"] == "TOKEN=***\n***"
    bare = overview(None, "", Failure(2, "print", "gone"), NO_RATES, 0.0)["failure"]
    assert bare == {"generation": 2, "summary": "gone", "cause": "unknown", "action": "restart"}


# --- What a viewer is sent


class Looking:
    """Where the state comes from, in a test: a number that goes up."""

    def __init__(self) -> None:
        self.looks = 0
        self.problem: Exception | None = None
        self.looking = threading.Event()
        self.nodes_answer = threading.Event()
        self.nodes_answer.set()

    def look(self) -> list[JobReport]:
        self.looks += 1
        self.looking.set()
        assert self.nodes_answer.wait(20.0)
        if self.problem is not None:
            raise self.problem
        return [job_of(2)]

    def describe(self, job: JobReport | None, problem: str) -> dict[str, Any]:
        return {"look": self.looks, "job": job.job if job is not None else None, "problem": problem}


@pytest.fixture
def looking() -> Looking:
    return Looking()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def journal() -> Journal:
    return Journal("a", lambda: 1000.0)


@pytest.fixture
def board(looking: Looking, journal: Journal, now: list[float]) -> Board:
    about = {"job": "digits", "node": "a", "incarnation": "a-1", "version": "1"}
    return Board(journal, about, looking.look, looking.describe, lambda: now[0])


def state(board: Board) -> Any:
    page = board.state(Request({}))
    assert page.status is HTTPStatus.OK
    return json.loads(page.body)


def test_the_state_is_read_when_a_page_asks_and_all_pages_get_the_same_for_a_while(
    board: Board, looking: Looking, now: list[float]
) -> None:
    assert looking.looks == 0
    first = state(board)
    assert first["job"] == "digits"
    now[0] += 0.9 * RESTS_S
    assert state(board) == first
    now[0] += 0.2 * RESTS_S
    assert state(board)["look"] > first["look"]


def test_who_asks_while_another_looks_gets_the_state_before(
    board: Board, looking: Looking, now: list[float]
) -> None:
    first = state(board)
    now[0] += RESTS_S
    looking.looking.clear()
    looking.nodes_answer.clear()
    looker = threading.Thread(target=state, args=(board,), daemon=True)
    looker.start()
    try:
        assert looking.looking.wait(20.0)
        asker = threading.Thread(target=lambda: others.append(state(board)), daemon=True)
        others: list[Any] = []
        asker.start()
        asker.join(20.0)
        assert others == [first]
    finally:
        looking.nodes_answer.set()
        looker.join(20.0)
    assert state(board)["look"] == 2


@pytest.mark.parametrize(
    ("problem", "shown"),
    [
        (CannotShow(ExitCode.NO_ANSWER, "it stands still"), "it stands still"),
        (
            RuntimeError("can't start new thread"),
            'the agent could not look: RuntimeError("can\'t start new thread")',
        ),
    ],
)
def test_what_fails_while_it_looks_is_shown_and_ends_nothing(
    board: Board, looking: Looking, now: list[float], problem: Exception, shown: str
) -> None:
    looking.problem = problem
    assert state(board)["problem"] == shown
    looking.problem = None
    now[0] += RESTS_S
    assert state(board)["job"] == "digits"


def test_events_are_given_from_a_number_on(board: Board, journal: Journal) -> None:
    for number in range(MOST_EVENTS + 2):
        journal.note(Kind.DRAIN, f"{number} \u2028 <script>")
    page = board.events(Request({"since": "1"}))
    document = json.loads(page.body)
    assert page.status is HTTPStatus.OK
    assert [event["number"] for event in document["events"]] == list(range(2, MOST_EVENTS + 2))
    assert (document["schema"], document["newest"], document["incarnation"]) == (1, MOST_EVENTS + 2, "a-1")
    assert EVENT.unpack(document["events"][0]).text.startswith("1 ")


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "", "٣", "9" * 40])
def test_a_number_that_is_none_is_refused_with_what_was_expected(board: Board, since: str) -> None:
    page = board.events(Request({"since": since}))
    assert page.status is HTTPStatus.BAD_REQUEST
    assert b"expected a whole number" in page.body


# --- What it may load


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    page = read_page()
    headers = dict(line.split(": ", 1) for line in page.headers)
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


@pytest.mark.parametrize(
    "words", ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "style="]
)
def test_the_page_has_no_way_to_make_markup_of_a_text(words: str) -> None:
    assert words not in read_page().body.decode()


def test_the_page_is_complete() -> None:
    """Nothing is loaded from elsewhere: the only addresses in it are made of a node's own, and that of SVG."""
    text = read_page().body.decode()
    assert re.findall(r"(?:src|href)\s*=\s*\"(?!data:,\")", text) == []
    assert set(re.findall(r"https?://[^\"`\s]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://${node.address}/",
    }
