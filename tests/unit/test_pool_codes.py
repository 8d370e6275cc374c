"""The exit codes of the commands about a pool, as documented."""

from __future__ import annotations

from pathlib import Path

from elastic_agent.agent.common.exits import PoolCode


def test_the_documented_exit_codes_are_the_exit_codes() -> None:
    rows = [f"| {int(code)} | {code.name} | {code.meaning} |" for code in PoolCode]
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert "\n".join(["| code | name | meaning |", "|---|---|---|", *rows, ""]) in page.read_text()
