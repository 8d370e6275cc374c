"""The exit codes of the commands about a pool, as documented."""

from __future__ import annotations

from dataclasses import replace

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.pool.commands.jobs import code_of
from elastic_agent.pool.records import JobResult, Outcome

RESULT = JobResult("j", Outcome.FAILED, "why", 1, 1, 1.0, 2.0, ("a",))


def test_no_code_of_waiting_means_something_else_of_an_agent() -> None:
    failed = [replace(RESULT, outcome=Outcome.FAILED, code=code) for code in ExitCode]
    assert {code_of(result) for result in failed} == {1, 3, 65, 72}
