"""The process that serves the workers' stores, in a real job: the agent stays small, and survives it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from elastic_agent.agent.workers.processes.spare_wire import FORK_SERVER, STORE
from tests.etcd_servers import EtcdCluster

from .harness import ORPHANS_S, RECORDER, Job

PLAIN_DDP = Path(__file__).with_name("plain_ddp.py")


def servers(job: Job) -> list[int]:
    """Those that their agent has started; the shim's own command line names the server's too, but in another place."""
    found = []
    for process in job.processes():
        try:
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[1:3] == [os.fsencode(FORK_SERVER), STORE.encode()]:
            found.append(process.pid)
    return found


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def memory_mb(pid: int) -> float:
    """Its own, and its part of what it shares with others."""
    found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.long
def test_only_the_server_loads_torch_and_a_killed_one_costs_a_generation(job: Job) -> None:
    script = (PLAIN_DDP, job.folder / "checkpoint.pt", 1_000_000, 0.01)
    agent = job.start("a", "--nproc-per-node=2", script=script)
    job.wait_for_text(agent, "restart 0 step 3$")
    (server,) = servers(job)
    assert maps_torch(server)
    assert not maps_torch(agent.pid)

    os.kill(server, signal.SIGKILL)
    job.wait_for_text(agent, r"restart 1 step \d+$")
    assert agent.says(r"because .*the workers' store is gone: .* killed by SIGKILL")
    (successor,) = servers(job)
    assert successor != server
    assert not maps_torch(agent.pid)


def test_with_etcd_the_agent_keeps_within_50_mb_when_it_has_done_all_that_it_does(
    job: Job, etcd: EtcdCluster
) -> None:
    job.use_etcd(etcd)
    agent = job.join("a", "--nproc-per-node=2")
    old = job.wait_for_training(world=2)
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=2, after=old.number)
    agent.get("/metrics")
    assert memory_mb(agent.pid) <= 50
    assert not maps_torch(agent.pid)


@pytest.mark.long
def test_an_agent_that_is_killed_takes_the_server_with_it_also_from_its_import_of_torch(job: Job) -> None:
    (job.folder / "torch").mkdir()
    importing = job.folder / "importing"
    slow = f"open({str(importing)!r}, 'w').close(); import time; time.sleep(600)"
    (job.folder / "torch" / "__init__.py").write_text(slow)
    path = os.pathsep.join([str(job.folder), os.environ.get("PYTHONPATH", "")])
    agent = job.start("a", script=(RECORDER,), environment={"PYTHONPATH": path})
    job.wait_for_training(world=1)
    job.wait_for(importing.exists, "the server to import torch")
    assert servers(job)
    agent.kill()
    job.wait_for(lambda: not job.processes(), "everything of the killed agent to end", ORPHANS_S)
