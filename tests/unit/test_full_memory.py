"""A folder in memory that is full, fails or is gone: it costs a copy, said once, and never a step or a save."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.worker import Checkpointer
from elastic_agent.worker.ranks.comparison import ReplicatedComparison
from elastic_agent.worker.steps import progress
from elastic_agent.worker.storage.memory import available_memory, slot_memory, slots
from elastic_agent.worker.storage.memory.available_memory import Memory, file_system
from elastic_agent.worker.storage.memory.random_states import RandomStates
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.wire import files

FULL = OSError(28, "No space left on device")
GONE = FileNotFoundError(2, "No such file or directory")
CALLS = ("open", "fdopen", "rename", "unlink", "ftruncate", "posix_fallocate", "fstat", "stat", "listdir")


@pytest.fixture(autouse=True)
def folder(only_worker: Path) -> Path:
    return only_worker


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("ELASTIC_AGENT_LOCAL_RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


class FailingOs:
    """`os`, of which the call with this number fails; counted are those of training that touch the folder."""

    def __init__(self, number: int, error: OSError) -> None:
        self.left = number
        self._error = error

    def __getattr__(self, name: str) -> Any:
        really = getattr(os, name)
        if name not in CALLS or threading.current_thread() is not threading.main_thread():
            return really

        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if name == "fdopen":
                    os.close(args[0])
                raise self._error
            return really(*args, **options)

        return call


@pytest.mark.parametrize("error", [FULL, GONE], ids=["full", "gone"])
def test_whichever_call_fails_only_that_copy_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    meta: dict[str, Any] = {}
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": meta})
    number = refused = step = 0
    while True:
        number += 1
        for _ in range(2):
            step += 1
            meta["is"] = step
            assert checkpoints.save_to_memory(step)
        failing = FailingOs(number, error)
        with monkeypatch.context() as patch:
            for module in (slots, files):
                patch.setattr(module, "os", failing)
            meta["is"] = -1
            copied = checkpoints.save_to_memory(step + 1)
        loaded: dict[str, Any] = {}
        assert Checkpointer(tmp_path / "disk", {"meta": loaded}).load() == step + copied
        assert loaded == {"is": -1 if copied else step}
        refused += not copied
        step += 1
        if failing.left > 0:
            break
    assert refused >= 8, "or nothing was tried"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_its_random_state_goes_on_and_says_it_once(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
) -> None:
    be_rank(monkeypatch, rank, 2)
    monkeypatch.setattr(ReplicatedComparison, "proven", True)  # there is no other rank to compare with
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}}, memory_every=1)
    progress.step(1)
    with monkeypatch.context() as patch:
        patch.setattr(RandomStates, "put", raising(FULL))
        assert [checkpoints.save_to_memory(step) for step in (2, 3)] == [False, False]
        progress.step(4)
    assert caplog.text.count("no copy in memory") == 1
    assert "No space left on device" in caplog.text
    assert checkpoints.save_to_memory(5)
    assert "copies in memory again: step=5" in caplog.text


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_a_folder_that_is_removed_while_the_job_runs_costs_no_step(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = {"is": 1}
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": meta}, memory_every=1)
    progress.step(1)
    assert checkpoints.save_to_memory(1)
    shutil.rmtree(folder)
    for step in (2, 3):
        progress.step(step)
        assert not checkpoints.save_to_memory(step)
    meta["is"] = 4
    assert checkpoints.save(4)
    assert caplog.text.count("no copy in memory") == 1
    assert "RemoveIPC=no" in caplog.text
    loaded: dict[str, Any] = {}
    assert Checkpointer(tmp_path / "disk", {"meta": loaded}).load() == 4
    assert loaded == {"is": 4}


def test_a_rank_state_without_room_means_no_save_just_in_time_and_nothing_else(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_SOCKET", str(tmp_path / "socket"))
    checkpoints = Checkpointer(tmp_path / "disk", {"model": torch.nn.Linear(2, 2)})
    shutil.rmtree(folder)
    with checkpoints.just_in_time():
        progress.step(1)
    assert "no save just in time" in caplog.text


# ---------------------------------------------------------------- one budget, and a reserve


def test_all_checkpointers_of_an_agent_share_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_MEMORY_BYTES", str(4 << 20))
    one, two = (
        Checkpointer(tmp_path / name, {"meta": {"table": torch.zeros(300_000)}}) for name in ("one", "two")
    )
    assert one.save_to_memory(1)
    assert not two.save_to_memory(1)
    assert "others of this node's checkpoints need" in caplog.text
    assert two.save(2), "on disk"
    assert one.save_to_memory(2), "who has room keeps it"


def test_what_an_earlier_generation_left_under_another_name_makes_room(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that names its directory after the time has a new one each time that it starts."""
    monkeypatch.setenv("ELASTIC_AGENT_MEMORY_BYTES", str(4 << 20))
    state = {"meta": {"table": torch.zeros(300_000)}}
    earlier = Checkpointer(tmp_path / "at-noon", state)
    assert earlier.save_to_memory(1)
    monkeypatch.setattr(slot_memory, "_used", set())  # another process
    later = Checkpointer(tmp_path / "at-one", state)
    assert later.save_to_memory(1)
    assert "made room for its own" in caplog.text
    assert Slots(str(folder), str(tmp_path / "at-noon")).taken() == 0
    assert later.save_to_memory(2)


def test_a_copy_leaves_a_reserve_in_the_file_system(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = Memory(3 << 20, 64 << 20, of=f"the file system of {folder}")
    monkeypatch.setattr(available_memory, "file_system", lambda _folder: left)
    assert not Checkpointer(tmp_path / "disk", {"meta": {"table": torch.zeros(1 << 20)}}).save_to_memory(1)
    assert f"the file system of {folder} has 3 MiB left of 64" in caplog.text
    assert not list(folder.rglob("*.pt"))


def test_the_room_of_a_file_system_is_what_it_says_of_itself(folder: Path) -> None:
    found, told = file_system(str(folder)), os.statvfs(folder)
    assert found is not None
    assert found.total == told.f_blocks * told.f_frsize
    assert file_system(str(folder / "gone")) is None


@pytest.fixture
def small(folder: Path) -> Iterator[Path]:
    """A real file system in memory of 3 MB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("left_over", [0, 4096, 100_000])
def test_a_real_file_system_that_others_fill_costs_copies_only(
    tmp_path: Path, small: Path, caplog: pytest.LogCaptureFixture, left_over: int
) -> None:
    meta: dict[str, Any] = {"table": torch.zeros(60_000)}
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": meta}, memory_every=1)
    progress.step(1)
    progress.step(2)
    others = small / "a data loader's"
    fill(others, left_over)
    meta["table"] += 1
    progress.step(3)
    assert not checkpoints.save_to_memory(3)
    assert checkpoints.save(4)
    loaded: dict[str, Any] = {}
    assert Checkpointer(tmp_path / "disk", {"meta": loaded}).load() == 4
    assert torch.equal(loaded["table"], meta["table"])
    others.unlink()
    assert checkpoints.save_to_memory(5)
    assert caplog.text.count("no copy in memory") == 1


def fill(path: Path, left_over: int) -> None:
    size = 0
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                size += file.write(bytes(4096))
        except OSError:
            os.truncate(path, size - left_over)
