"""Reports from worker to agent: a sender that never disturbs training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.worker.steps import progress
from elastic_agent.worker.wire.channel import Reporter
from elastic_agent.worker.wire.messages import MAX_BYTES, REPORTS, LoadReport, SaveReport


class Agent:
    """The other end: a bound datagram socket and the environment that names it."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(str(directory / "reports"))
        self.environ = {
            "ELASTIC_AGENT_REPORTS": str(directory / "reports"),
            "ELASTIC_AGENT_GENERATION": "7",
            "ELASTIC_AGENT_LOCAL_RANK": "3",
            "LOCAL_RANK": "0",  # one device visible per worker
        }

    def received(self) -> list[object]:
        reports: list[object] = []
        while True:
            try:
                reports.append(REPORTS.decode(self.socket.recv(MAX_BYTES + 1)))
            except BlockingIOError:
                return reports


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


def loaded(step: int) -> LoadReport:
    return LoadReport(7, 3, step, "ok", 0.5)


def test_a_forked_child_does_not_report(agent: Agent) -> None:
    reporter = Reporter(agent.environ)
    child = os.fork()
    if child == 0:
        reporter.send(lambda g, r: loaded(1))
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert agent.received() == []
    reporter.send(lambda g, r: loaded(2))
    assert agent.received() == [loaded(2)]


def test_a_data_loader_child_does_not_report(agent: Agent, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from elastic_agent.worker.steps.progress import checkpoint_load\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        child = context.Process(target=checkpoint_load, args=(1, 'ok', 0.5))\n"
        "        child.start(); child.join(); assert child.exitcode == 0\n"
        "    checkpoint_load(2, 'ok', 0.5)\n"
    )
    subprocess.run([sys.executable, script], env={**os.environ, **agent.environ}, check=True)
    assert agent.received() == [loaded(2)]


def test_reports_go_on_when_the_agent_comes_back(agent: Agent, tmp_path: Path) -> None:
    reporter = Reporter(agent.environ)
    agent.socket.close()
    reporter.send(lambda g, r: loaded(1))  # nobody listens
    (tmp_path / "reports").unlink()
    reporter.send(lambda g, r: loaded(2))  # no such socket
    returned = Agent(tmp_path)
    reporter.send(lambda g, r: loaded(3))
    assert returned.received() == [loaded(3)]


def test_a_full_queue_does_not_block(agent: Agent) -> None:
    reporter = Reporter(agent.environ)
    for _ in range(10_000):
        reporter.send(lambda g, r: loaded(1))
    assert 0 < len(agent.received()) < 10_000


def test_a_wrong_report_ends_the_reports_and_not_the_training(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(agent.environ)
    reporter.send(lambda g, r: loaded("12"))  # type: ignore[arg-type]
    reporter.send(lambda g, r: loaded(13))
    assert agent.received() == []
    assert "no more reports" in caplog.text


@pytest.mark.parametrize(
    "change", [{"ELASTIC_AGENT_GENERATION": "x"}, {"ELASTIC_AGENT_LOCAL_RANK": ""}], ids=str
)
def test_a_wrong_environment_is_named_and_ignored(
    agent: Agent, caplog: pytest.LogCaptureFixture, change: dict[str, str]
) -> None:
    Reporter({**agent.environ, **change}).send(lambda g, r: loaded(1))
    assert agent.received() == []
    assert "no reports to the agent" in caplog.text


def test_the_functions_report_as_the_environment_says(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_reporter", None)
    for name, value in agent.environ.items():
        monkeypatch.setenv(name, value)
    progress.checkpoint_save(5, "ok", 0.5, 100)
    progress.checkpoint_load(5, "corrupt", 0.5)
    assert agent.received() == [
        SaveReport(7, 3, 5, "ok", 0.5, 100), LoadReport(7, 3, 5, "corrupt", 0.5)
    ]  # fmt: skip


def test_the_agent_can_import_the_messages_without_torch() -> None:
    script = (
        "import sys, elastic_agent.worker, elastic_agent.worker.wire.channel\n"
        "import elastic_agent.worker.storage.disk.checkpoint_files\n"
        "elastic_agent.worker.step(1)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_can_be_had() -> None:
    script = (
        "import elastic_agent.worker as worker\n"
        "assert sorted(worker.__all__) == sorted(worker._HOME)\n"
        "for name in worker.__all__: assert callable(getattr(worker, name)), name\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
