"""The dashboard is whole: every panel can be read, and asks for what agents export in words that Prometheus knows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard import DASHBOARD, dashboard, questions, unknown_metrics

BUILT_IN = {"__range", "__rate_interval"}
"""What Grafana itself has a value for."""

VARIABLES = {"run_id": "job", "node": ".*", "__range": "1h", "__rate_interval": "1m"}

PANELS: list[dict[str, Any]] = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_every_variable_is_declared_and_used() -> None:
    whole = dashboard()
    declared = {variable["name"] for variable in whole["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__all"}
    assert used == declared | BUILT_IN


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_follows_the_chosen_job_and_below_the_second_row_the_chosen_node(
    panel: dict[str, Any],
) -> None:
    [_, per_node] = [row for row in dashboard()["panels"] if row["type"] == "row"]
    chosen = 'run_id="$run_id"'
    if panel["gridPos"]["y"] > per_node["gridPos"]["y"]:
        chosen += ', node=~"$node"'
    for target in panel["targets"]:
        selectors = re.findall(r"elastic_agent_\w+(?:{([^}]*)})?", target["expr"])
        assert all(selector == chosen or selector.startswith(f"{chosen}, ") for selector in selectors)


def test_every_question_is_about_what_agents_export() -> None:
    assert [question for question in questions(VARIABLES) if unknown_metrics(question.expression)] == []
    assert unknown_metrics(DASHBOARD.read_text().replace('\\"', '"')) == []


def test_a_wrong_name_label_and_value_are_known_as_wrong() -> None:
    wrong = 'elastic_agent_stepz + elastic_agent_nodes{state="activ"} + elastic_agent_step{reason="oom"}'
    right = 'elastic_agent_nodes{run_id="x", state=~"active|lost"} + run_id:elastic_agent_other:max'
    assert unknown_metrics(f"{wrong} + {right}") == [
        "elastic_agent_stepz",
        'elastic_agent_nodes{state="activ"}',
        'elastic_agent_step{reason="oom"}',
    ]


def test_promtool_can_read_every_question(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    asked = list(questions(VARIABLES))
    recorded = [
        {"record": f"q{number}", "expr": question.expression} for number, question in enumerate(asked)
    ]
    rules = tmp_path / "rules.yml"
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}))  # JSON is YAML
    checked = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(asked)} rules found" in checked.stdout
