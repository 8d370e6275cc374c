"""docs/tuning.md shows the table of settings as it is."""

from __future__ import annotations

from pathlib import Path

from elastic_agent.agent.workers.environment import DEFAULTS, Row

DOCUMENT = Path(__file__).parents[2] / "docs" / "tuning.md"
HEADING = "| variable | value | when | why |\n|---|---|---|---|"


def table_row(row: Row) -> str:
    when = "torch is not a CPU build" if row.of_nccl else "always"
    return f"| `{row.name}` | `{row.value}` | {when} | {row.reason} |"


def test_the_documented_settings_are_the_settings() -> None:
    assert "\n".join([HEADING, *map(table_row, DEFAULTS)]) + "\n" in DOCUMENT.read_text()
