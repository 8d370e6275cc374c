"""The dashboard is whole: every panel can be read, and asks for what agents export in words that Prometheus knows."""

from __future__ import annotations

import itertools
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
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_COLUMNS = 24

PANELS: list[dict[str, Any]] = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_panels_have_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_has_a_title_a_unit_and_a_source(panel: dict[str, Any]) -> None:
    assert panel["datasource"] == DATASOURCE
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    references = [target["refId"] for target in panel["targets"]]
    assert references
    assert len(set(references)) == len(references)
    for target in panel["targets"]:
        # A table has columns instead.
        assert target["legendFormat"] or target["format"] == "table"


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_legend_names_labels_that_the_answer_has(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        kept = {
            label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")
        }
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_what_is_changed_for_one_series_is_changed_for_one_that_exists(panel: dict[str, Any]) -> None:
    renamed = [
        new
        for transformation in panel.get("transformations", [])
        for new in transformation["options"].get("renameByName", {}).values()
    ]
    legends = [re.sub(r"{{\w+}}", ".+", target["legendFormat"]) for target in panel["targets"]] + renamed
    for override in panel["fieldConfig"]["overrides"]:
        wanted = override["matcher"]["options"].replace(".*", "anything")
        assert any(re.fullmatch(legend, wanted) for legend in legends), wanted


def test_no_panel_covers_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        assert columns.stop <= GRID_COLUMNS, panel["title"]
        for cell in itertools.product(columns, range(place["y"], place["y"] + place["h"])):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]


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
