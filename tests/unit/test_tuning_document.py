"""docs/tuning.md shows the table of settings as it is."""

from __future__ import annotations

from pathlib import Path

from elastic_agent.agent.workers.environment.torch_settings import DEBUG, DEFAULTS, PROFILES, WIDENED, Row
from elastic_agent.agent.workers.environment.widening import WIDENING

DOCUMENT = Path(__file__).parents[2] / "docs" / "tuning.md"
HEADING = "| variable | value | when | why |\n|---|---|---|---|"


def table_row(row: Row) -> str:
    versions = [
        f"{name} {bounds}" for name, bounds in (("torch", row.torch), ("NCCL", row.nccl)) if str(bounds)
    ]
    when = ", ".join(filter(None, [row.when.text, *versions])) or "always"
    return f"| `{row.name}` | `{row.value}` | {when} | {row.reason} |"


def tables() -> str:
    rooms = {"Defaults": DEFAULTS}
    rooms |= {f"Profile {transport}": rows for transport, rows in PROFILES.items()}
    rooms |= {"Profile debug": DEBUG, "Widened": WIDENED}
    return "\n\n".join(
        "\n".join([f"### {room}", "", HEADING, *map(table_row, rows)]) for room, rows in rooms.items()
    )


def test_the_documented_settings_are_the_settings() -> None:
    assert tables() in DOCUMENT.read_text()


def test_the_documented_steps_of_widening_are_the_policys() -> None:
    text = DOCUMENT.read_text()
    for retries in WIDENING.socket_retries:
        assert f"| {retries}: {retries * (retries + 1) / 20:.0f} s" in text
    for timeout in WIDENING.ib_timeout:
        seconds = 7 * 4.096e-6 * 2**timeout
        assert f"| {timeout}: {round(seconds / 30) * 30} s" in text
    assert WIDENING.process_group == (1.0, 2.0, 4.0)
    assert WIDENING.after == 2
