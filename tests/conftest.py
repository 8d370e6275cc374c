"""What the end of a run shows: here, because the process that collects from all others reads no deeper."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.installed import installed  # noqa: F401
from tests.system.harness import TRAINING_GAP

settings.register_profile(
    "any machine", deadline=None
)  # how long an example takes says only how busy this one is
settings.load_profile("any machine")

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    # Agents keep to what they were started to ignore, and nohup, or a shell's &, may have started us.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def environment_of_before() -> Iterator[None]:
    """A command that a test calls in this process may set variables, which an agent of another test would inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    noted = [value for report in reports for name, value in report.user_properties if name == TRAINING_GAP]
    if noted:
        terminalreporter.section(TRAINING_GAP)
        for fault, gap_s in noted:
            terminalreporter.line(f"{gap_s:7.2f} s  {fault}")
