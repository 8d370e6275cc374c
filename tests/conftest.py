"""What the end of a run shows: here, because the process that collects from all others reads no deeper."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator

# A store that ends makes torch write pages of C++ frames, unless it has read this before. Agents set it, too.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytest
from hypothesis import settings

from tests import needs
from tests.installed import installed  # noqa: F401
from tests.system.harness import TRAINING_GAP

# fmt: off
LONGEST = (
    "sim/promises", "system/users", "proof/proof", "sim/pool",
    "system/daemon", "contract/etcd", "system/checkpointer", "system/fence",
    "contract/store", "contract/disk_writer", "system/etcd_members", "system/partitions",
    "chaos/soak", "unit/just_in_time", "system/worker_failures", "contract/worker_store",
    "contract/produced_failures", "unit/records", "unit/own_time", "sim/replication",
    "system/worker_example", "contract/status_sources", "unit/decide",
)
# fmt: on
"""Files of tests by what they take: those of half a minute and more."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of minutes first: one that came last would leave all other processes of pytest-xdist without work."""
    order = {name: number for number, name in enumerate(LONGEST)}

    def place(item: pytest.Item) -> int:
        return order.get(f"{item.path.parent.name}/{item.path.stem.removeprefix('test_')}", len(order))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    needs.judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    needs.judge(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in needs.summary(terminalreporter.getreports("skipped")):
        terminalreporter.line(line)
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    noted = [value for report in reports for name, value in report.user_properties if name == TRAINING_GAP]
    if noted:
        terminalreporter.section(TRAINING_GAP)
        for fault, gap_s in noted:
            terminalreporter.line(f"{gap_s:7.2f} s  {fault}")
