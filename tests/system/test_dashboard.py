"""A real Prometheus watches three agents through a killed worker and a lost node, and answers all that we ask of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard import PROMETHEUS, RULES, Question, questions
from tests.prometheus_server import Prometheus, prometheus

from .harness import RECORDER, Agent, Job

SCRAPES = {"15s": "200ms"}
"""The sample configuration's interval, and ours."""

ANSWERED_S = 20.0


def watch(agents: list[Agent], folder: Path) -> Path:
    """The sample configuration, in a hurry and with these agents as its targets."""
    shutil.copytree(PROMETHEUS, folder)
    shutil.rmtree(folder / "targets")
    (folder / "targets").mkdir()
    targets = [agent.url.removeprefix("http://") for agent in agents]
    (folder / "targets" / "job.json").write_text(json.dumps([{"targets": targets}]))
    config = folder / "scrape.yml"
    for slow, fast in SCRAPES.items():
        assert slow in config.read_text()
        config.write_text(config.read_text().replace(slow, fast))
    return config


@pytest.fixture
def watched(job: Job) -> Iterator[tuple[list[Agent], Prometheus]]:
    """Three agents that Prometheus has scraped from their first step on."""
    checkpoint = job.folder / "checkpoint"
    script = (RECORDER, f"--checkpoint={checkpoint}", "--say=step")
    agents = [job.join(name, "--nnodes=2:3", "--max-restarts=5", script=script) for name in ("a", "b", "c")]
    job.wait_for(lambda: checkpoint.exists(), "the first checkpoint")
    with prometheus(watch(agents, job.folder / "prometheus")) as server:
        server.wait_for("count(elastic_agent_step) == 3")
        yield agents, server


def test_every_question_of_the_dashboard_is_answered(
    job: Job, watched: tuple[list[Agent], Prometheus]
) -> None:
    agents, server = watched
    since = time.time()
    first = job.wait_for_training(world=3)
    os.kill(first.pid(first.rank_on("b")), signal.SIGKILL)
    second = job.wait_for_training(world=3, after=first.number)
    server.wait_for("count(elastic_agent_last_step_timestamp_seconds) == 3")
    agents[2].kill()
    third = job.wait_for_training(world=2, after=second.number)

    [(labels, _)] = server.wait_for(f"elastic_agent_rendezvous_generation{{node='a'}} == {third.number}")
    variables = {"run_id": labels["run_id"], "node": ".*", "__range": "2m", "__rate_interval": "2s"}
    silent = list(questions(variables))

    def answered(question: Question) -> bool:
        if question.instant:
            return bool(server.query(question.expression))
        return bool(server.query_since(question.expression, since))

    deadline = time.monotonic() + ANSWERED_S
    while silent and time.monotonic() < deadline:
        silent = [question for question in silent if not answered(question)]
    assert [f"{question.where}: {question.expression}" for question in silent] == []

    rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    alerts = {rule["name"] for rule in rules if rule["type"] == "alerting"}
    assert alerts == set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    # The lost node's series are gone, and that is seen; the five minutes until it is told are promtool's business.
    server.wait_for('ALERTS{alertname="ElasticAgentNodeLost", node="c", alertstate="pending"}')
    assert server.query('ALERTS{alertstate="firing"}') == []
