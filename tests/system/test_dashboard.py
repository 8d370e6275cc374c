"""A real Prometheus watches three agents through a killed worker and a lost node, and answers all that we ask of it."""

from __future__ import annotations

import functools
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
from tests.waiting import wait_for

from .harness import RECORDER, Agent, Job

pytestmark = pytest.mark.usefixtures("in_etcd")

SAMPLE_INTERVAL, INTERVAL = "15s", "200ms"
ANSWERED_S = 20.0


def watch(agents: list[Agent], folder: Path) -> Path:
    """The sample configuration, in a hurry and with these agents as its targets."""
    shutil.copytree(PROMETHEUS, folder, ignore=shutil.ignore_patterns("targets"))
    targets = [agent.url.removeprefix("http://") for agent in agents]
    (folder / "targets").mkdir()
    (folder / "targets" / "job.yml").write_text(json.dumps([{"targets": targets}]))  # JSON is YAML
    config = folder / "scrape.yml"
    assert SAMPLE_INTERVAL in config.read_text()
    config.write_text(config.read_text().replace(SAMPLE_INTERVAL, INTERVAL))
    return config


@pytest.fixture
def watched(job: Job) -> Iterator[tuple[list[Agent], Prometheus]]:
    """Three agents that have saved a checkpoint and that Prometheus scrapes."""
    checkpoint = job.folder / "checkpoint"
    script = (RECORDER, f"--checkpoint={checkpoint}", "--say=step")
    agents = [
        job.join(name, "--nnodes=2:3", "--last-call=30s", "--max-restarts=5", script=script)
        for name in ("a", "b", "c")
    ]
    job.wait_for(checkpoint.exists, "the first checkpoint")
    with prometheus(watch(agents, job.folder / "prometheus")) as server:
        server.wait_for("count(elastic_agent_step) == 3")
        yield agents, server


@pytest.mark.long
def test_a_kill_and_a_lost_node_are_on_the_dashboard(
    job: Job, watched: tuple[list[Agent], Prometheus]
) -> None:
    agents, server = watched
    since = time.time()
    first = job.wait_for_training(world=3)
    os.kill(first.pid(first.rank_on("b")), signal.SIGKILL)
    second = job.wait_for_training(world=3, after=first.number)
    # `increase` adds up to an interval between samples at either end: of few samples it makes twice what there was.
    often = "min(count_over_time(elastic_agent_rendezvous_generation[1m])) >= 10"
    server.wait_for(f"count(elastic_agent_rendezvous_generation == {second.number}) == 3 and {often}")
    agents[2].kill()
    third = job.wait_for_training(world=2, after=second.number)

    [(labels, _)] = server.wait_for(f"elastic_agent_rendezvous_generation{{node='a'}} == {third.number}")
    variables = {"run_id": labels["run_id"], "node": ".*", "__range": "2m", "__rate_interval": "2s"}
    asked = list(questions(variables))
    assert unanswered(server, asked, since) == []

    def shown(panel: str) -> dict[str, float]:
        """The panel's values, each under the labels that tell it from the others."""
        return {
            " ".join(labels[label] for label in sorted(labels)): value
            for question in asked
            if question.panel == panel
            for labels, value in server.query(question.expression)
        }

    for panel, truth in {
        "Agents by state": {"running": 2},
        "Generation": {"": third.number},
        "Workers": {"": 2},
        "Restarts by reason": {"killed": 1, "lost": 1},
        "Restarts left": {"": 4},
        "Worker exits": {"b killed": 1},
    }.items():
        show = functools.partial(shown, panel)
        wait_for(lambda: show() == truth, f"{panel} to be {truth}", ANSWERED_S, seen=show)  # noqa: B023
    job.wait_for(lambda: shown("Recovery time by kind").keys() == {"process", "node"}, "both recoveries")
    job.wait_for(lambda: shown("Lost steps")[""] > 0, "the steps lost with them")
    assert 0 < shown("Goodput")[""] < 1

    judged = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
    assert [rule for rule in judged if rule["health"] != "ok"] == []
    alerts = {rule["name"] for rule in judged if rule["type"] == "alerting"}
    assert alerts == set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    # The lost node's series are gone, and that is seen; the five minutes until it is told are promtool's business.
    server.wait_for('ALERTS{alertname="ElasticAgentNodeLost", node="c", alertstate="pending"}')
    assert server.query('ALERTS{alertstate="firing"}') == []


def unanswered(server: Prometheus, asked: list[Question], since: float) -> list[Question]:
    """Those that give no number within a time in which several scrapes fit. A graph's: at any moment since then."""

    def answered(question: Question) -> bool:
        if question.instant:
            return bool(server.query(question.expression))
        return bool(server.query_since(question.expression, since))

    deadline = time.monotonic() + ANSWERED_S
    while asked and time.monotonic() < deadline:
        asked = [question for question in asked if not answered(question)]
    return asked
