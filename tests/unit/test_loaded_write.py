"""What was loaded from memory, and is not on disk: who writes it, and what the log says where the script ends first."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.worker.checkpointing.sharded.loaded_write import LoadedWrite
from elastic_agent.worker.wire.environment import WorkerEnv

LOADED = (1, 7)


class Scene:
    """One rank, whose own slots do not have what it has loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            atexit, "register", lambda call, *given: setattr(self, "at_exit", lambda: call(*given))
        )
        self.at_exit: Callable[[], None]
        self.digests = ["loaded"]
        self.disk: Any = SimpleNamespace(has_writer=True, ends_at_once=False)
        files: Any = SimpleNamespace(newest_manifest=lambda: None)
        contents: Any = SimpleNamespace(digests=lambda: self.digests)
        saves: Any = SimpleNamespace(is_new=lambda table: False)
        directory: Any = None
        self.write = LoadedWrite(
            files, contents, None, self.disk, saves, directory, WorkerEnv(2, "run-a", "n1", 0)
        )
        self.write.began(7)
        self.write.order(LOADED)
        self.saved: list[int] = []

    def save(self, step: int) -> None:
        self.saved.append(step)
        self.write.superseded()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_it_is_written_by_wait_once_as_long_as_training_has_not_changed_it(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    assert scene.write.ensure(scene.save)
    assert scene.write.ensure(scene.save)
    scene.at_exit()
    assert scene.saved == [7]
    assert not caplog.records


def test_a_changed_state_is_not_written_as_the_step_that_was_loaded(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.digests = ["trained"]
    assert not scene.write.ensure(scene.save)
    assert scene.saved == []
    assert "what was loaded from memory is not on disk, save a newer step: step=7" in caplog.text


def test_the_log_says_at_the_end_of_the_script_what_only_memory_has(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.disk.ends_at_once = True
    scene.at_exit()
    assert not caplog.records, "the next generation sees to it, or the script has an error of its own"
    scene.disk.ends_at_once = False
    scene.at_exit()
    assert "the state that was loaded from memory is not on disk: step=7" in caplog.text
    caplog.clear()
    scene.write.began(9)
    scene.at_exit()
    assert not caplog.records, "a load from disk"
