"""Checkpointer in a single process without a process group: plain `python train.py`."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.agent.configuration.options import WORKER_VARIABLES
from elastic_agent.worker import (
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
    Fenced,
    NotPlainData,
    NoUsableCheckpoint,
    StepNotGrowing,
    progress,
    rng,
)
from elastic_agent.worker import permit as permit_module
from elastic_agent.worker.commits import Answer, Granted, Question, Refused, Undecided
from elastic_agent.worker.reports import MAX_BYTES, LoadReport, Report, SaveReport, decode

numpy = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *WORKER_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def spoil(directory: Path, step: int) -> None:
    (data,) = directory.glob(f"step-{step:012d}-*.pt")
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


def test_every_random_generator_continues(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [
            random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.normal(), torch.rand(3).tolist()
        ]  # fmt: skip

    draw()  # leaves half of a Gaussian pair in random's and numpy's state
    captured = rng.capture()
    drawn = draw()
    for seed in (1, 2):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        rng.restore(captured)
        assert draw() == drawn


def test_the_loaded_step_may_be_saved_again_and_older_ones_may_not(tmp_path: Path) -> None:
    Checkpointer(tmp_path, {}).save(10)
    checkpoints = Checkpointer(tmp_path, {})
    assert checkpoints.load() == 10
    with pytest.raises(StepNotGrowing, match="step 9 is not beyond step 9"):
        checkpoints.save(9)
    assert checkpoints.save(10)
    with pytest.raises(StepNotGrowing, match="step 10 is not beyond step 10"):
        checkpoints.save(10)


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


def test_a_script_that_forgot_to_load_cannot_overwrite(tmp_path: Path) -> None:
    Checkpointer(tmp_path, {}).save(10)
    with pytest.raises(StepNotGrowing, match=r"step 5 is not beyond step 10.*call load\(\) first"):
        Checkpointer(tmp_path, {}).save(5)


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
    with pytest.raises(CheckpointMismatch, match=r"holds \['a', 'b'\], this script's state is \['a', 'c'\]"):
        Checkpointer(tmp_path, {"a": a, "c": {}}).load()
    assert a == {"x": 2}


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
        self.answers: list[Answer] = []
        self.asked: list[Question] = []
        self.visible: list[set[str]] = []
        self._directory = directory
        monkeypatch.setenv("ELASTIC_AGENT_COMMITS", "a socket")
        monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "7")
        monkeypatch.setattr(permit_module.Permit, "_answer", lambda permit: self._answer(permit))

    def _answer(self, permit: permit_module.Permit) -> Answer:
        self.asked.append(Question(permit._generation))
        self.visible.append({path.name for path in self._directory.glob("step-*")})
        return self.answers.pop(0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gate:
    return Gate(monkeypatch, tmp_path)


def test_the_agent_is_asked_when_all_is_durable_and_nothing_visible(tmp_path: Path, gate: Gate) -> None:
    gate.answers = [Granted(60.0)] * 2
    checkpoints = Checkpointer(tmp_path, {})
    assert checkpoints.save(10)
    assert checkpoints.save(20)
    assert gate.asked == [Question(7)] * 2, "once for each checkpoint"
    data, manifest = sorted(path.name for path in tmp_path.glob("step-000000000010*"))
    assert gate.visible[0] == {data}
    assert manifest in gate.visible[1]


def test_a_process_of_the_past_commits_nothing(tmp_path: Path, gate: Gate) -> None:
    gate.answers = [Granted(60.0), Refused("generation 8 has replaced it")]
    checkpoints = Checkpointer(tmp_path, {})
    checkpoints.save(10)
    with pytest.raises(Fenced, match="generation 7 is over"):
        checkpoints.save(20)
    assert Checkpointer(tmp_path, {}).load() == 10
    assert not list(tmp_path.glob("tmp-*"))


def test_an_unconfirmed_generation_saves_nothing_and_ends_nothing(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    away = Undecided("the store is away")
    gate.answers = [Granted(60.0), *[away] * 5, Granted(60.0)]
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
        return decode(agent.recv(MAX_BYTES + 1))

    directory = tmp_path / "x"
    Checkpointer(directory, {}).load()
    loaded = heard()
    assert isinstance(loaded, LoadReport)
    assert (loaded.step, loaded.result) == (0, "none")

    Checkpointer(directory, {}).save(10)
    saved = heard()
    assert isinstance(saved, SaveReport)
    (data,) = directory.glob("*.pt")
    assert (saved.generation, saved.local_rank, saved.step, saved.result) == (7, 1, 10, "ok")
    assert saved.bytes == data.stat().st_size

    with pytest.raises(StepNotGrowing):
        Checkpointer(directory, {}).save(10)
    refused = heard()
    assert isinstance(refused, SaveReport)
    assert (refused.result, refused.bytes) == ("error", 0)

    spoil(directory, 10)
    with pytest.raises(NoUsableCheckpoint):
        Checkpointer(directory, {}).load()
    heard_last = [heard(), heard()]
    assert [(one.step, one.result) for one in heard_last if isinstance(one, LoadReport)] == [
        (10, "corrupt"),
        (0, "error"),
    ]
