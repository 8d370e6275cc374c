"""The page in a real browser: it draws what the agent sends, and no text that it is sent becomes anything else."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from elastic_agent.agent.observability.job_report import (
    MOST_EVENTS,
    OVERVIEW_PATH,
    PAGE_PATH,
    Board,
    CauseReport,
    JobReport,
    read_page,
)
from elastic_agent.agent.observability.sources import AgentsSource
from elastic_agent.agent.observability.status import Checkpoint, StepRate
from elastic_agent.agent.output.journal import EVENTS_PATH, EventKind, Journal
from elastic_agent.health.http import Answers, HealthServer, Probe
from elastic_agent.rendezvous.records import CauseKind, Endpoint, Failure
from tests.browser import LACKING, Browser, browsing, find_chromium
from tests.observed import a_node
from tests.unit.test_page import job_of

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;\u202e"
"""With a sign that turns the direction of writing around."""


RATES = ((9.0, 0, 0), (7.0, 10, 4), (5.0, 30, 4), (3.0, 50, 4), (1.0, 54, 4))
"""Seconds ago, and the totals then: new steps, and steps that were done again."""


class Rate(StepRate):
    totals: Sequence[tuple[float, int, int]] = RATES

    def read(self, now: float) -> list[tuple[float, int, int]]:
        return list(self.totals)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(LACKING)
    with browsing(program) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.open("about:blank")
    chromium.look(1280, 900)
    chromium.problems.clear()
    chromium.requested.clear()
    return chromium


@dataclass
class Agent:
    """What the page is told of, as tests set it."""

    job: JobReport | None = None
    problem: str = ""
    rate: Rate = field(default_factory=Rate)
    journal: Journal = field(default_factory=lambda: Journal("n0", time.time))
    server: HealthServer | None = None
    port: int = 0

    def __post_init__(self) -> None:
        self.node = a_node(node="n0", wall_clock=time.time)
        self.node.rate = self.rate

    def serve(self) -> None:
        """Begins, or begins again, another life on the same port."""
        life = "n0-1" if self.server is None else "n0-2"
        about = {"job": "digits", "node": "n0", "incarnation": life, "version": "1"}
        board = Board(self.journal, about, self.node, AgentsSource(list, 1.0, here=True))
        board.look = lambda: (self.job, self.problem)  # type: ignore[method-assign]
        page = read_page()
        bind = socket.create_server(("127.0.0.1", self.port), reuse_port=False, backlog=64)
        self.port = bind.getsockname()[1]
        probe = Probe(True, "")
        answers = Answers(
            lambda: b"",
            lambda: probe,
            lambda: probe,
            {PAGE_PATH: lambda _: page, EVENTS_PATH: board.events},
            slow={OVERVIEW_PATH: board.overview},
        )
        self.server = HealthServer(bind, answers)
        self.server.start()

    def end(self) -> None:
        assert self.server is not None
        self.server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent(job_of(1))
    agent.serve()
    yield agent
    agent.end()


def shown(browser: Browser, selector: str) -> str:
    return str(browser.value(f"document.querySelector({json.dumps(selector)}).innerText"))


def test_it_draws_a_job_and_what_happens_to_it(agent: Agent, browser: Browser) -> None:
    agent.job = job_of(3, checkpoint=Checkpoint(12, 3.0), memory=Checkpoint(17, 0.5), step=17)
    agent.journal.note(EventKind.WORLD, "the job starts", generation=1, cause="start", counts={"nodes": 3})
    agent.journal.note(EventKind.WORLD, "rank 3 failed", generation=2, cause="exception", counts={"nodes": 3})
    agent.journal.note(EventKind.RECOVERY, "training resumed after 0.5 s", seconds={"stop": 0.2, "init": 0.3})
    agent.node.failure = Failure(
        *(2, "print", "ValueError: lr < 0", "exception"),
        node="n1",
        rank=3,
        local_rank=1,
        traceback="Traceback ...",
        log_file="/l",
    )
    browser.open(agent.url)
    browser.wait_for("document.title === 'running · digits'")
    browser.wait_for("document.querySelectorAll('#nodes tbody tr').length === 3")
    text = browser.text()
    for words in (
        *(
            "digits",
            "running",
            "generation 3",
            "3 nodes, 24 workers",
            "n0",
            "coordinates",
            "hidden",
            "0\u20137",
        ),
        *("step 17", " s ago", "step 12", "rank 3 failed", "training resumed after 0.5 s", "Traceback ..."),
        *("rank 3 on node n1, generation 2", "all that it printed: /l", "live"),
    ):
        assert words in text, words
    assert browser.value("document.querySelectorAll('#chart path.edge').length") == 1
    assert browser.value("document.querySelector('#chart path.again').getAttribute('d').length") > 10
    agent.journal.note(EventKind.STRAGGLER, "rank 9 on node n1 is slow", generation=3, rank=9, about="n1")
    browser.wait_for("document.querySelector('#stragglers').innerText.includes('n1')")
    assert "rank 9 on node n1 is slow" in shown(browser, "#stragglers")
    browser.wait_for("document.querySelector('#nodes').innerText.includes('slow')")
    recovered = "rank 9 on node n1 is as fast as the others again"
    agent.journal.note(EventKind.STRAGGLER, recovered, generation=3, rank=9, about="n1", cause="recovered")
    browser.wait_for("!document.querySelector('#nodes').innerText.includes('slow')")
    assert browser.problems == []


def test_an_exclusion_is_shown_as_long_as_it_lasts_however_many_events_follow_it(
    agent: Agent, browser: Browser
) -> None:
    whole = agent.job
    assert whole is not None
    agent.journal.note(EventKind.EXCLUSION, "node n7 is left out", about="n7", cause="operator")
    for number in range(2 * MOST_EVENTS):
        agent.journal.note(EventKind.DRAIN, f"change {number}")
    agent.job = replace(whole, notes=("node n7 is excluded by an operator: a <b>fan</b> is loud",))
    browser.open(agent.url)
    excluded = "document.querySelector('#notes').innerText"
    browser.wait_for(f"{excluded}.includes('n7 is excluded by an operator: a <b>fan</b> is loud')")
    agent.job = whole
    browser.wait_for(f"document.querySelector('#notes-sheet').hidden || !{excluded}.includes('n7')")
    assert browser.problems == []


def test_it_asks_its_own_agent_alone(agent: Agent, browser: Browser) -> None:
    browser.open(agent.url)
    browser.wait_for("document.title === 'running · digits'")
    asked = [url for url in browser.requested if not url.startswith(("data:", "about:"))]
    assert asked[:3] == [agent.url, f"{agent.url}events?since=0", f"{agent.url}overview"]
    assert all(url.startswith(agent.url) for url in asked)
    assert browser.problems == []


def test_texts_of_others_stay_text(agent: Agent, browser: Browser) -> None:
    job = job_of(2, notice=HOSTILE)
    nodes = tuple(replace(node, node=f"{HOSTILE}{place}") for place, node in enumerate(job.nodes))
    cause = CauseReport(CauseKind.FAILURE, HOSTILE, 1, HOSTILE)
    agent.job = replace(job, job=HOSTILE, nodes=nodes, cause=cause, notes=(HOSTILE,), waiting_for=HOSTILE)
    agent.problem = HOSTILE
    agent.node.failure = Failure(
        *(2, "print", HOSTILE),
        local_rank=1,
        exception=HOSTILE,
        traceback=HOSTILE,
        log_tail=(HOSTILE,),
        log_file=HOSTILE,
    )
    for kind in EventKind:
        agent.journal.note(
            kind, HOSTILE, cause=HOSTILE, about=HOSTILE, seconds={HOSTILE: 1.0}, counts={HOSTILE: 1}
        )
    browser.open(agent.url)
    browser.wait_for("document.title.includes('img src')")
    for selector in ("#job", "#why", "#waiting", "#nodes", "#failure", "#generations", "#events", "#notes"):
        assert "<img src=x" in shown(browser, selector), selector
    assert browser.value("document.querySelectorAll('main img, main script, [onerror]').length") == 0
    assert browser.value("document.title") != "owned"
    assert browser.problems == []


def test_an_address_that_is_none_is_no_link(agent: Agent, browser: Browser) -> None:
    job = job_of(4)
    addresses = (
        Endpoint("h0", 1),
        Endpoint("javascript:alert(1)//", 1),
        Endpoint("h:1/?<x>", 2),
        Endpoint("::1", 3),
    )
    nodes = tuple(replace(node, address=http) for node, http in zip(job.nodes, addresses, strict=True))
    agent.job = replace(job, nodes=nodes)
    browser.open(agent.url)
    browser.wait_for("document.querySelectorAll('#nodes tbody tr').length === 4")
    links = "[...document.querySelectorAll('#nodes a')].map((a) => a.href)"
    assert browser.value(links) == ["http://[::1]:3/"]
    assert browser.problems == []


def test_a_thousand_nodes_are_drawn_and_those_in_need_come_first(agent: Agent, browser: Browser) -> None:
    agent.job = job_of(1000)
    browser.open(agent.url)
    browser.wait_for("document.querySelectorAll('#map i').length === 1000")
    assert "999 running, 1 hidden" in browser.text().replace("\u2009", "")
    assert browser.value("document.querySelectorAll('#nodes tbody tr').length") == 24
    browser.value("document.querySelector('#nodes-more button').click()")
    browser.wait_for("document.querySelectorAll('#nodes tbody tr').length === 1000")
    find = (
        "const f = document.getElementById('filter'); f.value = 'N77'; f.dispatchEvent(new Event('input')); 1"
    )
    browser.value(find)
    browser.wait_for("document.querySelectorAll('#nodes tbody tr').length === 11")
    assert browser.problems == []


def test_it_says_when_it_has_lost_its_agent_and_goes_on_with_the_next(agent: Agent, browser: Browser) -> None:
    agent.journal.note(EventKind.LOAD, "saved by the first")
    browser.open(agent.url)
    browser.wait_for("document.title === 'running · digits'")
    agent.end()
    browser.wait_for("document.getElementById('banner').innerText.includes('No connection to the agent')")
    assert browser.value("document.getElementById('all').classList.contains('stale')")
    assert "running" in shown(browser, "#state"), "the last that is known stays"
    agent.journal = Journal("n0", time.time)
    agent.journal.note(EventKind.LOAD, "saved by the next")
    agent.serve()
    browser.wait_for("document.getElementById('link').innerText === 'live'")
    browser.wait_for("document.getElementById('events').innerText.includes('saved by the next')")
    assert "saved by the first" not in browser.text()
    assert browser.value("document.getElementById('banner').hidden")


@pytest.mark.parametrize(
    ("result", "state"), [("", "ended"), ("succeeded", "succeeded"), ("crash_loop", "failed")]
)
def test_an_agent_that_has_ended_is_no_lost_connection(
    result: str, state: str, agent: Agent, browser: Browser
) -> None:
    """Its last look at the job was before that."""
    browser.open(agent.url)
    browser.wait_for("document.title === 'running · digits'")
    if result:
        agent.journal.note(EventKind.JOB_ENDED, "it is over", cause=result)
    agent.journal.note(EventKind.AGENT_ENDED, "every worker ended with success", counts={"code": 0})
    browser.wait_for("document.getElementById('events').innerText.includes('every worker')")
    agent.end()
    browser.wait_for("document.getElementById('banner').innerText.includes('has ended')")
    assert shown(browser, "#link") == "ended"
    assert shown(browser, "#state") == state
    assert browser.value("document.title") == f"{state} · digits"


@pytest.mark.parametrize("width", [320, 768])
def test_nothing_is_wider_than_a_phone(agent: Agent, browser: Browser, width: int) -> None:
    agent.job = job_of(30, checkpoint=Checkpoint(123_456, 3.0), step=123_456)
    long = "x" * 300
    agent.node.failure = Failure(2, "print", long)
    agent.journal.note(EventKind.WORLD, long, generation=1, cause="exception")
    browser.look(width, 800, phone=True)
    browser.open(agent.url)
    browser.wait_for("document.title === 'running · digits'")
    browser.wait_for("document.querySelectorAll('#nodes tbody tr').length === 24")
    assert browser.value("document.documentElement.scrollWidth") <= width
