"""What a node tells the others of what it runs: enough to compare, and no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.configuration.derive import resolve
from elastic_agent.agent.configuration.load import read_argv
from elastic_agent.agent.rendezvous_io.store_opening import program_of
from elastic_agent.rendezvous.messages import Program


def program(*words: str) -> Program:
    return program_of(resolve(read_argv(words), {}, lambda: "id").config, 0.0)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("import mine\n")
    return str(tmp_path / "train.py")


def test_arguments_are_compared_and_cannot_be_looked_up(script: str) -> None:
    secret = "Zx9-s3cr3t"
    ours = program(script, "--key", secret)
    assert secret not in repr(ours)
    assert ours == program(script, "--key", secret)
    assert ours.arguments != program(script, "--key", "other").arguments
    assert ours.arguments != program("--rdzv-id", "other", script, "--key", secret).arguments


def test_a_script_is_known_by_its_own_file_alone(script: str, tmp_path: Path) -> None:
    before = program(script).digest
    (tmp_path / "mine.py").write_text("changed = True\n")
    assert program(script).digest == before
    Path(script).write_text("import mine  # changed\n")
    assert program(script).digest != before


def test_what_is_no_script_is_known_by_its_name(tmp_path: Path) -> None:
    assert program("-m", "json.tool").digest != program("-m", "json").digest
    assert program("--no-python", "/bin/true").digest == program("--no-python", "/usr/bin/true").digest
