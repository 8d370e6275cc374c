"""What every rank does with a state that has reached it: its parts take it, and its random numbers go on from there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointMismatch
from ...ranks.group import Group
from ...state import rng
from ...state.rank_parts import Rules, states_for
from ...state.state_dicts import Part, load_into, modules_in
from ...storage.memory import rank_state
from ...storage.memory.node_memory import NodeMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What reached this rank: the state, and the random state of the same rank when it was saved, if that is known."""

    payload: Mapping[str, Any]
    """The tensors are mapped, and not to be kept."""
    random_state: bytes | None
    world_size: int
    """When it was saved."""
    partial: bool = False
    """Survivors of a failure have saved it: what each rank alone knew is in its rank_state file."""
    generation: int = 0
    """Of whose memory it came; 0 from a disk."""


def apply(
    loaded: Loaded,
    state: Mapping[str, Part],
    of_each_rank: Rules,
    group: Group,
    directory: str,
    memory: NodeMemory | None,
    *,
    read_only: bool = False,
) -> None:
    """`read_only`: more parts may have been saved, and the random numbers stay as they are.

    Raises OtherWorldSize, and has changed nothing then; CheckpointMismatch, and some parts may have been changed.
    """
    saved, step = loaded.payload["state"], loaded.payload["step"]
    shared = {name: part for name, part in state.items() if name not in of_each_rank}
    if saved.keys() != shared.keys() and not (read_only and shared.keys() <= saved.keys()):
        raise CheckpointMismatch(
            f"the checkpoint of step {step} in {directory} holds {sorted(saved)}, this script's state is "
            f"{sorted(shared)}: give Checkpointer the same names, or use another directory"
        )
    own = states_for(
        group.rank,
        group.world_size,
        loaded.payload.get("ranks", ()),
        of_each_rank,
        f"the checkpoint of step {step} in {directory}",
        some=read_only,
    )
    states = {**saved, **own}
    modules = modules_in(state)
    for name, part in state.items():
        try:
            load_into(part, states[name], modules)
        except Exception as error:
            raise CheckpointMismatch(
                f"{name!r} of step {step} in {directory} does not fit this script: {error}"
            ) from error
    if read_only:
        return
    if loaded.world_size != group.world_size:
        logger.warning(
            "random numbers start anew, the world size changed: step=%d saved=%d now=%d",
            step,
            loaded.world_size,
            group.world_size,
        )
    elif loaded.partial and memory is not None and _restore_own(loaded, shared, group, memory.folder):
        pass
    elif loaded.random_state is not None:
        rng.restore(loaded.random_state)
    else:
        logger.warning("random state not restored, no rank has kept it: step=%d rank=%d", step, group.rank)


def _restore_own(loaded: Loaded, state: Mapping[str, Part], group: Group, folder: str) -> bool:
    """What this rank alone knew when another one failed: its random state, and the buffers of its modules."""
    entry = rank_state.find(folder, group.rank, group.world_size, loaded.generation, loaded.payload["step"])
    if entry is None:
        return False
    rng.restore_snapshot(entry.random_state)
    buffers = rank_state.Buffers(modules_in(state))
    if entry.buffers and len(entry.buffers) == buffers.size:
        buffers.restore(torch.frombuffer(bytearray(entry.buffers), dtype=torch.uint8))
    return True
