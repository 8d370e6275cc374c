"""The fixtures of the system tests, and the table that `make proof` ends with."""

from __future__ import annotations

import pytest

from tests.system.conftest import etcd, in_etcd, job, second_job  # noqa: F401

from .test_proof import CELL, DISTURBANCES, KINDS, SOURCES, why_not

WIDTH = 9


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            # A file that could not be collected has none.
            for name, cell in getattr(report, "user_properties", ()):
                if name == CELL and found.get(tuple(cell)) != "FAILED":
                    found[tuple(cell)] = "ok" if outcome == "passed" else "FAILED"
    if not found:
        return
    write = terminalreporter.write_line
    terminalreporter.section("kinds of state, and what they have lived through")
    reasons: list[str] = []
    for disturbance in DISTURBANCES:
        write(f"{disturbance:16}" + "".join(f"{source:{WIDTH}}" for source in SOURCES))
        for kind in KINDS:
            cells = []
            for source in SOURCES:
                reason = why_not(kind, disturbance, source)
                if reason and reason not in reasons:
                    reasons.append(reason)
                not_run = f"({reasons.index(reason) + 1})" if reason else "not run"
                cells.append(found.get((kind, disturbance, source), not_run))
            write(f"  {kind:14}" + "".join(f"{cell:{WIDTH}}" for cell in cells))
    for number, reason in enumerate(reasons, 1):
        write(f"({number}) {reason}")
