"""Which of the time of a step a rank was at work itself, and that measuring it changes nothing else."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from elastic_agent.worker.steps import torch_workarounds
from elastic_agent.worker.steps.torch_workarounds import Waits
from elastic_agent.worker.wire.environment import NAMES
from elastic_agent.worker.wire.shared_progress import SharedProgress
from tests.unit.own_time_job import SLEEP_S

JOB = Path(__file__).with_name("own_time_job.py")
SLOW = {"ddp": 1, "buffers": 0, "compiled": 1, "fsdp": 1, "plain": 1}


def train(store: Path, *, measured: bool) -> list[dict[str, Any]]:
    """What each rank has printed."""
    pages = [SharedProgress.make(generation=7) for _ in range(2)]
    jobs = []
    for rank, page in enumerate(pages):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "ELASTIC_AGENT_GENERATION": "7",
            "OMP_NUM_THREADS": "1",
        }
        environment |= {NAMES["page"]: page.path}
        command = [sys.executable, str(JOB), f"file://{store}", *(["--measure"] if measured else [])]
        jobs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    for page in pages:
        page.close()
    assert [job.returncode for job in jobs] == [0, 0]
    return [json.loads(output) for output in outputs]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("store") / "measured", measured=True)


@pytest.mark.parametrize("way", SLOW)
def test_the_rank_that_sleeps_has_worked_longer(measured: list[dict[str, Any]], way: str) -> None:
    own = [statistics.median(rank[way][0][1:]) for rank in measured]
    slow = SLOW[way]
    assert own[slow] >= SLEEP_S * 1e9
    assert own[1 - slow] < own[slow] / 2, "it waits for the other, and that is not its own time"


@pytest.mark.long
def test_the_models_are_the_same_without_it(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    without = train(tmp_path / "store", measured=False)
    for ours, theirs in zip(measured, without, strict=True):
        assert {way: digest for way, (_, digest) in ours.items()} == {
            way: d for way, (_, d) in theirs.items()
        }


# ---------------------------------------------------------------- what it must not change


def of_torch(function: Any) -> Any:
    """Another test may have let this process be watched."""
    while getattr(getattr(function, "__code__", None), "co_filename", "") == torch_workarounds.__file__:
        function = function.__wrapped__
    return function


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Those of this thread; torch is as before afterwards."""
    for place, name in ((dist, "_broadcast_coalesced"), (torch.autograd, "backward"), (dist.Work, "wait")):
        monkeypatch.setattr(place, name, of_torch(getattr(place, name)))
    watched = torch_workarounds.watch_waits()
    assert watched is not None
    return watched


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a nanosecond each time it is read: a wait, whose begin and end are read, takes one."""
    now = itertools.count()
    monkeypatch.setattr(torch_workarounds, "_now_ns", lambda: next(now))


def test_hooks_of_the_script_run_as_before(waits: Waits) -> None:
    seen: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    loss.register_hook(lambda gradient: seen.append("tensor"))
    loss.grad_fn.register_prehook(lambda gradients: seen.append("node"))
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == ["tensor", "node"] * 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 3


@pytest.mark.usefixtures("ticking")
def test_a_pass_within_a_pass_counts_once(waits: Waits) -> None:
    weight = torch.ones(3, requires_grad=True)
    checkpoint(lambda value: value * 2, weight, use_reentrant=True).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3
    assert waits.total_ns == 1


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_a_compiled_model_trains(waits: Waits, compiled_autograd: bool) -> None:
    layer = torch.nn.Linear(2, 2)
    model = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3.0, 3.0]] * 2


def test_waits_of_other_threads_do_not_count() -> None:
    waits = Waits(thread=-1)
    assert waits.timed(lambda number: number + 1)(1) == 2
    assert waits.total_ns == 0


def test_time_before_the_first_step_is_no_part_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_agent.worker.steps import progress

    waits = Waits(torch_workarounds._ident())
    for name, value in {"_words": None, "_waits": waits, "_waited_ns": -1, "_listeners": ()}.items():
        monkeypatch.setattr(progress, name, value)
    with closing(SharedProgress.make(generation=7)) as page:
        monkeypatch.setenv(NAMES["page"], page.path)
        monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "7")
        now = iter((10_000, 10_500, 11_000))
        monkeypatch.setattr(progress, "_now_ns", lambda: next(now))
        waits.total_ns = 5_000
        progress.step(1)
        waits.total_ns = 5_200
        progress.step(2)
        progress.step(3)
        assert page.own_times(0) == (2, [300, 500])
