"""Several Checkpointers in one process, one after the other and side by side: which of them takes part in training."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.worker import Checkpointer, CheckpointError
from elastic_agent.worker.steps import progress
from elastic_agent.worker.steps.drain import Checkpointers
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.memory.copy_header import Header
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.memory.slot_memory import RankPlace, SlotMemory
from elastic_agent.worker.storage.memory.slots import Slots, taken_by_slots
from elastic_agent.worker.wire.shared_progress import PENDING, private_words

CLAIM = Checkpointers.claim


@pytest.fixture(autouse=True)
def process(only_worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointers, "claim", CLAIM)
    monkeypatch.setattr(progress, "_words", private_words())


def made(directory: Path, what: str = "", **options: Any) -> tuple[dict[str, Any], Checkpointer]:
    state: dict[str, Any] = {"is": what}
    return state, Checkpointer(directory, {"part": state}, **options)


def found(directory: Path) -> tuple[int, str]:
    """What a process that begins anew loads, from memory or from disk."""
    state: dict[str, Any] = {}
    step = Checkpointer(directory, {"part": state}).load()
    return step, state.get("is", "")


def plan_a_change(step: int) -> None:
    """As the last step of this generation."""
    for saver in progress.checkpointers.all():
        saver.save_last_step(step, leaves=False)


def test_a_directory_has_one_checkpointer_that_writes(tmp_path: Path) -> None:
    _, first = made(tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for name in ("x", "link"):
        with pytest.raises(
            CheckpointError, match=rf"{tmp_path / name} already.*give each a directory, or put both"
        ):
            made(tmp_path / name)
    made(tmp_path / "x", read_only=True)[1].load()
    made(tmp_path / "y")[1].load()
    first.close()
    made(tmp_path / "x")[1].save(1)  # dropped at once
    in_a_cycle: list[Any] = [made(tmp_path / "x")]
    in_a_cycle.append(in_a_cycle)
    del in_a_cycle
    made(tmp_path / "x")


def test_a_child_of_fork_begins_without_any(tmp_path: Path) -> None:
    kept = made(tmp_path / "x")[1]
    kept.load()
    child = os.fork()
    if child == 0:
        made(tmp_path / "x")
        os._exit(len(progress.checkpointers.all()))
    assert os.waitpid(child, 0)[1] == 0
    assert len(progress.checkpointers.all()) == 1


@pytest.mark.parametrize("memory", ["memory", "disk"])
def test_what_was_dropped_is_freed_and_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    if memory == "disk":
        monkeypatch.delenv("ELASTIC_AGENT_MEMORY")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = Checkpointer(tmp_path / "a", {"model": model, "optimizer": optimizer}, memory_every=1)
    checkpoints.load()
    progress.step(1)
    gone = weakref.ref(model)
    descriptors = len(os.listdir("/proc/self/fd"))
    del model, optimizer, checkpoints
    assert not progress.checkpointers.all()
    progress.step(2)
    gc.collect()
    assert gone() is None
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_training_that_is_over_gets_no_step_of_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, pretraining = made(tmp_path / "a", memory_every=1)
    pretraining.load()
    for step in range(1, 21):
        state["is"] = f"pretrained {step}"
        progress.step(step)
    assert pretraining.save(20)
    finetuned, finetuning = made(tmp_path / "b")
    finetuning.load()
    for step in range(1, 35):
        state["is"] = finetuned["is"] = f"finetuned {step}"
        progress.step(step)
    plan_a_change(34)
    assert f"the Checkpointer of {tmp_path / 'a'} keeps no step of it" in caplog.text
    del pretraining, finetuning
    assert found(tmp_path / "a") == (20, "pretrained 20")
    assert found(tmp_path / "b") == (34, "finetuned 34")


def test_a_training_that_was_over_before_this_process_began_gets_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, step in (("a", 20), ("b", 34)):
        made(tmp_path / name, name)[1].save(step)
    (pretrained, pretraining), (finetuned, finetuning) = made(tmp_path / "a"), made(tmp_path / "b")
    assert pretraining.load() == 20
    assert pretraining.wait()
    assert finetuning.load() == 34
    progress.step(35)
    pretrained["is"] = finetuned["is"] = "finetuned"
    plan_a_change(35)
    assert f"another training begins with that of {tmp_path / 'b'}" in caplog.text
    del pretraining, finetuning
    assert found(tmp_path / "a") == (20, "a")
    assert found(tmp_path / "b") == (35, "finetuned")


def test_what_the_script_saves_with_another_one_is_of_the_same_training(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a")[1], made(tmp_path / "b")[1]
    first.load()
    progress.step(1)
    assert first.save(1)
    assert first.wait()
    second.load()
    assert len(progress.checkpointers.all()) == 1
    progress.step(2)
    assert first.save(2)
    assert len(progress.checkpointers.all()) == 2


def test_two_of_one_training_go_on_together_also_when_both_go_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (one, first), (other, second) = (made(tmp_path / name) for name in ("one", "other"))
    for step in (first.load(), second.load()):
        assert step == 0
    for step in range(1, 11):
        progress.step(step)
        assert step % 4 or (first.save(step) and second.save(step))
    first.load()
    second.load()
    one["is"], other["is"] = "one again", "other again"
    progress.step(9)
    plan_a_change(9)
    del first, second
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert found(tmp_path / "one") == (9, "one again")
    assert found(tmp_path / "other") == (9, "other again")


def test_of_trainings_one_after_the_other_none_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fold(name: str) -> int:
        _, checkpoints = made(tmp_path / name, memory_every=2)
        done = checkpoints.load()
        for step in range(done + 1, 11):
            progress.step(step)
        assert checkpoints.save(10)
        assert checkpoints.close()
        return done

    assert [fold(name) for name in ("a", "b", "b", "a")] == [0, 0, 10, 10]
    assert not caplog.records


def train(directory: Path, end: Callable[[Checkpointer], object]) -> int:
    """Three steps, saved; the step from which it went on."""
    _, checkpoints = made(directory, memory_every=1)
    begun = checkpoints.load()
    for step in range(begun + 1, 4):
        progress.step(step)
    assert checkpoints.save(3)
    end(checkpoints)
    return begun


@pytest.mark.parametrize("end", [Checkpointer.close, Checkpointer.wait], ids=["closed", "only waited for"])
def test_a_sweep_that_reuses_a_directory_begins_each_trial_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: Callable[[Checkpointer], object]
) -> None:
    for _ in range(3):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        assert train(tmp_path / "x", end) == 0
    is_closed = end is Checkpointer.close
    assert caplog.text.count("the copies of it in memory are left aside") == (0 if is_closed else 2)
    assert len(caplog.records) == (0 if is_closed else 2), "nothing else is wrong"


def test_copies_count_when_the_files_were_lost_with_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "x", Checkpointer.wait)
    shutil.rmtree(tmp_path / "x")
    monkeypatch.setattr(progress, "checkpointers", Checkpointers())  # another process, after a restart
    assert found(tmp_path / "x")[0] == 3


def test_copies_count_where_nothing_was_ever_saved(tmp_path: Path) -> None:
    _, checkpoints = made(tmp_path / "x", memory_every=1)
    checkpoints.load()
    progress.step(1)
    assert checkpoints.wait()
    del checkpoints
    assert found(tmp_path / "x")[0] == 1


def test_close_gives_memory_back_when_the_disk_has_the_state(tmp_path: Path, only_worker: Path) -> None:
    train(tmp_path / "x", Checkpointer.close)
    assert not [path for path in only_worker.rglob("*") if path.is_file() and path.stat().st_size]
    assert found(tmp_path / "x")[0] == 3


def test_close_keeps_copies_that_the_disk_has_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoints = made(tmp_path / "x", memory_every=1)
    checkpoints.load()
    progress.step(1)

    def refuse(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(CheckpointFiles, "publish", refuse)
    assert not checkpoints.save(1)
    assert not checkpoints.close()
    assert found(tmp_path / "x")[0] == 1


def test_close_keeps_copies_from_which_a_planned_change_goes_on(tmp_path: Path) -> None:
    """The script closes on its way out of the last step, as `finally` does."""
    _, checkpoints = made(tmp_path / "x", memory_every=1)
    checkpoints.load()
    for step in (1, 2):
        progress.step(step)
        assert step == 2 or checkpoints.save(1)
    words = progress._words
    assert words is not None
    words[PENDING] = 1
    assert checkpoints.close()
    assert found(tmp_path / "x")[0] == 2


def test_what_is_forgotten_of_shards_is_each_worker_s_own_with_the_replicas_of_it(tmp_path: Path) -> None:
    def put(folder: SlotFolder) -> Slots:
        slots = Slots(str(tmp_path), folder)
        slots.seal(slots.begin(1 << 16), Header(1, 1, 0, 2, 1 << 16))
        return slots

    own, replica = SlotFolder.of("d", 0), SlotFolder.of("d", 0, "b")
    others = (SlotFolder.of("d", 1), SlotFolder.of("d", 1, "b"), SlotFolder.of("e", 0), SlotFolder.of("e"))
    for folder in (replica, *others):
        put(folder)
    SlotMemory(put(own), 1 << 30, RankPlace("a", 1, 0, 0, 2), 4).forget()
    for folder in (own, replica, *others):
        slots = Slots(str(tmp_path), folder, create=False)
        is_kept = folder in others
        assert bool(slots.headers()) == bool(taken_by_slots(slots.folder)) == is_kept
        assert not slots.problems()


def test_a_training_whose_part_another_one_loads_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a restart both load equal steps, and nothing was waited for."""
    made(tmp_path / "a", "pretrained")[1].save(20)
    made(tmp_path / "b", "finetuned 20")[1].save(20)
    model: dict[str, Any] = {}
    pretraining = Checkpointer(tmp_path / "a", {"part": model})
    finetuning = Checkpointer(tmp_path / "b", {"part": model})
    assert pretraining.load() == finetuning.load() == 20
    model["is"] = "finetuned 21"
    progress.step(21)
    plan_a_change(21)
    assert "has a part of the one that is loaded now, so another training begins" in caplog.text
    del pretraining, finetuning
    assert found(tmp_path / "a") == (20, "pretrained")
    assert found(tmp_path / "b") == (21, "finetuned 21")


def test_of_a_training_that_another_one_follows_no_step_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for trial in range(2):
        _, checkpoints = made(tmp_path / str(trial))
        assert checkpoints.load() == 0
        for step in (1, 2):
            progress.step(step)
        del checkpoints
    progress.step(3)
    assert caplog.text.count("the script has dropped its Checkpointer") == 1
    assert f"step 3 is not kept in {tmp_path / '1'}" in caplog.text


def test_who_drops_a_checkpointer_while_training_goes_on_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = made(tmp_path / "a", memory_every=1)[1].load()
    for step in range(done + 1, 4):
        progress.step(step)
    assert caplog.text.count(f"is not kept in {tmp_path / 'a'}: the script has dropped its Checkpointer") == 1


def test_close_waits_once_and_ends_it(tmp_path: Path) -> None:
    with made(tmp_path / "a")[1] as checkpoints:
        checkpoints.load()
        assert checkpoints.save(1)
    assert checkpoints.close()
    assert not progress.checkpointers.all()
    for call in (checkpoints.load, lambda: checkpoints.save(2), lambda: checkpoints.save_to_memory(2)):
        with pytest.raises(CheckpointError, match="was closed: make a new one"):
            call()
    with made(tmp_path / "a")[1] as again:
        assert again.load() == 1


def test_an_exception_leaves_with_without_a_wait_for_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = made(tmp_path / "a")[1]
    checkpoints.load()
    monkeypatch.setattr(checkpoints, "wait", lambda: pytest.fail("waits for the others"))
    with pytest.raises(ZeroDivisionError), checkpoints:
        raise ZeroDivisionError
    assert not progress.checkpointers.all()
    made(tmp_path / "a")[1].load()


def test_old_names_work_with_a_warning_and_not_beside_new_ones(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": {}, "b": {}}
    with pytest.warns(DeprecationWarning, match="is called"):
        checkpoints = Checkpointer(tmp_path, state, of_rank_0=["a"], of_each_rank=["b"])
    with pytest.warns(DeprecationWarning, match=r"remember\(\) is called save_to_memory\(\) now"):
        assert checkpoints.remember(1)
    with pytest.raises(ValueError, match="of_rank_0 is the old name of from_rank_0"):
        Checkpointer(tmp_path / "other", state, of_rank_0=["a"], from_rank_0=["b"])
