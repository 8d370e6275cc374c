"""What the host of a c10d store leaves for its next life."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.rendezvous_io.store_opening import StoreMemory
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, Result, World

WORLD = World("job", 7, Phase.RUNNING, (Member("a", "a-1", 2, 0),), Endpoint("h", 1), Cause(CauseKind.START))
ENDED = replace(WORLD, phase=Phase.ENDED, result=Result.SUCCEEDED)


def test_the_newest_world_is_there_for_the_next_host_of_the_job_at_the_endpoint(tmp_path: Path) -> None:
    memory = StoreMemory("job", "h:1", tmp_path)
    assert memory.recall() is None
    for generation in (7, 8):
        memory.remember(replace(WORLD, generation=generation).to_json())
    assert StoreMemory("job", "h:1", tmp_path).recall() == replace(WORLD, generation=8)
    assert StoreMemory("other", "h:1", tmp_path).recall() is None
    assert StoreMemory("job", "h:2", tmp_path).recall() is None
    assert list(tmp_path.rglob("*.json")) == [memory.file]
    assert memory.file.stat().st_mode & 0o777 == 0o600


def test_a_job_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    memory = StoreMemory("job", "h:1", tmp_path)
    memory.remember(WORLD.to_json())
    memory.remember(ENDED.to_json())
    assert memory.recall() is None
    assert list(memory.file.parent.iterdir()) == []


@pytest.mark.parametrize("problem", ["link", "writable", "another user's", "garbage"])
def test_what_others_may_have_put_there_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    memory = StoreMemory("job", "h:1", tmp_path)
    memory.remember(WORLD.to_json())
    folder = memory.file.parent
    if problem == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif problem == "writable":
        folder.chmod(0o720)
    elif problem == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root may give a folder away")
        os.chown(folder, 1234, 1234)
    else:
        memory.file.write_bytes(b"\xff")
    assert memory.recall() is None
    assert str(folder) in caplog.text


def test_a_full_disk_costs_a_warning_and_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = StoreMemory("job", "h:1", tmp_path / "gone")
    for _ in range(2):
        memory.remember(WORLD.to_json())
    assert len(caplog.records) == 1
