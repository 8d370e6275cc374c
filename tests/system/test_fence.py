"""A rank 0 of the past (I5): its node stood still in the middle of a save, and others went on from an older one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.rendezvous.c10d_host import C10dHost
from elastic_agent.worker.files import CheckpointFiles
from tests.etcd_servers import EtcdCluster

from .harness import Job, family

SCRIPT = Path(__file__).with_name("stalling_saver.py")


@pytest.fixture
def c10d(job: Job) -> Iterator[None]:
    """Hosted beside all agents: whichever has rank 0 can be frozen."""
    listener = socket.create_server(("127.0.0.1", 0))
    job.store_port = listener.getsockname()[1]
    host = C10dHost(listener, "127.0.0.1", "default")
    yield
    host.close()


@pytest.fixture
def on_etcd(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("store", "stalled", "wakes_first", "outcome"),
    [
        pytest.param("c10d", "before-asking", "the agent", "Fenced", id="the-whole-node-wakes"),
        pytest.param(
            "on_etcd", "with-a-grant", "the worker", "SaveFailed", id="its-worker-alone-with-an-old-grant"
        ),
    ],
)
def test_a_rank_0_that_was_frozen_in_a_save_cannot_commit_when_it_wakes(
    job: Job, request: pytest.FixtureRequest, store: str, stalled: str, wakes_first: str, outcome: str
) -> None:
    request.getfixturevalue(store)
    # With no restart to spare: what the past does when it wakes must not count as a failure of the present.
    options = ("--nnodes=1:2", "--last-call=60s", "--lease-ttl=4", "--max-restarts=0", "--failure-grace=20s")
    agents = {name: job.join(name, *options, script=(SCRIPT, job.folder, stalled)) for name in ("a", "b")}
    two = job.wait_for_training(world=2)
    node, worker = two.nodes[0], two.pid(0)

    (job.folder / "stall").touch()
    job.wait_for(lambda: job.history(what="stalled"), "rank 0 to be in the middle of a save")
    processes = family(agents[node].pid)
    assert worker in processes
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        begun = job.history(what="published")[-1]["step"] + 1
        one = job.wait_for_training(world=1, after=two.number)
        assert one.nodes != [node]
        job.wait_for(
            lambda: [p for p in job.history(what="published", generation=one.number) if p["step"] > begun],
            "commits beyond the one that was begun",
        )
        (job.folder / "go").touch()
        os.kill(worker if wakes_first == "the worker" else agents[node].pid, signal.SIGCONT)
        if wakes_first == "the worker":
            job.wait_for(lambda: job.history(generation=two.number, step=begun)[-1:], "the save to end")
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)

    again = job.wait_for_training(world=2, after=one.number)
    assert again.nodes == [*one.nodes, node], "whoever comes anew stands behind"
    attempts = job.history(what="not published", generation=two.number)
    assert [(attempt["step"], attempt["why"]) for attempt in attempts] == [(begun, outcome)]

    (job.folder / "finish").touch()
    assert {name: agent.exit_code() for name, agent in agents.items()} == {"a": 0, "b": 0}
    published = [(p["generation"], p["step"]) for p in job.history(what="published")]
    assert published == sorted(published), "nothing of the past after the present began"
    assert len(published) == len({step for _, step in published}), "no step was committed twice"
    found, bad = CheckpointFiles(job.folder / "checkpoints", keep=2).find()
    assert found is not None
    with found.stream:
        assert (found.manifest.generation, found.manifest.step) == published[-1]
    assert bad == []
