"""A copy that a GPU still makes when `save` returns, and that never comes to its end: the save says so, or is durable.

The GPU is made up: events that come, or fail, when the thread that seals the copy waits for them.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.worker import Checkpointer, SaveFailed
from elastic_agent.worker.state.sharding.layout import ShardLayout
from elastic_agent.worker.steps import progress
from elastic_agent.worker.storage.disk import durable
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.memory import slots
from elastic_agent.worker.wire.environment import Run
from tests.unit.threads import join_threads


class Event:
    """Of a GPU that copies without an error."""

    def synchronize(self) -> None:
        pass


class BrokenEvent(Event):
    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch, only_worker: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_WRITES", str(tmp_path / "no writer"))


def gpu(monkeypatch: pytest.MonkeyPatch, event: Event) -> None:
    really = ShardLayout.copy_to

    def copy_to(self: ShardLayout, view: memoryview, target: torch.Tensor) -> list[Any]:
        really(self, view, target)
        return [event]

    monkeypatch.setattr(ShardLayout, "copy_to", copy_to)


def full(*_: object) -> Any:
    raise OSError(28, "No space left on device")


def on_disk(tmp_path: Path) -> list[int]:
    return CheckpointFiles(tmp_path / "disk", keep=2, run=Run("reader")).steps()


def test_a_copy_that_the_gpu_did_not_end_is_a_refused_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    with monkeypatch.context() as patch:
        gpu(patch, BrokenEvent())
        assert checkpoints.save(1), "the copy is still under way"
        assert not checkpoints.wait()
    assert not checkpoints.wait(), "asking again makes it no better"
    assert on_disk(tmp_path) == []
    assert "step 1 is not in memory" in caplog.text
    assert "illegal memory access" in caplog.text
    gpu(monkeypatch, Event())
    assert checkpoints.save(2)
    assert checkpoints.wait()
    assert on_disk(tmp_path) == [2]


def test_lost_copies_count_as_refused_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, BrokenEvent())
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}}, max_failed_saves=3)
    assert [checkpoints.save(step) for step in (1, 2, 3)] == [True] * 3
    with pytest.raises(SaveFailed, match="step 3 is not in memory"):
        checkpoints.wait()


def test_a_copy_lost_at_the_end_of_the_script_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu(monkeypatch, BrokenEvent())
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    checkpoints.save(1)
    join_threads("memory-copy")
    checkpoints._state._disk.end()
    assert "the newest save is not on disk: step=1" in caplog.text


def test_the_agent_hears_of_a_copy_that_never_came_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[Any, ...]] = []
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    with monkeypatch.context() as patch:
        gpu(patch, BrokenEvent())
        patch.setattr(
            progress,
            "checkpoint_save",
            lambda step, result, *_, tier="local", directory="", **__: heard.append(
                (step, result, tier, directory)
            ),
        )
        assert checkpoints.save(1)
        assert not checkpoints.wait()
    assert (1, "error", "local", str(tmp_path / "disk")) in heard


def test_a_copy_without_room_for_its_header_is_a_refused_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu(monkeypatch, Event())
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    with monkeypatch.context() as patch:
        patch.setattr(slots.Slots, "put_header", full)
        assert checkpoints.save(1)
        assert not checkpoints.wait()
    assert "No space left" in caplog.text
    assert checkpoints.save(2)
    assert checkpoints.wait()
    assert on_disk(tmp_path) == [2]


def test_a_drain_whose_copy_is_lost_goes_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, Event())
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    checkpoints.load()
    (saver,) = progress.checkpointers.all()
    with monkeypatch.context() as patch:
        patch.setattr(slots.Slots, "put_header", full)
        saver.save_last_step(7, leaves=False)
        join_threads("memory-copy")
    Checkpointer(tmp_path / "disk", {"meta": {}}).wait()
    assert on_disk(tmp_path) == [7]


def test_a_refused_save_stays_refused_for_whoever_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", full)
        checkpoints.save(1)
        assert [checkpoints.wait(), checkpoints.wait()] == [False, False]
    assert checkpoints.save(2)
    assert checkpoints.wait()


def test_where_no_thread_can_be_started_training_waits_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, Event())
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert checkpoints.save_to_memory(1)
    assert Checkpointer(tmp_path / "disk", {"meta": {}}).load() == 1


def no_thread(_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_checksums_that_cannot_be_written_down_refuse_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = slots.Slots.put_header

    def put_header(self: slots.Slots, name: str, header: slots.Header) -> None:
        full() if header.sums else really(self, name, header)

    monkeypatch.setattr(slots.Slots, "put_header", put_header)
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    assert checkpoints.save(1)
    assert checkpoints.wait()
    assert on_disk(tmp_path) == [1]
