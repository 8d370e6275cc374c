"""docs/tuning.md shows the table of settings as it is."""

from __future__ import annotations

from pathlib import Path

from elastic_agent.agent.common.variables import Variable
from elastic_agent.agent.workers.environment import ALWAYS, OF_NCCL

DOCUMENT = Path(__file__).parents[2] / "docs" / "tuning.md"
HEADING = "| variable | value | when | why |\n|---|---|---|---|"


def table_row(row: Variable) -> str:
    when = "torch is not a CPU build" if row in OF_NCCL else "always"
    return f"| `{row.name}` | `{row.value}` | {when} | {row.reason} |"


def test_the_documented_settings_are_the_settings() -> None:
    assert "\n".join([HEADING, *map(table_row, ALWAYS + OF_NCCL)]) + "\n" in DOCUMENT.read_text()
