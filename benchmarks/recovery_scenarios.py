"""The scenarios of the recovery benchmark: what is running, and what happens to it.

A *fault* takes the job and the number of the repetition, which varies what may be varied, and returns the instant at
which it happened. What only stands and is looked at has no fault, and the start itself is the event where nothing ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from recovery_job import Job, Setting, kill

Fault: TypeAlias = Callable[[Job, int], float]


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    setting: Setting
    nodes_after: int
    fault: Fault | None
    """None: the job is left alone, and what it needs is measured."""

    @property
    def world_size(self) -> int:
        """Before the fault."""
        return self.setting.nodes * self.setting.workers

    @property
    def world_size_after(self) -> int:
        return self.nodes_after * self.setting.workers


def kill_worker(job: Job, repetition: int) -> float:
    """Each repetition kills another rank: losing rank 0 is another thing than losing the last."""
    rank = repetition % (job.setting.nodes * job.setting.workers)
    return kill([next(step.pid for step in reversed(job.steps) if step.rank == rank)])


def kill_node(job: Job, _repetition: int) -> float:
    """All its processes, as when the machine is lost; the agents first, who could still tell of their workers' end."""
    node = job.pick_leaver()
    agents = [agent.pid for agent in node.agents]
    return kill([*agents, *(pid for pid in node.processes() if pid not in agents)])


def cut_off_node(job: Job, _repetition: int) -> float:
    """Its packets are lost, both ways, and nobody is told."""
    node, fault_s = job.pick_leaver(), time.monotonic()
    node.cut_off()
    return fault_s


def terminate_agent(job: Job, _repetition: int) -> float:
    node, fault_s = job.pick_leaver(), time.monotonic()
    for agent in node.agents:
        agent.terminate()
    return fault_s


def add_node(job: Job, _repetition: int) -> float:
    fault_s = time.monotonic()
    job.start_node()
    return fault_s


FOOTPRINT = "footprint"
SCENARIOS = (
    Scenario("worker-1x2", "worker SIGKILL, 1 node x 2", Setting(1, 1, 1, 2), 1, kill_worker),
    Scenario("worker-2x1", "worker SIGKILL, 2 nodes x 1", Setting(2, 2, 2, 1), 2, kill_worker),
    Scenario("node-killed", "one node's processes all killed, 3 -> 2", Setting(1, 3, 3, 1), 2, kill_node),
    Scenario(
        "node-cut-off", "one node cut off, 3 -> 2", Setting(1, 3, 3, 1, own_networks=True), 2, cut_off_node
    ),
    Scenario("node-joins", "node joins, 2 -> 3", Setting(2, 3, 2, 1), 3, add_node),
    Scenario("node-leaves", "SIGTERM to one of 3 agents", Setting(1, 3, 3, 1), 2, terminate_agent),
    Scenario("start-2", "start to first step, 1 node x 2", Setting(1, 1, 0, 2), 1, add_node),
    Scenario("start-8", "start to first step, 1 node x 8", Setting(1, 1, 0, 8), 1, add_node),
    Scenario(FOOTPRINT, "steady training, 1 node x 8", Setting(1, 2, 1, 8, etcd=True), 1, None),
)
GOALS = {
    ("worker-1x2", "recovery"): "<= 0.2",
    ("worker-2x1", "recovery"): "<= 0.3",
    ("node-killed", "recovery"): "<= 0.5",
    ("node-cut-off", "recovery"): "<= 6",
    ("node-joins", "outage"): "<= 0.3",
    ("node-joins", "redone"): "0",
    ("node-leaves", "outage"): "<= 0.3",
    ("node-leaves", "redone"): "0",
    ("start-2", "recovery"): "<= 3.5",
    ("start-8", "recovery"): "<= 5",
    (FOOTPRINT, "agent_mb"): "<= 50",
    (FOOTPRINT, "node_mb"): "<= 600",
    (FOOTPRINT, "idle_cpu"): "<= 0.1",
}
"""By scenario and figure."""
