"""The library inside the training process: checkpoints and progress. Never imports the agent.

    from elastic_agent.worker import Checkpointer, init_process_group, step

    init_process_group("nccl")
    checkpoints = Checkpointer("runs/x", {"model": model, "optimizer": optimizer})
    for number in range(checkpoints.load(), total_steps):
        train_one()
        step(number + 1)
        if (number + 1) % 100 == 0:
            checkpoints.save(number + 1)

Works the same under elastic-agent, torchrun and plain python. The names below are loaded on first use, because
the agent imports some of these modules and must not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpointing.checkpointer import Checkpointer
    from .errors import (
        CheckpointError,
        CheckpointMismatch,
        ClusterEnvironmentError,
        DirectoryNotShared,
        Fenced,
        LibraryMissing,
        MeshMismatch,
        NotPlainData,
        NotReplicated,
        NoUsableCheckpoint,
        OtherRun,
        OtherWorldSize,
        SamplerError,
        SamplerMismatch,
        SaveFailed,
        Sharded,
        StepNotGrowing,
        UnsupportedTraining,
    )
    from .ranks.process_group import (
        find_free_network_port,
        fresh_init_file,
        init_process_group,
        mesh,
        reserve_port,
    )
    from .state.hook_state import HookState
    from .state.rank_parts import Reshard
    from .steps.drain import Drained
    from .steps.progress import measure_own_time, poll, step
    from .steps.sampler import ElasticSampler

_NAMES = {
    "checkpointing.checkpointer": "Checkpointer",
    "steps.drain": "Drained",
    "errors": """
        CheckpointError CheckpointMismatch ClusterEnvironmentError DirectoryNotShared Fenced LibraryMissing
        NoUsableCheckpoint NotPlainData NotReplicated OtherRun OtherWorldSize SamplerError SamplerMismatch SaveFailed
        Sharded StepNotGrowing UnsupportedTraining MeshMismatch""",
    "steps.sampler": "ElasticSampler",
    "ranks.process_group": "find_free_network_port fresh_init_file init_process_group mesh reserve_port",
    "state.hook_state": "HookState",
    "state.rank_parts": "Reshard",
    "steps.progress": "measure_own_time poll step",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "Checkpointer",
    "ClusterEnvironmentError",
    "DirectoryNotShared",
    "Drained",
    "ElasticSampler",
    "Fenced",
    "HookState",
    "LibraryMissing",
    "MeshMismatch",
    "NoUsableCheckpoint",
    "NotPlainData",
    "NotReplicated",
    "OtherRun",
    "OtherWorldSize",
    "Reshard",
    "SamplerError",
    "SamplerMismatch",
    "SaveFailed",
    "Sharded",
    "StepNotGrowing",
    "UnsupportedTraining",
    "find_free_network_port",
    "fresh_init_file",
    "init_process_group",
    "measure_own_time",
    "mesh",
    "poll",
    "reserve_port",
    "step",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
