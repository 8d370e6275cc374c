"""Machines that go away after a notice of their cloud or of a file: each is a network namespace with its own metadata
server at 169.254.169.254, and is killed as a whole at its deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import TypeAlias

import pytest

from elastic_agent.agent.machine.notices import ACTION_PATH, EVENTS_PATH, HOST, NAME_PATH
from tests.etcd_servers import EtcdCluster, etcd_cluster

from .harness import TORCH_PRELOADED, Agent, Generation, Job
from .lockstep_job import LockstepJob
from .networks import Network, network, run

SERVER = Path(__file__).parents[1] / "metadata_server.py"
GUARDED = Path(__file__).with_name("guarded_ddp.py")
NODES = ("a", "b", "c", "d")
Give: TypeAlias = Callable[["Machine", datetime], None]


class Machine:
    """A node's machine, with the notices that it gives."""

    def __init__(self, name: str, net: Network, folder: Path) -> None:
        self.name, self.host = name, net[name]
        self.pages, self.file = folder / f"{name}-pages.json", folder / f"{name}-leaves"
        self.answer({NAME_PATH: f"vm-{name}", EVENTS_PATH: json.dumps({"Events": []})})
        run("ip", "-n", self.host.namespace, "addr", "add", f"{HOST}/32", "dev", "lo")
        self._server = subprocess.Popen(
            [*self.host.enter, sys.executable, str(SERVER), HOST, str(self.pages)]
        )

    def answer(self, pages: dict[str, str]) -> None:
        new = self.pages.with_suffix(".new")
        new.write_text(json.dumps(pages))
        new.rename(self.pages)

    def goes_away(self) -> None:
        """The cable first: nobody is told."""
        self.host.unplug()
        for pid in map(int, run("ip", "netns", "pids", self.host.namespace).split()):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


def aws(machine: Machine, at: datetime) -> None:
    machine.answer({ACTION_PATH: json.dumps({"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"})})


def azure(machine: Machine, at: datetime) -> None:
    event = {"EventType": "Preempt", "Resources": [f"vm-{machine.name}"], "EventStatus": "Scheduled"}
    events = [{**event, "NotBefore": format_datetime(at, usegmt=True)}]
    machine.answer({NAME_PATH: f"vm-{machine.name}", EVENTS_PATH: json.dumps({"Events": events})})


def file(machine: Machine, at: datetime) -> None:
    new = machine.file.with_suffix(".new")
    new.write_text(f"{at:%Y-%m-%dT%H:%M:%SZ}")
    new.rename(machine.file)


@pytest.fixture
def net() -> Iterator[Network]:
    with network("store", *NODES) as net:
        yield net


@pytest.fixture
def etcd(net: Network) -> Iterator[EtcdCluster]:
    with etcd_cluster(places=[net["store"].place]) as cluster:
        yield cluster


@pytest.fixture
def machines(net: Network, tmp_path: Path) -> Iterator[dict[str, Machine]]:
    machines = {name: Machine(name, net, tmp_path) for name in NODES}
    yield machines
    for machine in machines.values():
        machine.close()


def join(lockstep: LockstepJob, etcd: EtcdCluster, machine: Machine, notice: str, *options: str) -> Agent:
    (host, port), *_ = etcd.endpoints
    store = (f"--rdzv-endpoint=etcd://{host}:{port}", f"--rdzv-id={lockstep.job.id}", "--etcd-insecure")
    options = (*store, "--nnodes=1:4", "--last-call=30s", f"--notice={notice}", *options)
    return lockstep.job.start(machine.name, *options, script=lockstep.script, enter=machine.host.enter)


def leaves(
    lockstep: LockstepJob, machine: Machine, agent: Agent, give: Give, within_s: float
) -> tuple[float, float]:
    """Gives notice, and takes the machine away at the deadline. Seconds until its workers and its agent had ended."""
    now = datetime.now(timezone.utc)
    at = (now + timedelta(seconds=within_s + 0.999)).replace(microsecond=0)  # clouds name whole seconds
    time.sleep(max(0.0, (at - now).total_seconds() - within_s))
    began = time.monotonic()
    give(machine, at)
    workers_at = None
    while agent.process.poll() is None and time.monotonic() < began + within_s:
        if workers_at is None and not lockstep.job.workers(machine.name):
            workers_at = time.monotonic()
        time.sleep(0.01)
    ended_at = time.monotonic()
    machine.goes_away()
    assert agent.process.wait() == 143, f"the machine was gone after {within_s} s, before its agent"
    return (workers_at or ended_at) - began, ended_at - began


def test_a_notice_of_30_of_10_and_of_2_seconds_costs_no_step(
    job: Job,
    etcd: EtcdCluster,
    machines: dict[str, Machine],
    record_property: Callable[[str, object], None],
) -> None:
    """Also on the node of rank 0, which coordinates."""
    lockstep = LockstepJob(job)
    first = machines["a"]
    kinds = {"a": "azure", "b": f"file:{machines['b'].file}", "c": "aws", "d": "off"}
    agents = {"a": join(lockstep, etcd, first, kinds["a"])}
    job.wait_for_text(agents["a"], "waiting: last call")
    for name in NODES[1:]:
        agents[name] = join(lockstep, etcd, machines[name], kinds[name])
    before: Generation = job.wait_for_training(world=4)
    rounds: list[tuple[str, Give, float]] = [("c", aws, 30.0), ("a", azure, 10.0), ("b", file, 2.0)]
    for left, (name, give, within_s) in enumerate(rounds, 1):
        took = leaves(lockstep, machines[name], agents[name], give, within_s)
        record_property("notice", (within_s, *took))
        print(
            f"notice of {within_s:g} s: workers ended after {took[0]:.2f} s, the agent after {took[1]:.2f} s"
        )
        after = job.wait_for_training(world=4 - left, after=before.number)
        lockstep.check_nothing_lost(before, after)
        assert agents[name].says(r"stopped by a notice: .*")
        before = after
    assert agents["d"].says("0 failures so far")


@pytest.mark.long
def test_a_step_longer_than_the_notice_costs_no_finished_one(job: Job) -> None:
    """The workers guard their last step: the node that stays keeps it when the drain is given up."""
    steps, file = job.folder / "steps", job.folder / "leaves"
    steps.touch()

    def join(name: str, *options: str) -> Agent:
        return job.join(
            name,
            "--nnodes=1:2",
            "--last-call=30s",
            TORCH_PRELOADED,
            *options,
            script=(GUARDED, job.folder / "checkpoints", "60"),
            environment={"STEPS_FILE": str(steps), "LONG_STEP": "31"},
        )

    stays = join("a")
    job.wait_for_text(stays, "waiting: last call")
    leaves = join("b", f"--notice=file:{file}")
    job.wait_for(lambda: steps.read_text().count('"step": 30') == 2, "the long step to begin")
    file.write_text("2")
    began = time.monotonic()
    while leaves.process.poll() is None and time.monotonic() < began + 2.0:
        time.sleep(0.01)
    print(f"left after {time.monotonic() - began:.2f} s")
    for process in job.processes():
        if process.environment.get("ELASTIC_AGENT_NODE") == "b" or process.pid == leaves.pid:
            os.kill(process.pid, signal.SIGKILL)
    assert leaves.says("the workers have not ended between two steps in time")
    job.wait_for(lambda: steps.read_text().count('"begun"') == 3, "the next generation")
    begun = [note for note in map(json.loads, steps.read_text().splitlines()) if note["what"] == "begun"]
    assert [note["step"] for note in begun] == [0, 0, 30]
    assert stays.says(r"generation 2 \(leave\): 1 node,.* 0 failures so far")
