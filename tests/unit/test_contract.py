"""What only a world can decide of a worker's variables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from elastic_agent.agent.checkpoints.folder import MemoryFolder
from elastic_agent.agent.configuration.config import Command, Config
from elastic_agent.agent.configuration.parse import NodeCounts
from elastic_agent.agent.workers.environment import WorkerPlace, contract, worker_env
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    NodeRecord,
    Phase,
    World,
    assign_ranks,
)

CONFIG = Config(Command("script", "train.py"), nproc_per_node=2)


def test_ranks_within_a_role_count_the_workers_of_all_nodes_that_have_it() -> None:
    """Also where nodes of other roles and sizes stand between them."""
    nodes = tuple(
        NodeRecord(name, name * 2, "host", 1, slots, role=role)
        for name, role, slots in [
            ("a", "reader", 4),
            ("b", "trainer", 1),
            ("c", "trainer", 2),
            ("d", "trainer", 3),
            ("e", "reader", 5),
        ]
    )
    world = World("job", 1, Phase.RUNNING, assign_ranks(nodes), Endpoint("host", 1), Cause(CauseKind.START))
    names = ("GROUP_RANK", "ROLE_NAME", "LOCAL_RANK", "RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")
    found = []
    for member in world.members:
        for local_rank in range(member.slots):
            place = WorkerPlace(
                world, member, local_rank, Path("e"), worker_env("i", Path("r"), None, CONFIG)
            )
            values = {variable.name: variable.value for variable in contract(place, None)}
            found.append(" ".join(values[name] for name in names))
    assert found == [
        "0 reader 0 0 0 9 15",
        "0 reader 1 1 1 9 15",
        "0 reader 2 2 2 9 15",
        "0 reader 3 3 3 9 15",
        "1 trainer 0 4 0 6 15",
        "2 trainer 0 5 1 6 15",
        "2 trainer 1 6 2 6 15",
        "3 trainer 0 7 3 6 15",
        "3 trainer 1 8 4 6 15",
        "3 trainer 2 9 5 6 15",
        "4 reader 0 10 4 9 15",
        "4 reader 1 11 5 9 15",
        "4 reader 2 12 6 9 15",
        "4 reader 3 13 7 9 15",
        "4 reader 4 14 8 9 15",
    ]


def test_no_more_replicas_are_wanted_than_other_nodes_may_join() -> None:
    memory = MemoryFolder(Path("m"), 1)
    config = replace(CONFIG, nodes=NodeCounts(1, 2), memory_replicas=5)
    assert worker_env("i", Path("r"), memory, config, "host:1").memory_replicas == 1
