"""A rank 0 of the past (I5): its node stood still in the middle of a save, and others went on from an older one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_agent.rendezvous.c10d.host import C10dHost
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.wire.environment import Run
from tests.etcd_servers import EtcdCluster

from .harness import CHECKPOINTER_PRELOADED, Job
from .processes import family

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


@dataclass(frozen=True, slots=True)
class Past:
    """A rank 0 that stands still in a save, with all processes of its node."""

    node: str
    worker: int
    processes: list[int]
    step: int

    def wake(self, *pids: int) -> None:
        for pid in pids or self.processes:
            os.kill(pid, signal.SIGCONT)


def freeze_rank_0_in_a_save(job: Job, where: str) -> Past:
    # With no restart to spare: what the past does when it wakes must not count as a failure of the present.
    options = ("--nnodes=1:2", "--last-call=60s", "--lease-ttl=4", "--max-restarts=0", CHECKPOINTER_PRELOADED)
    agents = {name: job.join(name, *options, script=(SCRIPT, job.folder, where)) for name in ("a", "b")}
    two = job.wait_for_training(world=2)
    (job.folder / "stall").touch()
    job.wait_for(lambda: job.history(what="stalled"), "rank 0 to be in the middle of a save")
    node = two.nodes[0]
    processes = family(agents[node].pid)
    assert two.pid(0) in processes
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    (job.folder / "go").touch()
    return Past(node, two.pid(0), processes, job.history(what="published")[-1]["step"] + 1)


def expect_the_past_to_rejoin_and_the_job_to_end_well(job: Job, past: Past) -> None:
    again = job.wait_for_training(world=2, after=2)
    assert again.nodes[1] == past.node, "whoever comes anew stands behind"
    (job.folder / "finish").touch()
    assert [agent.exit_code() for agent in job.agents] == [0, 0]
    published = [(p["generation"], p["step"]) for p in job.history(what="published")]
    assert published == sorted(published), "nothing of the past after the present began"
    assert len(published) == len({step for _, step in published}), "no step was committed twice"
    found, bad = CheckpointFiles(job.folder / "checkpoints", keep=2, run=Run("reader")).find()
    assert found is not None
    with found.stream:
        assert (found.manifest.generation, found.manifest.step) == published[-1]
    assert bad == []


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("c10d")
def test_a_node_that_wakes_when_others_went_on_cannot_commit(job: Job) -> None:
    past = freeze_rank_0_in_a_save(job, "data-written")
    job.wait_for(
        lambda: [one for one in job.history(what="published", generation=2) if one["step"] > past.step],
        "the others to commit more than the frozen one had begun to",
    )
    past.wake()
    outcome = job.wait_for(lambda: job.history(generation=1, step=past.step), "the old save to end")
    assert [(one["what"], one.get("why")) for one in outcome] == [("not published", "Fenced")]
    expect_the_past_to_rejoin_and_the_job_to_end_well(job, past)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("on_etcd")
def test_a_grant_from_before_the_freeze_is_worth_nothing_after_it(job: Job) -> None:
    """The worker wakes first, and its agent, which could tell it what has happened or kill it, does not answer."""
    past = freeze_rank_0_in_a_save(job, "granted")
    job.wait_for(lambda: job.history(what="loaded", generation=2), "the others to go on")
    past.wake(past.worker)
    outcome = job.wait_for(lambda: job.history(generation=1, step=past.step), "the old save to end")
    past.wake()
    assert [(one["what"], one.get("why")) for one in outcome] == [("not published", "Unconfirmed")]
    (job.folder / "woken").touch()
    expect_the_past_to_rejoin_and_the_job_to_end_well(job, past)
