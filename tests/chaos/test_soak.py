"""Many kills in a row, and planned changes among them: no hang, no orphan, no step that is not accounted for, and the
very weights of a quiet run.

`make soak` asks for 200 kills; a few, always the same ones, are among all tests. What a `Job` checks by itself is
checked here, too: never two generations on a node, dense ranks, no process that outlives its agent.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster
from tests.system.harness import Job

from .soak import Soak, Training, mistakes, most_lost, plan, results, undisturbed, unplanned

KILLS = int(os.environ.get("SOAK_KILLS", "3"))
SEED = int(os.environ.get("SOAK_SEED", "1"))


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
    assert disturbed == undisturbed(tmp_path / "quiet", Training(words=(str(disturbed[0]["step"]), "0")))
