"""An epoch through planned changes of real nodes: every sample is trained on once, by whichever ranks there are."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

from tests.etcd_servers import EtcdCluster

from .harness import Job

SAMPLING = Path(__file__).with_name("sampling.py")
OPTIONS = ("--nnodes=2:3", "--last-call=2s", "--preload=torch")
SAMPLES, BATCH = 1002, 3
"""They come out even between three ranks, and between two."""


def test_no_sample_is_repeated_or_lost_when_three_nodes_become_two_and_three_again(
    job: Job, etcd: EtcdCluster
) -> None:
    job.use_etcd(etcd)
    script = (SAMPLING, job.folder, str(SAMPLES), str(BATCH))
    agents = {name: job.join(name, *OPTIONS, script=script) for name in ("a", "b", "c")}
    three = job.wait_for_training(world=3)
    leaver = agents.pop(three.nodes[1])
    leaver.signal(signal.SIGTERM)
    two = job.wait_for_training(world=2, after=three.number)
    assert leaver.exit_code() == 143
    agents["d"] = job.join("d", *OPTIONS, script=script)
    again = job.wait_for(
        lambda: [new for new in job.generations() if new.number > two.number and len(new.starts) == 3],
        "three nodes again",
    )
    (job.folder / "go-on").touch()
    assert {agent.exit_code() for agent in agents.values()} == {0}
    assert len(job.history(what="end", generation=again[0].number)) == 3
    trained = [number for record in job.history(what="step") for number in record["samples"]]
    assert Counter(trained) == Counter(range(SAMPLES))
