"""Rules and alerts: promtool runs their own tests, and each alert says how bad it is and where to read on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dashboard import PROMETHEUS, REPOSITORY, RULES, unknown_metrics

RUNBOOK = REPOSITORY / "docs" / "runbook.md"
ALERTS = dict(
    re.findall(r"^ +- alert: (\w+)\n((?:.|\n)*?)(?=^ +- alert: |\Z)", RULES.read_text(), re.MULTILINE)
)
FIRING = re.compile(r"alertname: (\w+)\n +exp_alerts:\n +- exp_labels")


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    return found


def test_the_sample_configuration_is_one(promtool: str) -> None:
    command = [promtool, "check", "config", PROMETHEUS / "scrape.yml"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    assert "1 rule files found" in checked.stdout


def test_the_rules_pass_their_own_tests(promtool: str) -> None:
    command = [promtool, "test", "rules", "tests.yml"]
    tested = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_seen_firing() -> None:
    assert set(FIRING.findall((PROMETHEUS / "tests.yml").read_text())) == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_severity_a_summary_and_a_page_to_read(name: str) -> None:
    body = ALERTS[name]
    assert re.search(r"^ +severity: (critical|warning)$", body, re.MULTILINE)
    assert re.search(r'^ +summary: "{{ \$labels.run_id }}: ', body, re.MULTILINE)
    assert re.search(r"^ +description: ", body, re.MULTILINE)
    assert f"runbook_url: docs/runbook.md#{name.lower()}\n" in body


def test_the_runbook_has_a_paragraph_for_each_alert_in_their_order() -> None:
    paragraphs = re.findall(r"^### (\w+)\n\n(.+)", RUNBOOK.read_text(), re.MULTILINE)
    assert [name for name, _ in paragraphs] == list(ALERTS)


@pytest.mark.parametrize("file", [RULES, PROMETHEUS / "tests.yml", RUNBOOK], ids=lambda file: file.name)
def test_only_metrics_that_agents_export_are_named(file: Path) -> None:
    assert unknown_metrics(file.read_text()) == []


def test_what_an_alert_takes_from_a_recording_rule_is_recorded() -> None:
    recorded = set(re.findall(r"- record: (\S+)", RULES.read_text()))
    used = set(re.findall(r"run_id(?:_cause)?:elastic_agent_\w+:\w+", "\n".join(ALERTS.values())))
    assert used <= recorded
