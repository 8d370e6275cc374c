"""Many kills in a row of workers and nodes that train `examples/elastic_fsdp.py`: the very weights of a quiet run.

No rank has another one's shards, and no checkpoint on disk is left to load (see `sharded_soak_job`), so each lost node
is replaced out of its partner's replicas. All worlds have three nodes: only then are the weights the same to the last
bit. `make soak-sharded` asks for 50 kills.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster
from tests.system.harness import Job

from .soak import NODES, Fault, Kind, Soak, Training, mistakes, results, undisturbed

KILLS = int(os.environ.get("SOAK_KILLS", "3"))
SEED = int(os.environ.get("SOAK_SEED", "1"))

SCRIPT = Path(__file__).with_name("sharded_soak_job.py")
PRELOAD = "--preload=torch.distributed.fsdp,elastic_agent.worker"
STEP_S = 0.01
LEAST_STEPS = 6
"""Between two faults."""
MOST_LOST = LEAST_STEPS - 1
"""Every step is copied to memory, and to the partner, unless the copy before is still on its way there, or the one
before that on its way to disk. So many are fewer than any generation does: also what it began at, which it saves to
disk, would be too old."""


def plan(seed: int, kills: int) -> list[Fault]:
    """Half of them of workers, half of whole nodes."""
    rng = random.Random(seed)
    kinds = [(Kind.WORKER, Kind.NODE)[number % 2] for number in range(kills)]
    rng.shuffle(kinds)
    return [Fault(kind, rng.choice(NODES), rng.randint(LEAST_STEPS, 20)) for kind in kinds]


def steps_lost(job: Job) -> list[int]:
    """By generation, how many steps that all ranks had finished the next one did again."""
    lost = []
    for before, after in itertools.pairwise(job.generations()):
        finished = min(
            max(
                (one["step"] for one in job.history(what="step", generation=before.number, rank=rank)),
                default=0,
            )
            for rank in range(len(NODES))
        )
        began = [one["step"] for one in job.history(what="load", generation=after.number)]
        lost += [finished - began[0]] if finished and began else []
    return lost


@pytest.mark.long
@pytest.mark.timeout(120 + 60 * KILLS)
def test_kills_of_workers_and_nodes_change_not_one_bit(job: Job, etcd: EtcdCluster, tmp_path: Path) -> None:
    epochs = str(KILLS + 2)  # of 22 steps each, more than are done between as many faults
    began_s = time.monotonic()
    ended = Soak(job, etcd, SEED, plan(SEED, KILLS), Training(SCRIPT, (epochs, str(STEP_S)), PRELOAD)).run()
    of_kinds = Counter(fault.kind.value for fault in ended.values())
    print(f"{dict(of_kinds)} in {time.monotonic() - began_s:.0f} s")
    print(f"steps done again, to how often: {dict(sorted(Counter(steps_lost(job)).items()))}")
    wrong = mistakes(job.history(), lambda generation: MOST_LOST if generation in ended else 0)
    assert not wrong, f"SOAK_SEED={SEED} SOAK_KILLS={KILLS}: {wrong}"
    ended_with = results(job)
    assert len(ended_with) == len(NODES)
    assert ended_with == undisturbed(tmp_path / "quiet", Training(SCRIPT, (epochs, "0"), PRELOAD))
