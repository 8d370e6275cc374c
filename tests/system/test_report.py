"""`elastic-agent report` of a real run: a killed worker and a killed node, and what the report makes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest

from elastic_agent.agent.commands.runs import find_run, journals_in
from elastic_agent.agent.output.journal import EventKind

from .harness import RECORDER, Job
from .recorder import SAVE_EVERY

UNSAVED = 2 * SAVE_EVERY + 5
"""Steps until both ranks stand still: the last five are in no checkpoint."""

pytestmark = pytest.mark.usefixtures("in_etcd")


def reported(job: Job) -> dict[str, Any]:
    command = [sys.executable, "-m", "elastic_agent", "report", job_id(job), f"--log-dir={job.folder}"]
    shown = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(shown.stdout))


def job_id(job: Job) -> str:
    [folder] = {events.parent for events in job.folder.glob("*/events-*.jsonl")}
    return folder.name.rpartition("-")[0]


def test_a_run_with_a_killed_worker_is_reported_as_it_was(job: Job) -> None:
    options = ("--nnodes=2", f"--log-dir={job.folder}", "--stop-grace=5")
    script = (RECORDER, f"--checkpoint={job.folder / 'steps'}", "--steps=120", f"--fault=1:*:{UNSAVED}:hang")
    agents = [job.join(name, *options, script=script) for name in ("a", "b")]
    old = job.wait_for_training(world=2)
    victim, node = 0, old.starts[0]["node"]  # the one that saves: no other comes to a save after its end
    job.wait_for(lambda: len(job.history(what="step", step=UNSAVED)) == 2, "steps that are not saved")
    killed = old.pid(victim)
    os.kill(killed, signal.SIGKILL)
    assert [agent.exit_code() for agent in agents] == [0, 0]
    new = job.generations()[-1]
    assert new.number == old.number + 1

    report = reported(job)
    seconds = report["seconds"]
    assert report["result"] == "succeeded"
    assert sum(seconds.values()) == pytest.approx(report["wall_seconds"], abs=0.01)
    assert (report["nodes"], report["generations"]) == (2, 2)
    assert report["troubles"] == [{"cause": "killed", "node": node, "times": 1}]
    found = chain.from_iterable(journals_in(find_run("", job.folder)))
    recoveries = [event for event in found if event.kind is EventKind.RECOVERY]
    assert {recovery.generation for recovery in recoveries} == {2}
    slowest = max(recoveries, key=lambda one: sum(one.seconds.values()))
    assert {"start", "init"} <= set(slowest.seconds)

    # While one of the two nodes trains alone, half of a second counts, or all of it where the other has no world.
    stepped = seconds["productive"] + seconds["recompute"] + seconds["saving"]
    by_rank = [trained(job, number, rank=rank) for number in (1, 2) for rank in (0, 1)]
    by_any = [trained(job, number) for number in (1, 2)]
    assert 0.85 * sum(by_rank) / 2 < stepped < 1.15 * sum(by_any)
    assert min_step(job, 2) == UNSAVED - 4
    assert seconds["recompute"] > 0, "what came after the last save"
    assert seconds["saving"] > 0
    assert report["ettr"] == pytest.approx(seconds["productive"] / report["wall_seconds"], abs=1e-3)
    gap_s = first_step(job, 2) - last_step(job, 1)
    standing = (
        sum(seconds[phase] for phase in ("detect", "stop", "rendezvous", "backoff")) + slowest.seconds["init"]
    )
    assert standing < gap_s + 1.0


def min_step(job: Job, generation: int) -> int:
    return min(int(step["step"]) for step in job.history(what="step", generation=generation))


def trained(job: Job, generation: int, **rank: int) -> float:
    """From the end of the first step to that of the last, of any rank or of this one."""
    return last_step(job, generation, **rank) - first_step(job, generation, **rank)


def first_step(job: Job, generation: int, **rank: int) -> float:
    return min(float(step["at"]) for step in job.history(what="step", generation=generation, **rank))


def last_step(job: Job, generation: int, **rank: int) -> float:
    return max(float(step["at"]) for step in job.history(what="step", generation=generation, **rank))
