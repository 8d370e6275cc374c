"""The page, the events and the journal of real agents: a browser draws, and the disk has, what has happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.output.journal import EventKind, journals, read_events, read_file
from tests.browser import LACKING, browsing, find_chromium

from .harness import RECORDER, Agent, Job

pytestmark = pytest.mark.usefixtures("in_etcd")

FAILS_ONCE = """
import os, time
from elastic_agent.worker import step
for done in range(1, 2000):
    time.sleep(0.02)
    step(done)
    if done == 30 and os.environ["ELASTIC_AGENT_GENERATION"] == "1":
        raise ValueError("<img src=x onerror=alert(1)>")
time.sleep(600)
"""


def script(job: Job, text: str) -> Path:
    path = job.folder / "script.py"
    path.write_text(text)
    return path


def kinds(agent: Agent) -> list[str]:
    _, page = agent.get("/events")
    return [event["kind"] for event in json.loads(page)["events"]]


def test_a_browser_draws_a_job_that_fails_and_goes_on(job: Job) -> None:
    program = find_chromium()
    if program is None:
        pytest.skip(LACKING)
    agent = job.start("a", "--nproc-per-node=2", "--preload=json", script=(script(job, FAILS_ONCE),))
    with browsing(program) as browser:
        job.wait_for(lambda: agent.says("at http://"), "it serves its pages")
        browser.look(1280, 900)
        browser.open(agent.url + "/")
        browser.wait_for("document.querySelectorAll('#generations li').length === 2")
        browser.wait_for("document.querySelector('#failure').innerText.includes('Traceback')")
        browser.wait_for("document.querySelectorAll('#chart path.edge').length === 1")
        browser.wait_for("document.querySelector('header').innerText.includes('generation 2')")
        browser.wait_for("document.title.startsWith('running')")
        text = browser.text()
        for words in (
            "generation 2",
            "1 node, 2 workers",
            "ValueError: <img src=x onerror=alert(1)>",
            "running",
        ):
            assert words in text, words
        assert browser.problems == []
        os.kill(agent.pid, signal.SIGTERM)
        browser.wait_for("document.getElementById('link').innerText !== 'live'")
        assert "ValueError: <img src=x onerror=alert(1)>" in browser.text(), "the last that is known stays"


def test_what_is_served_is_in_the_file(job: Job) -> None:
    logs = job.folder / "logs"
    agent = job.start("a", f"--log-dir={logs}", script=(RECORDER, "--report"))
    old = job.wait_for_training(world=1)
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=1, after=1)
    served = kinds(agent)
    os.kill(agent.pid, signal.SIGTERM)
    agent.exit_code()
    [folder] = logs.iterdir()
    [file] = journals(folder)["a"]
    events = list(read_file(file))
    assert [event.kind.value for event in events[: len(served)]] == served
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert events[-1].kind is EventKind.AGENT_ENDED
    assert events[-1].counts == {"code": agent.process.returncode}
    command = (sys.executable, "-m", "elastic_agent", "events", str(folder), "--json")
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert list(read_events(shown.splitlines())) == events
    [failure] = [event for event in events if event.kind is EventKind.FAILURE]
    assert (failure.rank, failure.about, failure.generation) == (0, "a", 1)
    worlds = [event for event in events if event.kind is EventKind.WORLD]
    assert [event.generation for event in worlds] == [1, 2]


@pytest.mark.long
def test_without_a_directory_for_files_events_are_served_all_the_same(job: Job) -> None:
    agent = job.start("a", "--log-dir=/dev/null")
    job.wait_for_training(world=1)
    job.wait_for(lambda: "accounting" in kinds(agent), "the events are served")
    assert kinds(agent)[:2] == ["agent_started", "world"]
    page = agent.get("/events?since=2")[1]
    assert json.loads(page)["events"][0]["number"] == 3
    assert agent.get("/events?since=x")[0] == 400
