"""What a worker makes of the places of all ranks: to whom its node's copies go, and when they count as replicated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.worker.checkpointing.sharded import shard_replicas
from elastic_agent.worker.checkpointing.sharded.meeting import RECORD, Brought, RankHome, meet
from elastic_agent.worker.checkpointing.sharded.saving import ShardSaving
from elastic_agent.worker.checkpointing.sharded.shard_replicas import ShardReplicas
from elastic_agent.worker.errors import CheckpointError
from elastic_agent.worker.steps.drain import NO_COPY
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.memory.slot_memory import RankPlace, SlotMemory
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.storage.replication.acks import Acks, write_acks
from elastic_agent.worker.storage.replication.copy_rule import Replication
from elastic_agent.worker.storage.replication.messages import AbandonNewer, Partner, Replicate
from elastic_agent.worker.wire.environment import WorkerEnv

from ..shards import copy_of, in_slot

DIRECTORY = "/checkpoints"
LOADED = (1, 10)


@pytest.mark.parametrize("twin_has_it", [False, True])
def test_a_loaded_copy_without_a_twin_is_brought_to_a_partner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, twin_has_it: bool
) -> None:
    """n1 and n2 will have the same shards, and n2, which took the place of a lost node, may lack what was loaded."""
    in_slot(tmp_path, DIRECTORY, 0, *copy_of(0, LOADED[1], 2))
    orders: list[Any] = []
    monkeypatch.setattr(shard_replicas, "order", lambda path, message, within_s: not orders.append(message))
    slots = Slots(str(tmp_path), SlotFolder.of(DIRECTORY, 0))
    memory = SlotMemory(slots, 1 << 30, RankPlace("n1", 2, 0, 0, 3, "run-a"), 2)
    env = WorkerEnv(2, "run-a", "n1", 0, memory_server="here", memory_replicas=1)
    replicas = ShardReplicas(DIRECTORY, env, memory)
    mine = memory.digest_of(LOADED)
    assert mine
    assert memory.digest_of((1, 9)) == ""
    homes = [
        RankHome("n1", "n1:1", "0" * 16, mine),
        RankHome("n2", "n2:1", "0" * 16, mine if twin_has_it else ""),
        RankHome("n3", "n3:1", "1" * 16, ""),
    ]
    replicas.began(homes, LOADED)
    [order] = orders
    assert isinstance(order, Replicate)
    loaded, _ = replicas.readiness(None).slots
    assert loaded.version == LOADED
    if twin_has_it:
        assert order.partners == ()
        assert loaded.replication is Replication.ACKNOWLEDGED
        return
    [partner] = order.partners
    assert partner == Partner(partner.node, f"{partner.node}:1", (), (0,))
    assert loaded.replication is Replication.PENDING
    write_acks(slots.folder, "a", Acks(*LOADED, 2, (partner.node,)))
    assert replicas.readiness(None).slots[0].replication is Replication.ACKNOWLEDGED


@pytest.mark.parametrize(
    ("version", "told"), [((2, 11), (2, 11)), (NO_COPY, (0, 0))], ids=["a copy", "none is left"]
)
def test_replicas_of_a_step_that_was_given_up_are_dropped_on_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], told: tuple[int, int]
) -> None:
    """Where another Checkpointer could not keep the step, no rank may find it in the memory of a partner."""
    orders: list[Any] = []
    monkeypatch.setattr(shard_replicas, "order", lambda path, message, within_s: not orders.append(message))
    memory = SlotMemory(
        Slots(str(tmp_path), SlotFolder.of(DIRECTORY, 0)), 1 << 30, RankPlace("n1", 2, 0, 0, 3, "run-a"), 2
    )
    env = WorkerEnv(2, "run-a", "n1", 0, memory_server="here")
    unused: Any = None
    files: Any = SimpleNamespace(directory=DIRECTORY)
    contents: Any = SimpleNamespace(given={})
    replicas = ShardReplicas(DIRECTORY, env, memory)
    saving = ShardSaving(files, contents, memory, replicas, unused, env, 1, keeps_common=True)
    saving.go_back(12, version)
    assert orders == [AbandonNewer(DIRECTORY, *told)]


@pytest.mark.parametrize(
    "other", [b"\xff" * RECORD.size, b"short"], ids=["a tensor of the script", "another version"]
)
def test_a_rank_that_does_not_call_save_is_a_cause_that_is_named(other: bytes) -> None:
    brought = Brought(1, "0" * 16, 8)
    group: Any = SimpleNamespace(gather_fixed=lambda mine: [mine, other])
    with pytest.raises(
        CheckpointError, match=r"some ranks do not call save\(\) or save_to_memory\(\) here, and all must"
    ):
        meet(group, brought)
