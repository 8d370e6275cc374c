"""Scenarios of `checkpointer_workers` with a part that each rank has for itself."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import power_sgd_ddp
import torch

from elastic_agent.worker import Checkpointer, CheckpointError


def power_sgd(rank: int, directory: str, steps: int) -> None:
    """A training that no one disturbs."""
    power_sgd_ddp.train(directory, steps)


def save_own(
    rank: int,
    directory: str,
    steps: list[int],
    declares: bool = True,
    code: bool = False,
    memory: str = "",
    remembers: bool = False,
) -> dict[str, Any]:
    """Save steps of a state of which each rank has a part for itself; the part grows from step to step."""
    use_memory(memory, rank)
    text: dict[str, Any] = {}
    own: dict[str, Any] = {}
    state = {"text": text, **({"own": own} if declares else {})}
    checkpoints = Checkpointer(directory, state, per_rank=["own"] if declares else [])
    try:
        for step in steps:
            text["step"] = step
            own.update(of=rank, error=torch.full((step + 10 * rank,), float(rank)))
            if code:
                own["code"] = random.Random()
            if remembers:
                text["remembered"] = checkpoints.save_to_memory(step)
            else:
                assert checkpoints.save(step)
        assert checkpoints.wait()
    except CheckpointError as error:
        return {"raised": type(error).__name__, "text": str(error)}
    return {"raised": "", "remembered": text.get("remembered")}


def load_own(
    rank: int,
    directory: str,
    rule: str = "",
    own: list[str] | None = None,
    shared: list[str] | None = None,
    memory: str = "",
) -> dict[str, Any]:
    """Load with these parts, by default those of `save_own`."""
    use_memory(memory, rank)
    each = ["own"] if own is None else own
    parts: dict[str, dict[str, Any]] = {
        name: {"as": "the script set it"} for name in (*(shared or ["text"]), *each)
    }

    def merge(states: Mapping[int, Any], new_rank: int, world_size: int) -> dict[str, Any]:
        assert rule != "breaks" or new_rank != 1, "a bug in the rule"
        total = sum(len(state["error"]) for state in states.values())
        return {"of": [new_rank, world_size], "error": torch.zeros(total)}

    rules = dict.fromkeys(each, merge if rule else None)
    try:
        step = Checkpointer(directory, parts, per_rank=rules).load()
    except CheckpointError as error:
        return {
            "raised": type(error).__name__,
            "text": str(error),
            "as": [part.get("as") for part in parts.values()],
        }
    mine = parts[each[0]] if each else {}
    error = mine.get("error", torch.empty(0))
    return {
        "raised": "",
        "step": step,
        "of": mine.get("of"),
        "length": len(error),
        "values": error.unique().tolist(),
    }


def go_on(rank: int, directory: str, memory: str = "", remembers: bool = False) -> dict[str, Any]:
    """Load in a world of any size, and save the next step: each rank owns what it has added in each world.

    An old rank's goes to the new rank of the same number, modulo the size of the world.
    """
    use_memory(memory, rank)

    def deal(states: Mapping[int, Any], new_rank: int, world_size: int) -> dict[str, Any]:
        owned = [state["owns"] for old, state in states.items() if old % world_size == new_rank]
        return {"owns": [one for part in owned for one in part]}

    own: dict[str, Any] = {"owns": []}
    checkpoints = Checkpointer(directory, {"text": {}, "own": own}, per_rank={"own": deal})
    step = checkpoints.load()
    own["owns"] = [*own["owns"], [step + 1, rank]]
    assert (
        checkpoints.save_to_memory(step + 1)
        if remembers
        else checkpoints.save(step + 1) and checkpoints.wait()
    )
    return {"step": step, "owns": own["owns"]}


def use_memory(memory: str, rank: int) -> None:
    if memory:
        os.makedirs(memory, exist_ok=True)
        os.environ.update(
            ELASTIC_AGENT_MEMORY=memory,
            ELASTIC_AGENT_MEMORY_BYTES=str(1 << 30),
            ELASTIC_AGENT_NODE=os.path.basename(memory),
            ELASTIC_AGENT_LOCAL_RANK="0" if memory.endswith(str(rank)) else str(rank),
        )
