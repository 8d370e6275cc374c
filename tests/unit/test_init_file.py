"""Files at which a process group meets: never one of another generation, run or call."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.worker import ClusterEnvironmentError, fresh_init_file
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
    others = [f"elastic-agent-init-{run}-1-0" for run in ("other", "mine-2", "min")]
    for name in others:
        (tmp_path / name).touch()
    monkeypatch.setenv(NAMES["generation"], "12")
    third = made(tmp_path / "." / ".")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([third.name, *others])


def test_without_an_agent_no_name_is_new_and_the_same_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAMES["run"], raising=False)
    with pytest.raises(ClusterEnvironmentError, match="use env://"):
        fresh_init_file(tmp_path)
