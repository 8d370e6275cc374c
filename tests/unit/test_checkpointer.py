"""Checkpointer in a single process without a process group: plain `python train.py`."""

from __future__ import annotations

import collections
import errno
import functools
import multiprocessing
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.worker import (
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
    Fenced,
    NotPlainData,
    NoUsableCheckpoint,
    OtherRun,
    StepNotGrowing,
)
from elastic_agent.worker.checkpointing.loading.selection import (
    BadState,
    Offer,
    Source,
    choose_source,
)
from elastic_agent.worker.checkpointing.loading.state_loader import StateLoader
from elastic_agent.worker.checkpointing.replicated.contents import Contents
from elastic_agent.worker.state import rng
from elastic_agent.worker.state.sharding import reading
from elastic_agent.worker.steps import progress
from elastic_agent.worker.storage.disk import async_save, commit, commit_permission, ownership
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.manifests import Manifest
from elastic_agent.worker.storage.disk.shard_files import data_name
from elastic_agent.worker.wire import shared_progress
from elastic_agent.worker.wire.environment import NAMES, WORKER_VARIABLES, Run, WorkerEnv
from elastic_agent.worker.wire.messages import (
    MAX_BYTES,
    REPORTS,
    CommitAnswer,
    CommitGranted,
    CommitQuestion,
    CommitRefused,
    CommitUndecided,
    LentLock,
    LoadReport,
    Report,
    SaveReport,
)

numpy = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def plain_python(own_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *WORKER_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def spoil(directory: Path, step: int) -> None:
    (data,) = directory.glob(f"step-{step:012d}-*/{data_name(0)}")
    os.truncate(data, data.stat().st_size - 1)


def test_a_run_without_a_process_group_saves_and_loads(tmp_path: Path) -> None:
    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any], Checkpointer]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        meta: dict[str, Any] = {"epoch": 0}
        return model, optimizer, meta, Checkpointer(tmp_path, {"m": model, "o": optimizer, "meta": meta})

    model, optimizer, meta, checkpoints = fresh()
    assert checkpoints.load() == 0
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    meta.update(epoch=3, best=0.25, names=["a", "b"], nested={"pair": (1, 2.0), "none": None, "raw": b"\0"})
    assert checkpoints.save(7) is True

    resumed, resumed_optimizer, resumed_meta, resumed_checkpoints = fresh()
    assert resumed_checkpoints.load() == 7
    assert resumed_meta == meta
    assert all(torch.equal(resumed.state_dict()[name], value) for name, value in model.state_dict().items())
    assert str(resumed_optimizer.state_dict()) == str(optimizer.state_dict())


def test_one_element_that_was_cut_out_of_a_matrix_is_carried(tmp_path: Path) -> None:
    """It counts as contiguous, and its stride is not 1."""
    best = torch.arange(12.0).reshape(4, 3)[1:2, 0]
    checkpoints = Checkpointer(tmp_path, {"best": {"weight": best}})
    assert checkpoints.save(1)
    best.zero_()
    assert checkpoints.load() == 1
    assert best.tolist() == [3.0]


def test_every_random_generator_continues(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [
            random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.normal(), torch.rand(3).tolist()
        ]  # fmt: skip

    draw()  # leaves half of a Gaussian pair in random's and numpy's state
    captured = rng.capture()
    drawn = draw()
    for behind in (0, 2, 100):
        random.seed(behind)
        numpy.random.seed(behind)
        torch.manual_seed(behind)
        rng.restore(captured + bytes(behind))
        assert draw() == drawn


def test_the_loaded_step_may_be_saved_again_and_older_ones_may_not(tmp_path: Path) -> None:
    Checkpointer(tmp_path, {}).save(10)
    checkpoints = Checkpointer(tmp_path, {})
    assert checkpoints.load() == 10
    with pytest.raises(StepNotGrowing, match="step 9 is not beyond step 9"):
        checkpoints.save(9)
    assert checkpoints.save(10)
    with pytest.raises(StepNotGrowing, match="step 9 is not beyond step 10"):
        checkpoints.save(9)


def test_the_step_that_was_saved_last_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = {"is": "saved"}
    checkpoints = Checkpointer(tmp_path, {"meta": meta})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        assert not checkpoints.save(10)
    assert checkpoints.save(10), "tried again"
    meta["is"] = "changed since"
    assert checkpoints.save(10)
    assert found(tmp_path) == {"is": "saved"}, "there is no second write"
    checkpoints.load()
    meta["is"] = "another past"
    assert checkpoints.save(10), "of the step that was loaded"
    assert found(tmp_path) == {"is": "another past"}


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, "no room")


def found(directory: Path) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    Checkpointer(directory, {"meta": meta}, read_only=True).load()
    return meta


@pytest.mark.parametrize("step", [-1, 2**63])
def test_what_is_no_step_is_refused_at_once(tmp_path: Path, step: Any) -> None:
    checkpoints = Checkpointer(tmp_path, {})
    for keep in (checkpoints.save, checkpoints.save_to_memory):
        with pytest.raises(ValueError, match=r"step is .*expected the number of steps"):
            keep(step)


def test_a_thread_beside_the_training_is_refused_before_it_meets_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpointer(tmp_path, {})
    with ThreadPoolExecutor(1, "saver") as saver, monkeypatch.context() as several:
        several.setenv("WORLD_SIZE", "2")  # without a process group: to meet others is another error
        for call in (functools.partial(checkpoints.save, 10), checkpoints.wait):
            with pytest.raises(CheckpointError, match=r"cannot run on the thread saver_0.*called load\(\)"):
                saver.submit(call).result()
        several.undo()
        assert saver.submit(checkpoints.load).result() == 0
        assert saver.submit(checkpoints.save, 10).result(), "all of it on one thread"
    assert checkpoints.save(20), "and what the main thread does"


def test_a_step_lost_to_a_bad_file_may_be_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Checkpointer(tmp_path, {})
    first.save(10)
    first.save(20)
    spoil(tmp_path, 20)
    checkpoints = Checkpointer(tmp_path, {})
    assert checkpoints.load() == 10
    assert "step=20" in caplog.text
    assert "bytes long" in caplog.text
    assert checkpoints.save(20)
    assert Checkpointer(tmp_path, {}).load() == 20


def test_an_archive_that_is_never_loaded_goes_on_beyond_an_earlier_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = {"is": "of the first"}
    Checkpointer(tmp_path, {"meta": meta}).save(10)
    meta["is"] = "of the second"
    archive = Checkpointer(tmp_path, {"meta": meta}, max_failed_saves=1)
    assert [archive.save(step) for step in (5, 10)] == [False, False]
    assert caplog.text.count("has step 10 of an earlier generation") == 2
    assert archive.wait(), "nothing was refused"
    assert found(tmp_path) == {"is": "of the first"}
    assert archive.save(11)
    with pytest.raises(StepNotGrowing, match="step 9 is not beyond step 11") as caught:
        archive.save(9)
    assert "load()" not in str(caught.value)


def test_a_script_that_forgets_to_load_is_told_where_another_run_came_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpointer(tmp_path, {}).save(10)
    monkeypatch.setenv("ELASTIC_AGENT_RUN", "another")
    with pytest.raises(StepNotGrowing, match="step 5 is not beyond step 10"):
        Checkpointer(tmp_path, {}).save(5)


def test_a_reader_leaves_the_random_numbers_of_the_training(tmp_path: Path) -> None:
    Checkpointer(tmp_path, {}).save(10)
    torch.rand(3)
    before = torch.get_rng_state()
    assert Checkpointer(tmp_path, {}, read_only=True).load() == 10
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("is_child", [False, True])
def test_only_the_worker_itself_has_its_slots_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_child: bool
) -> None:
    memory = WorkerEnv(1, "run-a", "n", 0, memory=str(tmp_path / "memory"), memory_bytes=1 << 30)
    os.mkdir(memory.memory)
    places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**memory.variables(), **places}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if is_child else None)
    assert Checkpointer(tmp_path / "x", {}).save_to_memory(1) is not is_child


def test_bad_checkpoints_only_are_not_a_new_start(tmp_path: Path) -> None:
    Checkpointer(tmp_path, {}).save(10)
    spoil(tmp_path, 10)
    with pytest.raises(NoUsableCheckpoint, match="bytes long"):
        Checkpointer(tmp_path, {}).load()


def test_an_unreadable_directory_is_not_a_new_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoUsableCheckpoint, match="Not a directory"):
        Checkpointer(tmp_path / "file", {}).load()


def test_other_names_are_refused_before_anything_changes(tmp_path: Path) -> None:
    Checkpointer(tmp_path, {"a": {"x": 1}, "b": {}}).save(10)
    a = {"x": 2}
    with pytest.raises(CheckpointMismatch, match="has no part 'c'"):
        Checkpointer(tmp_path, {"a": a, "c": {}}).load()
    assert a == {"x": 2}


class Named:
    """A metric, whose values numpy has made."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"history": [0.5, self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["history"][1]


@pytest.mark.parametrize("each_rank", [[], ["metrics"]], ids=["shared", "of each rank"])
def test_numbers_of_numpy_come_back_as_pythons(tmp_path: Path, each_rank: list[str]) -> None:
    for step, value in enumerate((numpy.float64(0.25), numpy.int32(7), numpy.bool_(True)), 1):
        Checkpointer(tmp_path, {"metrics": Named(value)}, per_rank=each_rank).save(step)
        back = Named(None)
        assert Checkpointer(tmp_path, {"metrics": back}, per_rank=each_rank).load() == step
        assert type(back.value) in (float, int, bool)
        assert back.value == value


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (numpy.zeros(3), "numpy.ndarray"),
        (collections.defaultdict(int), "collections.defaultdict"),
        ({"deep": (1, Path("x"))}, "pathlib.PosixPath"),
    ],
)
def test_what_could_not_be_loaded_is_named_by_load_and_by_save(
    tmp_path: Path, value: Any, named: str
) -> None:
    key = "history/1/deep/1" if isinstance(value, dict) and "deep" in value else "history/1"
    what = rf"part 'metrics', key {key}: {named}: .*weights_only=True"
    checkpoints = Checkpointer(tmp_path, {"metrics": Named(value)})
    for call in (checkpoints.load, lambda: checkpoints.save(1)):
        with pytest.raises(NotPlainData, match=what):
            call()
    assert Checkpointer(tmp_path, {"metrics": Named(value)}, read_only=True).load() == 0


def test_a_state_that_is_code_is_refused_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotPlainData, match=r"pathlib"):
        Checkpointer(tmp_path, {"meta": {"where": Path("x")}}).save(10)
    assert Checkpointer(tmp_path, {"meta": {}}).load() == 0


def test_ranks_without_a_process_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for action in (Checkpointer(tmp_path, {}).load, lambda: Checkpointer(tmp_path, {}).save(1)):
        with pytest.raises(CheckpointError, match="init_process_group"):
            action()


@pytest.mark.parametrize("limits", [{"keep": 0}, {"max_failed_saves": 0}], ids=str)
def test_impossible_limits_are_refused(tmp_path: Path, limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Checkpointer(tmp_path, {}, **limits)


class Gate:
    """The agent's answers, one for each question, without a socket between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.answers: list[CommitAnswer] = []
        self.asked: list[CommitQuestion] = []
        self.visible: list[set[str]] = []
        self.now = 0.0
        self._directory = directory
        monkeypatch.setenv("ELASTIC_AGENT_SOCKET", "a socket")
        monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "7")
        monkeypatch.setattr(commit_permission, "ask", lambda _address, question, *_: self._answer(question))
        monkeypatch.setattr(
            async_save.DiskSaver,
            "permission",
            lambda disk: commit_permission.CommitPermission("a socket", 7, clock=lambda: self.now).check,
        )

    def _answer(self, question: CommitQuestion) -> CommitAnswer:
        self.asked.append(question)
        self.visible.append({path.name for path in self._directory.glob("step-*")})
        return self.answers.pop(0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gate:
    return Gate(monkeypatch, tmp_path)


def test_the_agent_is_asked_before_anything_is_written_and_again_when_all_is_durable(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.answers = [CommitGranted(60.0)] * 5
    checkpoints = Checkpointer(tmp_path, {})
    assert checkpoints.save(10)
    assert gate.asked == [CommitQuestion(7)] * 2, "for data and manifest, where the grants outlast the writes"
    write = commit.write_durably

    def slowly(*args: Any, **named: Any) -> Any:
        written = write(*args, **named)
        gate.now += 61.0
        return written

    monkeypatch.setattr(commit, "write_durably", slowly)
    assert checkpoints.save(20)
    first, _, before, written, durable = gate.visible
    assert first == set()
    (data,) = written - before
    assert data.startswith("step-000000000020-")
    assert durable == written


def test_an_agent_of_another_version_commits_nothing_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names its address by a variable that this version does not read; only an agent sets an incarnation."""
    monkeypatch.setenv(NAMES["incarnation"], "a life")
    assert not Checkpointer(tmp_path, {}).save(10)
    assert not list(tmp_path.glob("step-*.json"))
    assert "different versions" in caplog.text
    monkeypatch.delenv(NAMES["incarnation"])
    assert Checkpointer(tmp_path, {}).save(10)


def test_who_only_reads_takes_nothing_from_the_run_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Checkpointer(tmp_path, {})
    training.load()
    training.save(10)
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setenv("ELASTIC_AGENT_RUN", "an-evaluation")
    reader = Checkpointer(tmp_path, {}, read_only=True)
    assert reader.load() == 10
    assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(CheckpointError, match="read_only"):
        reader.save(11)
    assert training.save(20)


@pytest.mark.parametrize("own", [[], ["own"]], ids=["all alike", "one of each rank"])
def test_who_only_reads_may_take_some_parts(tmp_path: Path, own: list[str]) -> None:
    Checkpointer(tmp_path, {"a": {"x": 1}, "b": {"y": 2}, "own": {"z": 3}}, per_rank=own).save(10)
    some: dict[str, Any] = {}
    assert Checkpointer(tmp_path, {"b": some}, read_only=True).load() == 10
    assert some == {"y": 2}
    some.clear()
    mine: dict[str, Any] = {}
    state = {"a": some, "own": mine}
    assert Checkpointer(tmp_path, state, per_rank=own, read_only=True).load() == 10
    assert (some, mine) == ({"x": 1}, {"z": 3})
    for parts, options in (({"b": {}}, {}), ({"c": {}}, {"read_only": True})):
        with pytest.raises(CheckpointMismatch):
            Checkpointer(tmp_path, parts, **options).load()


@pytest.mark.parametrize("part", [torch.ones(2), 3, [torch.ones(2)]])
def test_what_is_no_part_is_refused_by_its_name(tmp_path: Path, part: Any) -> None:
    with pytest.raises(
        TypeError, match=f"part 'x' of the state is of the type {type(part).__name__}: expected"
    ):
        Checkpointer(tmp_path, {"x": part})


def test_to_load_a_teacher_is_no_beginning_of_this_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent would take the teacher's step for the one from which training goes on, and pass it over as bad."""
    teacher = Checkpointer(tmp_path / "teacher", {})
    teacher.save(90)
    teacher.save(100)
    words = shared_progress.private_words()
    monkeypatch.setattr(progress, "_words", words)
    monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "2")
    monkeypatch.setenv(NAMES["bad_state"], "1:100")
    before = bytes(words)
    assert Checkpointer(tmp_path / "teacher", {}, read_only=True).load() == 100
    with pytest.raises(CheckpointError):
        Checkpointer(tmp_path / "teacher", {"unknown": {}}, read_only=True).load()
    assert bytes(words) == before


def test_a_directory_that_another_run_has_is_refused_and_a_failed_load_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "LOCK_WAIT_S", 0.0)
    training = Checkpointer(tmp_path, {})
    assert training.load() == 0
    training.save(10)
    monkeypatch.setenv("ELASTIC_AGENT_RUN", "another")
    with pytest.raises(OtherRun, match="is in use: run"):
        Checkpointer(tmp_path, {}).load()
    assert training.save(20)
    training._files.claim._lock.forget()
    misfit = Checkpointer(tmp_path, {"other": {}})
    with pytest.raises(CheckpointMismatch):
        misfit.load()
    assert training.save(30), "who could not load has taken nothing over"
    training._files.claim._lock.forget()
    assert Checkpointer(tmp_path, {}).load() == 30
    with pytest.raises(OtherRun, match="taken over by run another"):
        training.save(40)


def chosen(monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpointer) -> tuple[str, int]:
    """What a load raises, and which step's state the agent then takes for loaded."""
    words = shared_progress.private_words()
    words[shared_progress.CHOSEN_STEP] = shared_progress.NO_STEP
    monkeypatch.setattr(progress, "_words", words)
    try:
        checkpoints.load()
    except Exception as error:
        return type(error).__name__, words[shared_progress.CHOSEN_STEP]
    return "", words[shared_progress.CHOSEN_STEP]


def test_the_agent_hears_which_state_is_loaded_and_not_of_a_load_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpointer(tmp_path, {"a": {}}).save(10)
    assert chosen(monkeypatch, Checkpointer(tmp_path, {"a": {}})) == ("", 10)
    assert chosen(monkeypatch, Checkpointer(tmp_path, {"other": {}})) == (
        "CheckpointMismatch",
        shared_progress.NO_STEP,
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise OtherRun("not yours")

    refused = Checkpointer(tmp_path, {"a": {}})
    monkeypatch.setattr(refused._files.claim, "take", refuse)
    assert chosen(monkeypatch, refused) == ("OtherRun", shared_progress.NO_STEP)


def test_a_state_that_ends_the_process_that_reads_it_was_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpointer(tmp_path, {"a": {}}).save(10)

    def break_off(*_: Any) -> None:
        raise ValueError("no archive")

    def die(*_: Any) -> None:
        raise SystemExit(139)

    monkeypatch.setattr(reading, "loaded", break_off)
    assert chosen(monkeypatch, Checkpointer(tmp_path, {"a": {}})) == ("CheckpointError", 10)
    monkeypatch.setattr(reading, "loaded", die)
    with pytest.raises(SystemExit):
        chosen(monkeypatch, Checkpointer(tmp_path, {"a": {}}))
    assert progress._words is not None
    assert progress._words[shared_progress.CHOSEN_STEP] == 10


def test_a_bad_state_never_costs_another_run_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of this run that is left is older than what another run has left on this disk."""
    monkeypatch.setenv("ELASTIC_AGENT_RUN", "ended")
    Checkpointer(tmp_path, {}).save(200)
    before = content(tmp_path)
    monkeypatch.setenv("ELASTIC_AGENT_RUN", "mine")
    monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "5")
    monkeypatch.setenv("ELASTIC_AGENT_BAD_STATE", "4:90")
    mine = Manifest(85, 2, 1, f"step-{85:012d}-mine-00000000-{'a' * 16}.pt", 1, "a" * 64, "mine")
    env = WorkerEnv.of(os.environ)
    files = CheckpointFiles(tmp_path, keep=2, run=Run("mine"))
    contents = Contents({}, (), {}, is_compared=False)
    one = StateLoader(files, contents, None, env, is_sharded=False, read_only=False)
    foreign = one._offer(one._claimed(), ())
    assert foreign.foreign
    assert foreign.manifest is not None
    assert choose_source([foreign, Offer(mine)], BadState.of(env, "mine")) == Source(mine, 1)
    assert content(tmp_path) == before


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_process_of_the_past_commits_nothing(tmp_path: Path, gate: Gate) -> None:
    gate.answers = [CommitGranted(60.0), CommitGranted(60.0), CommitRefused("generation 8 has replaced it")]
    checkpoints = Checkpointer(tmp_path, {})
    checkpoints.save(10)
    with pytest.raises(Fenced, match="generation 7 is over"):
        checkpoints.save(20)
    assert Checkpointer(tmp_path, {}).load() == 10
    assert not list(tmp_path.glob("tmp-*"))


def test_an_unconfirmed_generation_saves_nothing_and_ends_nothing(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    away = CommitUndecided("the store is away")
    granted = [CommitGranted(60.0)] * 2
    gate.answers = [*granted, *[away] * 5, *granted]
    checkpoints = Checkpointer(tmp_path, {}, max_failed_saves=2)
    assert [checkpoints.save(step) for step in range(1, 8)] == [True, *[False] * 5, True]
    assert "training goes on" in caplog.text
    assert "the store is away" in caplog.text
    assert Checkpointer(tmp_path, {}).load() == 7
    assert not list(tmp_path.glob("tmp-*"))


def test_the_agent_hears_of_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    agent.bind(str(tmp_path / "reports"))
    monkeypatch.setenv("ELASTIC_AGENT_REPORTS", str(tmp_path / "reports"))
    monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "7")
    monkeypatch.setenv("ELASTIC_AGENT_LOCAL_RANK", "1")
    monkeypatch.setattr(progress, "_reporter", None)

    def heard() -> Report:
        """But for the locks, which each of these Checkpointers lends."""
        while isinstance(message := REPORTS.decode(agent.recv(MAX_BYTES + 1)), LentLock):
            pass
        return message

    directory = tmp_path / "x"
    Checkpointer(directory, {}).load()
    loaded = heard()
    assert isinstance(loaded, LoadReport)
    assert (loaded.step, loaded.result) == (0, "none")

    Checkpointer(directory, {}).save(10)
    saved = heard()
    assert isinstance(saved, SaveReport)
    manifest = CheckpointFiles(directory, keep=1, run=Run("reader")).newest_manifest()
    assert manifest is not None
    assert (saved.generation, saved.local_rank, saved.step, saved.result) == (7, 1, 10, "ok")
    assert saved.bytes == manifest.size
    assert saved.directory == str(directory)

    assert not Checkpointer(directory, {}).save(10)
    with pytest.raises(BlockingIOError):
        heard()  # no disk has refused anything: a job that ends with success then has its state there

    spoil(directory, 10)
    with pytest.raises(NoUsableCheckpoint):
        Checkpointer(directory, {}).load()
    heard_last = [heard(), heard()]
    assert [(one.step, one.result) for one in heard_last if isinstance(one, LoadReport)] == [
        (10, "corrupt"),
        (0, "error"),
    ]
