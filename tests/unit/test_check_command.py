"""`elastic-agent check`: its table, its document and its exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.commands import check
from elastic_agent.agent.commands.check import as_json, main, table
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.config import Command, Config
from elastic_agent.agent.configuration.parse import NodeCounts
from elastic_agent.agent.machine.devices import Device, Inventory, Placement
from elastic_agent.agent.machine.inventory import Machine, needs_of
from elastic_agent.agent.machine.network import Network, NotReady
from elastic_agent.health.checks.finding import Finding, NodeNeeds, Outcome
from elastic_agent.health.checks.runner import AT_JOIN, RECHECKS
from tests.names import PEER_CHECKS

FOUND = (
    Finding("open-files", Outcome.OK, "1024 descriptors"),
    Finding("shared-memory", Outcome.WARN, "64 MiB", "make it larger"),
    Finding("gpu-xid", Outcome.UNKNOWN, "may not read", "run as root"),
    Finding("log-directory", Outcome.FAIL, "/l: Read-only\x1b[2J " + "x " * 60, "mount it"),
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name in os.environ:
        if name.startswith(("ELASTIC_AGENT_", "PET_")):
            monkeypatch.delenv(name)


def test_the_table_has_the_worst_first_and_advice_below() -> None:
    lines = list(table("node n1", FOUND, 0.12, 80))
    assert lines[0] == "node n1: 1 failed, 1 to look at, 1 unknown, 1 ok, in 0.1 s"
    assert [line.split()[:2] for line in lines if re.match(r"[A-Za-z?]+ +[a-z-]+  ", line)] == [
        ["FAIL", "log-directory"],
        ["WARN", "shared-memory"],
        ["?", "gpu-xid"],
        ["ok", "open-files"],
    ]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)
    assert lines[lines.index("WARN  shared-memory  64 MiB") + 1] == "                     -> make it larger"


def test_the_document() -> None:
    document = json.loads(as_json("n1", FOUND, None, 0.12345))
    findings = document.pop("findings")
    assert document == {"schema": 1, "node": "n1", "outcome": "fail", "seconds": 0.123}
    assert [finding["outcome"] for finding in findings] == ["fail", "warn", "unknown", "ok"]
    assert findings[1] == {
        "check": "shared-memory",
        "outcome": "warn",
        "summary": "64 MiB",
        "advice": "make it larger",
    }


def test_it_needs_no_script_and_takes_the_options_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--log-dir={tmp_path}/logs", "--port-range=29500-29600"]
    assert main(["--json", *words]) == ExitCode.SUCCESS
    document = json.loads(capsys.readouterr().out)
    found = {finding["check"] for finding in document["findings"]}
    assert found >= {"shared-memory", "log-directory", "name-resolution"}
    assert main([*words, "train-that-is-not-there.py"]) == ExitCode.BAD_CONFIG
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_is_a_finding_and_no_error_of_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([f"--log-dir={tmp_path}/file"]) == ExitCode.FAILED
    out = capsys.readouterr().out
    assert "1 failed" in out
    assert re.search(r"^FAIL  log-directory +\S+file: Not\s+a\s+directory$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--local-addr=192.0.2.1"], 73), (["--min-nodes=0"], 78), (["--check=perhaps"], 78)],
)
def test_settings_that_cannot_work(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    assert words[0].partition("=")[0] in capsys.readouterr().err


def test_a_network_that_is_not_there_yet_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(Inventory((), 2), (), NotReady("route to 10.0.0.9", "add one"))
    monkeypatch.setattr(check, "inspect_machine", lambda *_, **__: machine)
    monkeypatch.setattr(check, "needs_of", lambda *_: NodeNeeds())
    assert main([]) == ExitCode.FAILED
    assert "no network for the job: there is no route to 10.0.0.9" in capsys.readouterr().out


def test_what_the_job_needs_follows_from_its_settings_and_this_machine() -> None:
    gpus = (Device("0", "0000:3b:00.0"), Device("1", "0000:5e:00.0"), Device("MIG-1", "0000:60:00.0"))
    placed = Placement("", gpus[1:2]), Placement("", gpus[2:])
    machine = Machine(
        Inventory(gpus, 8),
        placed,
        Network("ib0", "10.0.0.1", "", rdma_ports=("mlx5_0:1",)),
    )
    config = Config(Command("script", "t.py"), NodeCounts(1, 4))
    assert needs_of(config, machine) == NodeNeeds(
        ranks=8,
        address="10.0.0.1",
        gpus=("0000:5e:00.0", "MIG-1"),
        rdma=True,
    )


def test_the_page_has_every_check() -> None:
    text = (Path(__file__).parents[2] / "docs" / "status.md").read_text()
    page = text.partition("\n## Checks before training\n")[2]
    names = [*AT_JOIN, *(check.name for check in RECHECKS)]
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|.*\|.*\|$", page, re.MULTILINE)) == sorted(
        [*names, *PEER_CHECKS]
    )


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    """Of any command, however much it prints."""
    for words in (["check", "--json"], ["--check-config", __file__], ["--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "wb") as pipe:
            command = [sys.executable, "-m", "elastic_agent", *words]
            done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_without_unicode_gets_the_table() -> None:
    command = [sys.executable, "-m", "elastic_agent", "check", "--log-dir=/nonesuch/日本"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert "/nonesuch/\\u65e5\\u672c" in done.stdout, done.stderr


def test_an_agent_that_inherits_more_than_a_thousand_descriptors_runs_its_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('done')")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    words = ["--standalone", "--check=fail", "--preload=none", str(tmp_path / "job.py")]
    try:
        command = [sys.executable, "-m", "elastic_agent", *words]
        done = subprocess.run(command, pass_fds=taken, capture_output=True, text=True, timeout=60)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert done.returncode == 0, done.stderr
