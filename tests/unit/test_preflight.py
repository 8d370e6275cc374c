"""What settings name on this machine, and what workers are to run: looked for before anything is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.common import folders
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.config import Command, Config, ConfigError, LogConfig, Problem
from elastic_agent.agent.machine import inventory
from elastic_agent.agent.machine.agents_here import run_directory_parent
from elastic_agent.agent.machine.inventory import check_resources, check_target

SCRIPT = Command("script", "train.py")


def problems_of(**settings: object) -> list[Problem]:
    try:
        check_resources(Config(SCRIPT, **settings), os.environ)  # type: ignore[arg-type]
    except ConfigError as error:
        return list(error.problems)
    return []


def test_a_log_directory_must_be_one_or_become_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert problems_of(logs=LogConfig(tmp_path)) == []
    assert problems_of(logs=LogConfig(tmp_path / "not" / "yet")) == []
    assert problems_of(logs=LogConfig(Path("/dev/null"))) == []
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        [problem] = problems_of(logs=LogConfig(wrong))
        assert (problem.origin, problem.here) == ("--log-dir", True)
        assert f"{tmp_path / 'file'} is no folder" in str(problem)


def test_a_log_directory_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory.os, "access", lambda path, mode: path != tmp_path)
    [problem] = problems_of(logs=LogConfig(tmp_path / "logs"))
    assert f"this user may not write to {tmp_path}" in str(problem)


def test_no_more_memory_is_asked_for_than_there_is() -> None:
    found = os.statvfs("/dev/shm")
    room = found.f_blocks * found.f_frsize
    assert problems_of(memory_checkpoints=None) == problems_of(memory_checkpoints=room) == []
    [problem] = problems_of(memory_checkpoints=room + 1)
    assert (problem.origin, problem.here) == ("--memory-checkpoints", True)


def test_the_agents_sockets_have_a_place_although_tmpdir_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 110)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    assert run_directory_parent(os.environ) == "/tmp"
    assert problems_of() == []
    monkeypatch.setattr(folders, "_PLACES", (str(tmp_path / "none"),))
    [problem] = problems_of()
    assert (problem.origin, problem.value, problem.here) == ("TMPDIR", str(long), True)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in (
        "flat.py",
        "pkg/__init__.py",
        "pkg/mod.py",
        "runs/__init__.py",
        "runs/__main__.py",
        "names/mod.py",
        "names/below/mod.py",
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('nothing of it is run')\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").write_text("__path__.append('/elsewhere')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "module",
    [
        "flat",
        "pkg.mod",
        "runs",
        "names.mod",
        "names.below.mod",
        "own.anything",
        "torch.distributed.run",
        "timeit",
    ],
)
def test_a_module_that_is_there_is_found_and_not_run(packages: Path, module: str) -> None:
    check_target(Command("module", module), {})


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("no_such_mod", "there is no module 'no_such_mod'"),
        ("no_such_pkg.mod", "there is no module 'no_such_pkg'"),
    ],
)
def test_a_module_that_is_missing_is_refused_on_every_machine(
    packages: Path, module: str, missing: str
) -> None:
    with pytest.raises(ConfigError, match=missing) as caught:
        check_target(Command("module", module), {})
    assert caught.value.code is ExitCode.BAD_CONFIG
    check_target(Command("module", module), {"PYTHON_EXEC": "/another/python"})


def test_a_program_is_looked_for_where_workers_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(sys.executable)
    (tmp_path / "text").touch()
    check_target(Command("binary", "./run"), {})
    check_target(Command("binary", "run"), {"PATH": str(tmp_path)})
    for name in ("no_such_prog", "./text", "./none"):
        with pytest.raises(ConfigError, match="a program that exists"):
            check_target(Command("binary", name), {"PATH": "/usr/bin"})
