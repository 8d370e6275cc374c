"""Files at which a process group meets: never one of another generation, run or call."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.worker import fresh_init_file
from elastic_agent.worker.wire.environment import NAMES


def made(folder: Path) -> Path:
    file = Path(fresh_init_file(folder).removeprefix("file://"))
    file.touch()
    return file


def test_no_file_is_named_twice_and_those_of_earlier_generations_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMES["run"], "mine")
    monkeypatch.setenv(NAMES["generation"], "1")
    first, second = made(tmp_path), made(tmp_path)
    assert first != second
    (tmp_path / "elastic-agent-init-other-1-0").touch()
    monkeypatch.setenv(NAMES["generation"], "12")
    third = made(tmp_path / "." / ".")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        [third.name, "elastic-agent-init-other-1-0"]
    )
