"""Stock torchrun with `--rdzv-backend=etcd-v3`, on a real etcd: what its own backends fail at.

A *node* here is one torchrun process with one worker. The port of the workers' store tells one world from another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster
from tests.waiting import wait_for

from .harness import Agent, in_order_of_time
from .processes import MARKER, Process, processes_of

PATIENCE_S = 90.0
"""torchrun and each of its workers import torch, on cores that others use, too."""

WORKER = Path(__file__).with_name("torchrun_worker.py")

pytestmark = pytest.mark.timeout(300)

T = TypeVar("T")


class Torchruns:
    """The nodes of one job, and what their workers have written."""

    def __init__(self, cluster: EtcdCluster, folder: Path) -> None:
        self.id = uuid.uuid4().hex
        self.until = folder / "until"
        self.nodes: dict[str, Agent] = {}
        self._endpoint = cluster.url(0).removeprefix("http://")
        self._folder = folder
        self._history = folder / "history.jsonl"
        self._history.touch()

    def start(
        self,
        name: str,
        nnodes: str,
        *worker: str,
        max_restarts: int = 0,
        local_addr: str = "127.0.0.1",
        lease_ttl: int = 2,
    ) -> Agent:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=etcd-v3", f"--nnodes={nnodes}"),
            *(f"--rdzv-endpoint={self._endpoint}", f"--rdzv-id={self.id}", f"--local-addr={local_addr}"),
            *(f"--max-restarts={max_restarts}", f"--rdzv-conf=lease_ttl={lease_ttl},last_call_timeout=0"),
            *(str(WORKER), f"--until={self.until}", *worker),
        ]
        surroundings = {"TEST_NODE": name, MARKER: self.id, "SYSTEM_TEST_HISTORY": str(self._history)}
        node = Agent(name, command, {**os.environ, **surroundings}, self._folder / f"{name}.log")
        self.nodes[name] = node
        return node

    def history(self, what: str) -> list[dict[str, str]]:
        *lines, _ = self._history.read_text().split("\n")
        return [record for record in map(json.loads, lines) if record["what"] == what]

    def worlds(self) -> list[str]:
        """The ports of their stores, in the order of their beginning."""
        return list(dict.fromkeys(record["master_port"] for record in self.history("start")))

    def await_training(self, *nodes: str, after: str | None = None) -> str:
        """The newest world, other than `after`, once these nodes and no others have all done a step in it."""

        def training() -> str | None:
            newest = self.worlds()[-1:]
            for world in newest:
                steps = [step for step in self.history("step") if step["master_port"] == world]
                places = {(step["test_node"], step["rank"], step["world_size"]) for step in steps}
                names, ranks, sizes = (sorted({place[n] for place in places}) for n in range(3))
                complete = names == sorted(nodes) and ranks == [str(n) for n in range(len(nodes))]
                if world != after and complete and sizes == [str(len(nodes))] and len(places) == len(nodes):
                    return world
            return None

        world = self.wait_for(training, f"{nodes} to train in a world after {after}")
        assert world is not None
        return world

    def first_node(self, world: str) -> str:
        (node,) = {
            r["test_node"] for r in self.history("start") if r["master_port"] == world and r["rank"] == "0"
        }
        return node

    def wait_for(self, condition: Callable[[], T], what: str) -> T:
        return wait_for(condition, what, PATIENCE_S)

    def processes(self, node: str | None = None) -> list[Process]:
        found = processes_of(self.id)
        return [one for one in found if node in (None, one.environment["TEST_NODE"])]

    def lose(self, node: str) -> None:
        """The machine is gone: torchrun and its workers at the same time."""
        for process in self.processes(node):
            os.kill(process.pid, signal.SIGKILL)
        self.nodes.pop(node).process.wait()

    def exit_codes(self) -> set[int]:
        return {node.exit_code(PATIENCE_S) for node in self.nodes.values()}

    def close(self) -> None:
        for process in self.processes():
            os.kill(process.pid, signal.SIGKILL)
        for node in self.nodes.values():
            node.process.wait()
        print(in_order_of_time(node.text for node in self.nodes.values()))


@pytest.fixture
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture
def job(etcd: EtcdCluster, tmp_path: Path) -> Iterator[Torchruns]:
    job = Torchruns(etcd, tmp_path)
    yield job
    job.close()


@pytest.mark.long
def test_nodes_join_in_either_order_of_their_addresses_and_the_first_may_be_lost(job: Torchruns) -> None:
    """torchrun orders nodes by address. One that joins in front of the others, or behind, changes or keeps rank 0."""
    options = {"max_restarts": 9}  # a worker whose collective breaks has failed, whoever broke it
    job.start("middle", "1:3", "--collective", local_addr="127.0.0.2", **options)
    alone = job.await_training("middle")
    job.start("front", "1:3", "--collective", local_addr="127.0.0.1", **options)
    two = job.await_training("front", "middle", after=alone)
    job.start("back", "1:3", "--collective", local_addr="127.0.0.3", **options)
    three = job.await_training("back", "front", "middle", after=two)
    job.lose(job.first_node(three))
    job.await_training(*job.nodes, after=three)
    assert len(job.nodes) == 2
    job.until.touch()
    assert job.exit_codes() == {0}
    assert {record["world_size"] for record in job.history("end")} == {"2"}


def test_workers_in_no_collective_start_again_when_another_node_is_lost(job: Torchruns) -> None:
    """First one whose lease ends, then one that is ended by a signal and says goodbye, long before its lease ends."""
    for name in ("a", "b"):
        job.start(name, "1:3")
    two = job.await_training("a", "b")
    job.lose("a")
    one = job.await_training("b", after=two)
    job.start("c", "1:3", lease_ttl=500)
    two = job.await_training("b", "c", after=one)
    job.nodes["c"].signal(signal.SIGTERM)
    job.await_training("b", after=two)
    assert job.nodes.pop("c").exit_code(PATIENCE_S) != 0
    job.until.touch()
    assert job.exit_codes() == {0}


@pytest.mark.long
def test_a_failed_worker_restarts_all_nodes_until_no_restart_is_left_and_that_ends_the_job(
    job: Torchruns,
) -> None:
    for name in ("a", "b"):
        job.start(name, "2", "--fail-on=b", max_restarts=1)
    assert job.exit_codes() == {1}
    starts = job.history("start")
    assert [s["test_node"] for s in starts].count("b") == 2
    assert len(job.worlds()) == 2
    assert job.nodes["a"].says("torchrun on node .* gave up")


@pytest.mark.long
def test_training_goes_on_through_an_outage_of_etcd_and_again_after_a_long_one(
    job: Torchruns, etcd: EtcdCluster
) -> None:
    job.start("a", "1", lease_ttl=8)
    world = job.await_training("a")
    etcd.freeze(0)
    steps = len(job.history("step"))
    job.wait_for(lambda: len(job.history("step")) > steps + 5, "steps while etcd is away")
    etcd.thaw(0)
    steps = len(job.history("step"))
    job.wait_for(lambda: len(job.history("step")) > steps + 5, "steps while etcd is back")
    assert job.worlds() == [world]
    etcd.kill(0)
    job.wait_for(lambda: len(job.processes("a")) == 1, "the worker to end with the proof of the lease")
    etcd.launch(0)
    job.await_training("a", after=world)
    job.until.touch()
    assert job.exit_codes() == {0}
