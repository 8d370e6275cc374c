"""What is shipped for Prometheus and Grafana, as tests look at it: files, panels, questions, names of metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_agent.agent.workers import causes
from elastic_agent.health.metrics import PREFIX, Build, Metrics

REPOSITORY = Path(__file__).parents[1]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules.yml"
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "elastic-agent.json"

_METRIC = re.compile(rf"(?<![\w:])({PREFIX}\w+)(\{{[^}}]*\}})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|=|!=)\s*"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Question:
    """One expression that the dashboard sends to Prometheus. `instant`: it wants one answer, not one per moment.

    `panel` is its title, "" for an annotation, which `query` names.
    """

    panel: str
    query: str
    expression: str
    instant: bool


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def questions(variables: Mapping[str, str]) -> Iterator[Question]:
    """All of the dashboard's, with a value for each of its variables, Grafana's own among them."""

    def filled(expression: str) -> str:
        return re.sub(r"\$(\w+)", lambda found: variables[found[1]], expression)

    whole = dashboard()
    for annotation in whole["annotations"]["list"]:
        yield Question("", annotation["name"], filled(annotation["expr"]), False)
    for panel in whole["panels"]:
        for target in panel.get("targets", []):
            yield Question(
                panel["title"], target["refId"], filled(target["expr"]), target.get("instant", False)
            )


def unknown_metrics(text: str) -> list[str]:
    """What this text says of our metrics that is not so: a name, a label, or a value that a label cannot have."""
    metrics = Metrics(
        "r",
        "n",
        Build(version="0"),
        workers=1,
        min_nodes=1,
        started_at_s=0.0,
        causes=causes.NAMES,
    )
    exported = {
        PREFIX + family.name + suffix: family
        for family in metrics.families
        for suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
    }
    open_labels = {"run_id", "node", "local_rank"}
    wrong = []
    for name, selector in _METRIC.findall(text):
        if name not in exported:
            wrong.append(name)
            continue
        for label, _, values in _MATCHER.findall(selector):
            allowed = exported[name].labels.get(label, ())
            unknown = label not in open_labels and not set(values.split("|")) <= set(allowed)
            if unknown:
                wrong.append(f'{name}{{{label}="{values}"}}')
    return wrong
