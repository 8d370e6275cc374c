"""The variables of a worker: what the agent writes the worker reads, and one file alone has their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_agent.codec import Invalid
from elastic_agent.worker.wire.environment import NAMES, WORKER_VARIABLES, WorkerEnv

ROOT = Path(__file__).parents[2]
FULL = WorkerEnv(
    master_port=41213, devices=2,
    generation=7, run="3f2a", node="a", local_rank=0, incarnation="i", page="/proc/1/fd/5", reports="/r/reports",
    stacks="/proc/1/fd/6", socket="/r/socket", memory="/dev/shm/\udcff", memory_bytes=1 << 30,
    writes="/r/writes", bad_state="6:120", memory_server="/r/memory", memory_address="10.0.0.1:4000",
    memory_standbys="c=10.0.0.3:4000", memory_replicas=1,
)  # fmt: skip


def test_what_the_agent_writes_the_worker_reads() -> None:
    assert WorkerEnv.of(FULL.variables()) == FULL
    assert FULL.variables().keys() == set(NAMES.values())
    assert FULL.variables()["ELASTIC_AGENT_MEMORY_BYTES"] == str(1 << 30)


def test_without_an_agent_all_is_unset() -> None:
    assert WorkerEnv.of({"RANK": "0", "ELASTIC_AGENT_MIN_NODES": "2"}) == WorkerEnv()
    assert WorkerEnv().variables() == {}


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0", "٣", "9 "])
def test_a_number_that_is_none_is_named(text: str) -> None:
    with pytest.raises(Invalid, match="ELASTIC_AGENT_GENERATION is "):
        WorkerEnv.of({"ELASTIC_AGENT_GENERATION": text})


def test_one_file_alone_spells_the_variables() -> None:
    """But for what the guard runs, which imports nothing of ours."""
    names = re.compile(rf"\b({'|'.join(WORKER_VARIABLES)})\b")
    allowed = {
        "worker/wire/environment.py",
        "agent/workers/processes/proc.py",
        "agent/workers/processes/guard.py",
    }
    spelled = {
        str(path.relative_to(ROOT))
        for folder in ("agent", "health", "pool", "rendezvous", "worker")
        for path in (ROOT / folder).rglob("*.py")
        if names.search(path.read_text())
    }
    assert spelled <= allowed
