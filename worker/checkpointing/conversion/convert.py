"""From one form of checkpoint into the other: the same state, to the last bit, in a directory of its own.

    replicated    a Checkpointer's, of a state that is the same on all ranks: one file
    sharded       a Checkpointer's, of a state that no rank has whole: a directory in DCP's format
    dcp           a directory that DCP alone has written

All that is read is verified, as far as its form has checksums. The state must fit into this machine's memory: no more
of it is held than one copy for reading and one for writing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from ...errors import CheckpointError, NoUsableCheckpoint
from ...storage.disk.checkpoint_files import CheckpointFiles, VerifiedCheckpoint
from ...storage.disk.shard_files import METADATA_NAME
from ...wire.run import Run
from .dcp_form import read_dcp
from .replicated_form import read_replicated, write_replicated
from .sharded_form import read_sharded, write_sharded
from .whole_state import WholeState, has_names, is_optimizer

Form = Literal["replicated", "sharded"]

_CONVERTED = "converted"
"""Begins the name of the run whose a converted checkpoint is."""
_UNNAMED = ".unnamed"
"""Ends it where the source did not name its optimizers' parameters: converted back, it does not either."""


class Refused(CheckpointError):
    """Nothing was written: what is to be converted, or where to, is not as it must be."""


def convert(
    source: Path,
    target: Path,
    *,
    to: Form | None = None,
    step: int | None = None,
    parameter_names: Sequence[str] | None = None,
) -> str:
    """Returns what was done, and a line for each optimizer of whose order there is a doubt. `to` None: the other form
    than that of the source.

    `step`: which of the source's checkpoints, None: the newest; for a directory of DCP, which knows none, its step.
    `parameter_names`: of the optimizer, in its order, where they cannot be found out.

    Raises OSError, CheckpointError: then the target is as it was, as after every other exception.
    """
    if target.exists() and (not target.is_dir() or os.listdir(target)):
        raise Refused(f"{target} is there already, and not empty: name a new directory")
    with contextlib.ExitStack() as stack:
        with _names_directory(f"{source} cannot be read"):
            whole, form = _read(source, step, stack)
        wanted: Form = to or ("replicated" if form == "sharded" or form == "dcp" else "sharded")
        if wanted == form:
            raise Refused(f"step {whole.step} in {source} is {form} already")
        run = f"{_CONVERTED}-{uuid.uuid4().hex[:12]}{'' if _is_named(whole) else _UNNAMED}"
        files = CheckpointFiles(target, keep=1, run=Run(run))
        doubts: list[str] = []
        with _names_directory(f"{target} cannot be written"), _removed_unless_done(target):
            if wanted == "replicated":
                write_replicated(files, whole)
            else:
                doubts = write_sharded(files, whole, parameter_names)
    return "\n".join([f"step {whole.step} of {source} ({form}) is now in {target} ({wanted})", *doubts])


def _is_named(whole: WholeState) -> bool:
    optimizers = [state for state in whole.states.values() if is_optimizer(state)]
    return any(map(has_names, optimizers)) or not optimizers


@contextlib.contextmanager
def _names_directory(problem: str) -> Iterator[None]:
    """An OSError names a file at most, and no directory. Raises Refused in its place."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{problem}: {error}") from error


@contextlib.contextmanager
def _removed_unless_done(target: Path) -> Iterator[None]:
    """All that is in `target` after an exception was made since: it was empty, or not there."""
    was_there = target.exists()
    try:
        yield
    except BaseException:
        for path in target.iterdir() if target.exists() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not was_there:
            with contextlib.suppress(OSError):
                target.rmdir()
        raise


def _read(source: Path, step: int | None, stack: contextlib.ExitStack) -> tuple[WholeState, str]:
    if (source / METADATA_NAME).exists():
        if step is None:
            raise Refused(
                f"{source} is a directory of DCP, which does not say which step it is of: add --step N"
            )
        return read_dcp(source, step), "dcp"
    reader = CheckpointFiles(source, keep=1, run=Run("reader"))
    checkpoint = _find(reader, source, step)
    stack.enter_context(checkpoint.stream)
    if checkpoint.manifest.is_sharded:
        run = checkpoint.manifest.run
        keep_names = not (run.startswith(_CONVERTED) and run.endswith(_UNNAMED))
        return read_sharded(reader, checkpoint.manifest, keep_names=keep_names), "sharded"
    return read_replicated(checkpoint), "replicated"


def _find(reader: CheckpointFiles, source: Path, step: int | None) -> VerifiedCheckpoint:
    """Raises BadCheckpoint, NoUsableCheckpoint."""
    steps = reader.steps()
    if not steps:
        raise NoUsableCheckpoint(f"{source} has no checkpoint")
    if step is not None and step not in steps:
        raise NoUsableCheckpoint(
            f"{source} has no checkpoint of step {step}: it has {', '.join(map(str, steps))}"
        )
    # What is damaged is named, and nothing older taken in its place: a person has asked for it.
    return reader.open(steps[0] if step is None else step)
