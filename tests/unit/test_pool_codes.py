"""The exit codes of the commands about a pool, as documented."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from elastic_agent.agent.common.exits import ExitCode, PoolCode
from elastic_agent.pool.commands.jobs import code_of
from elastic_agent.pool.records import JobResult, Outcome

RESULT = JobResult("j", Outcome.FAILED, "why", 1, 1, 1.0, 2.0, ("a",))


def test_the_documented_exit_codes_are_the_exit_codes() -> None:
    rows = [f"| {int(code)} | {code.name} | {code.meaning} |" for code in PoolCode]
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert "\n".join(["| code | name | meaning |", "|---|---|---|", *rows, ""]) in page.read_text()


def test_no_code_of_waiting_means_something_else_of_an_agent() -> None:
    own = {PoolCode.NO_POOL, PoolCode.NO_JOB, PoolCode.UNABLE}
    assert not own & set(ExitCode)
    failed = [replace(RESULT, outcome=Outcome.FAILED, code=code) for code in ExitCode]
    assert {code_of(result) for result in failed} == {1, 3, 65, 72}
