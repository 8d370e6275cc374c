"""Many kills in a row, and planned changes among them: no hang, no orphan, no step that is not accounted for, and the
very weights of a quiet run.

`make soak` asks for 200 kills; a few, always the same ones, are among all tests. What a `Job` checks by itself is
checked here, too: never two generations on a node, dense ranks, no process that outlives its agent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster
from tests.system.harness import Job, Record

from .soak import NODES, PRELOAD, SCRIPT, Soak, mistakes, most_lost, plan, unplanned

KILLS = int(os.environ.get("SOAK_KILLS", "3"))
SEED = int(os.environ.get("SOAK_SEED", "1"))


@pytest.fixture
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


def undisturbed(folder: Path, steps: int) -> list[Record]:
    """The results by rank of as many ranks on one node, without any fault."""
    folder.mkdir()
    (folder / "enough").touch()
    job = Job(folder)
    script = (SCRIPT, folder, str(steps), "0")
    workers = f"--nproc-per-node={len(NODES)}"
    agent = job.start("quiet", PRELOAD, workers, script=script, environment={"OMP_NUM_THREADS": "1"})
    code = agent.exit_code(300)
    found = results(job)
    job.close()
    assert code == 0, agent.text
    return found


def results(job: Job) -> list[Record]:
    found = sorted(job.history(what="result"), key=lambda result: int(result["rank"]))
    return [{name: one[name] for name in ("rank", "step", "weights")} for one in found]


@pytest.mark.timeout(120 + 60 * KILLS)
def test_kills_in_a_row_change_not_one_bit(job: Job, etcd: EtcdCluster, tmp_path: Path) -> None:
    faults = plan(SEED, KILLS)
    ended = Soak(job, etcd, SEED, faults).run()
    generations = [generation.number for generation in job.generations()]
    assert len(generations) > len(faults), "each fault ends a generation, or the run is invalid"
    history = job.history()
    wrong = mistakes(history, lambda generation: most_lost(ended.get(generation)))
    wrong += unplanned(history, [number for number, fault in ended.items() if fault.kind.planned])
    assert not wrong, f"SOAK_SEED={SEED} SOAK_KILLS={KILLS}: {wrong}"
    disturbed = results(job)
    assert disturbed == undisturbed(tmp_path / "quiet", disturbed[0]["step"])
