"""Bringing a copy in memory to the disk: how the disk writer does it, and rank 0 where it cannot be asked.

A rank 0 that has died is no reason not to write. One that lives and no longer waits cancels its order: from then on
nothing is published, for it may have gone on to newer checkpoints by itself. The file that comes to be is the slot's
very bytes, in the order of `checkpoint_files`. What it takes to read them all gives the slot its checksums, too.

No torch here: the disk writer imports this module.
"""

from __future__ import annotations

import contextlib
import mmap
import zlib
from collections.abc import Callable
from typing import BinaryIO

from ... import errors
from ...errors import CheckpointError, SaveFailed
from ...wire.messages import MAX_REASON_CHARS, WriteOutcome
from ..memory.slots import PIECE_BYTES, HeldSlot, Slots
from .checkpoint_files import CheckpointFiles
from .manifests import Manifest


def refusal_of(outcome: WriteOutcome) -> CheckpointError | None:
    """None when the checkpoint is durable."""
    if not outcome.error:
        return None
    kind = getattr(errors, outcome.error, None)
    if isinstance(kind, type) and issubclass(kind, CheckpointError):
        return kind(outcome.reason)
    return SaveFailed(f"{outcome.error}: {outcome.reason}")


def outcome_of(step: int, error: Exception, directory: str) -> WriteOutcome:
    reason = str(error) or repr(error)
    if isinstance(error, CheckpointError):
        return WriteOutcome(step, error=type(error).__name__, reason=reason[:MAX_REASON_CHARS])
    text = f"step {step} not saved in {directory}: {reason}"
    return WriteOutcome(step, error=SaveFailed.__name__, reason=text[:MAX_REASON_CHARS])


def write_copy(
    files: CheckpointFiles, slots: Slots, held: HeldSlot, generation: int, may_change: Callable[[], None]
) -> Manifest:
    """Make the copy a durable checkpoint. Raises what `CheckpointFiles.write` and `may_change` raise."""
    header = held.header
    sums: list[int] = []

    def pour(sink: BinaryIO) -> None:
        with (
            mmap.mmap(held.stream.fileno(), header.size, prot=mmap.PROT_READ) as mapping,
            memoryview(mapping) as view,
        ):
            for offset in range(0, header.size, PIECE_BYTES):
                with view[offset : offset + PIECE_BYTES] as piece:
                    sink.write(piece)
                    sums.append(zlib.crc32(piece))

    manifest = files.write(
        header.step,
        generation=generation,
        world_size=header.world_size,
        serialize=pour,
        may_change=may_change,
    )
    if not header.sums:
        with contextlib.suppress(OSError):  # a memory without room for them is no reason to refuse the save
            slots.add_sums(held, tuple(sums))
    files.publish(manifest, may_change)
    return manifest
