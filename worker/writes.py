"""Bringing a copy in memory to the disk: what rank 0 asks of its node's disk writer, and how it is done.

    {"v": 1, "memory": "/dev/shm/elastic-agent-x", "directory": "/runs/x", "slot": "a", "step": 120, "copied_by": 6,
     "generation": 7, "keep": 2, "good": [100, 110], "run": "3b9e0c51d7aa"}

    {"v": 1, "step": 120, "size": 4096, "error": "", "reason": ""}

One line of JSON each way, over a connection of its own to the UNIX stream socket that `ELASTIC_AGENT_WRITES` names. A
rank 0 that has died is no reason not to write. One that lives and no longer waits says `CANCEL`: from then on nothing
is published, for it may have gone on to newer checkpoints by itself.

Both ends use this file, and rank 0 writes with it when there is nobody to ask. The file that comes to be is the slot's
very bytes, in the order of `files`. What it takes to read them all gives the slot its checksums, too.

No torch here: the disk writer imports this module.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, TypeVar

from . import errors
from .errors import CheckpointError, SaveFailed
from .files import CheckpointFiles
from .manifests import Manifest
from .ownership import Run
from .slots import PIECE_BYTES, Held, Slots

ADDRESS_VARIABLE = "ELASTIC_AGENT_WRITES"
VERSION = 1
MAX_REASON_CHARS = 500
CANCEL = b"cancel\n"

_M = TypeVar("_M", "Order", "Outcome")


class OrderError(ValueError):
    """What came is no order and no outcome; the text says why not."""


@dataclass(frozen=True, slots=True)
class Order:
    """Write the copy of `step` that generation `copied_by` has left in a slot, as a checkpoint of `generation`.

    `good` are steps in the directory that are known to be whole: they count among the `keep` to retain.
    """

    memory: str
    directory: str
    slot: str
    step: int
    copied_by: int
    generation: int
    keep: int
    good: list[int]
    run: str

    def __post_init__(self) -> None:
        _check(
            self, texts=("memory", "directory", "slot"), numbers=("step", "copied_by", "generation", "keep")
        )
        if not isinstance(self.good, list) or any(type(step) is not int for step in self.good):
            raise OrderError("order: good is no list of steps")
        try:
            Run(self.run)
        except ValueError as error:
            raise OrderError(f"order: {error}") from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it: `error` is empty when the checkpoint of `size` bytes is durable, else a type of `errors`."""

    step: int
    size: int = 0
    error: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        _check(self, texts=("error", "reason"), numbers=("step", "size"))
        if self.error and self.refusal_type() is None:
            raise OrderError(f"outcome: {self.error!r} is no error of a checkpoint")

    def refusal(self) -> CheckpointError | None:
        """None when it is durable."""
        kind = self.refusal_type()
        return kind(self.reason) if kind is not None else None

    def refusal_type(self) -> type[CheckpointError] | None:
        kind = getattr(errors, self.error, None)
        return kind if isinstance(kind, type) and issubclass(kind, CheckpointError) else None

    @classmethod
    def of(cls, step: int, error: Exception, directory: str) -> Outcome:
        reason = str(error) or repr(error)
        if isinstance(error, CheckpointError):
            return cls(step, error=type(error).__name__, reason=reason[:MAX_REASON_CHARS])
        text = f"step {step} not saved in {directory}: {reason}"
        return cls(step, error=SaveFailed.__name__, reason=text[:MAX_REASON_CHARS])


def encode(message: Order | Outcome) -> bytes:
    return json.dumps({"v": VERSION, **asdict(message)}).encode() + b"\n"


def decode(cls: type[_M], line: bytes) -> _M:
    """Raises OrderError, never anything else."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OrderError(f"no JSON: {error}") from error
    if not isinstance(body, dict) or body.pop("v", None) != VERSION:
        raise OrderError(f"not a message of version {VERSION}")
    if body.keys() != {field.name for field in fields(cls)}:
        raise OrderError(f"message with the fields {sorted(body)}")
    return cls(**body)


def write_copy(
    files: CheckpointFiles, slots: Slots, held: Held, generation: int, may_change: Callable[[], None]
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


def _check(message: Any, *, texts: tuple[str, ...], numbers: tuple[str, ...]) -> None:
    what = type(message).__name__.lower()
    for name in texts:
        if not isinstance(getattr(message, name), str):
            raise OrderError(f"{what}: {name} is no text")
    for name in numbers:
        value = getattr(message, name)
        # bool is an int to isinstance.
        if type(value) is not int or not 0 <= value < 2**63:
            raise OrderError(f"{what}: {name} is {value!r}, expected an integer from 0 on")
