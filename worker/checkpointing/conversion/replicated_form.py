"""A replicated checkpoint, one file that rank 0 writes, read into a whole state and made of one."""

from __future__ import annotations

import io
import os
from typing import Any

import torch

from ...errors import CheckpointMismatch
from ...state.rank_parts import unpack
from ...state.state_dicts import prove_loadable
from ...storage.disk.checkpoint_files import CheckpointFiles, VerifiedCheckpoint
from ...storage.memory.node_memory import load_mapped
from .whole_state import WholeState


def read_replicated(checkpoint: VerifiedCheckpoint) -> WholeState:
    """Its tensors are those of the file. Raises CheckpointMismatch."""
    step = checkpoint.manifest.step
    try:
        payload = load_mapped(checkpoint.stream)
        return WholeState(
            payload["step"],
            dict(payload["state"]),
            list(payload["rng"]),
            [unpack(row) for row in payload.get("ranks", ())],
        )
    except Exception as error:
        raise CheckpointMismatch(
            f"step {step} is no state that a Checkpointer has saved: {error!r}"
        ) from error


def write_replicated(files: CheckpointFiles, whole: WholeState) -> None:
    """Durably. Raises OSError, CheckpointError."""
    payload: dict[str, Any] = {"step": whole.step, "state": whole.states, "rng": whole.rng}
    if whole.own:
        payload["ranks"] = [_row(states) for states in whole.own]
    manifest = files.write(
        whole.step,
        generation=0,
        world_size=whole.world_size,
        serialize=lambda sink: torch.save(payload, sink),
        may_change=lambda: None,
    )
    try:
        prove_loadable(os.path.join(files.directory, manifest.file), whole.step, whole.states)
    except BaseException:
        files.discard(manifest)
        raise
    files.publish(manifest, lambda: None)
    files.open(whole.step).stream.close()


def _row(states: dict[str, Any]) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
