"""docs/tuning.md shows the table of settings as it is."""

from __future__ import annotations

from pathlib import Path

from elastic_agent.agent.workers.environment import DEFAULTS, PROFILES, Row

DOCUMENT = Path(__file__).parents[2] / "docs" / "tuning.md"
HEADING = "| variable | value | when | why |\n|---|---|---|---|"


def table_row(row: Row) -> str:
    return f"| `{row.name}` | `{row.value}` | {row.when.text or 'always'} | {row.reason} |"


def tables() -> str:
    rooms = {"Defaults": DEFAULTS}
    rooms |= {f"Profile {transport}": rows for transport, rows in PROFILES.items()}
    return "\n\n".join(
        "\n".join([f"### {room}", "", HEADING, *map(table_row, rows)]) for room, rows in rooms.items()
    )


def test_the_documented_settings_are_the_settings() -> None:
    assert tables() in DOCUMENT.read_text()
