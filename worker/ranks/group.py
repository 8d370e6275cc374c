"""The collectives a checkpoint needs: each rank gets what every rank gives, and one rank sends a file.

Only bytes travel, as uint8 tensors: torch's own object collectives would run what peers send. Everything runs on
the default process group, on the device its backend needs, and is a plain copy where there is one process.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ... import __version__
from ...codec import Invalid, from_plain, load_object, plain, shown
from .. import errors
from ..errors import BadCheckpoint, CheckpointError
from ..wire.environment import WorkerEnv
from ..wire.messages import MAX_REASON_CHARS, ErrorName, Reason

_T = TypeVar("_T")

CHUNK_BYTES = 64 << 20

RECORDS = 7
"""The version of all that ranks exchange: it changes with the fields, or the bounds, of any of these dataclasses."""

# torch 2.12 has given it another name, and warns of the old one.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LET_GO_S = 1.0
"""For gloo's thread to let go of a collective's tensors. It takes microseconds, unless this process gets no CPU."""


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place among the `world_size` ranks that save and load together."""

    rank: int
    world_size: int
    device: torch.device

    def gather(self, payload: bytes) -> list[bytes]:
        """What every rank passed, by rank. Returns only when all ranks have called: it is a barrier too."""
        if self.world_size == 1:
            return [payload]
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(payload)], dtype=torch.int64))]
        found = [bytearray() for _ in sizes]
        most = max(1, *sizes)
        # Of all ranks together no more at once: these are on the GPU where the backend needs that.
        length = max(1, CHUNK_BYTES // self.world_size)
        for offset in range(0, most, length):
            padded = bytearray(min(length, most - offset))
            mine = payload[offset : offset + length]
            padded[: len(mine)] = mine
            rows = self._all_gather(torch.frombuffer(padded, dtype=torch.uint8))
            for have, row, size in zip(found, rows, sizes, strict=True):
                have += _bytes(row[: max(0, size - offset)])
        return list(map(bytes, found))

    def gather_fixed(self, payload: bytes) -> list[bytes]:
        """As `gather`, of a few bytes that are as many on all ranks: one collective of torch's, where that takes two.

        Only for ranks that have seen that they have the same version, see `exchange`.
        """
        if self.world_size == 1:
            return [payload]
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        rows = torch.empty(self.world_size * len(payload), dtype=torch.uint8, device=self.device)
        with _Lent([mine, rows]):
            _all_gather_single(rows, mine)
        found = _bytes(rows.cpu())
        return [found[begin : begin + len(payload)] for begin in range(0, len(found), len(payload))]

    def exchange(self, record: _T) -> list[_T]:
        """As `gather`, of a frozen dataclass. Raises CheckpointError, on all ranks, if they have different versions."""
        enveloped = {"v": RECORDS, "library": __version__, "record": plain(record)}
        return records_of(type(record), self.gather(json.dumps(enveloped).encode()))

    def send(self, stream: BufferedReader | BufferedRandom | None, size: int, *, source: int) -> int:
        """Copy the `size` bytes of the source rank's stream into that of every other rank which has one.

        Returns the checksum of what went by: a source that cannot read goes on sending, so that no rank waits for
        ever, and raises OSError at the end. Receivers must compare it, or a digest that they know.
        """
        error: OSError | None = None
        buffer = bytearray(min(size, CHUNK_BYTES))
        on_host = torch.frombuffer(buffer, dtype=torch.uint8)
        crc = 0
        for offset in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - offset)
            if self.rank == source and stream is not None and error is None:
                try:
                    stream.readinto(memoryview(buffer)[:length])
                except OSError as failure:
                    error = failure
            chunk = on_host[:length].to(self.device)
            with _Lent([chunk]):
                dist.broadcast(chunk, source)
            if self.rank != source:
                if stream is None:
                    continue
                on_host[:length].copy_(chunk)
                stream.write(memoryview(buffer)[:length])
            crc = zlib.crc32(memoryview(buffer)[:length], crc)
        if error is not None:
            raise error
        return crc

    def share(self, tensor: torch.Tensor) -> None:
        """Give every rank what rank 0 has there, in place; it must have the same shape and dtype on all."""
        if self.world_size == 1:
            return
        shared = tensor.to(self.device)
        with _Lent([shared]):
            dist.broadcast(shared, 0)
        if shared is not tensor:
            tensor.copy_(shared)

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        with _Lent([mine, *rows]):
            dist.all_gather(rows, mine)
        return [row.cpu() for row in rows]


def records_of(kind: type[_T], raw: list[bytes]) -> list[_T]:
    """By rank. Raises CheckpointError, the same on all ranks for the same bytes: none of them may go on alone."""
    bodies = [_body(one) for one in raw]
    problem = ""
    if all(body.get("v") == bodies[0].get("v") for body in bodies):
        try:
            return [from_plain(kind, body.get("record", {})) for body in bodies]
        except Invalid as error:
            problem = f" ({error})"
    first_ranks: dict[str, int] = {}
    for rank, body in enumerate(bodies):
        library = shown(body["library"]) if "library" in body else "unknown"
        first_ranks.setdefault(f"{library} (records {shown(body.get('v'))})", rank)
    found = ", ".join(f"{version} on rank {rank}" for version, rank in first_ranks.items())
    raise CheckpointError(
        f"ranks cannot read each other's records{problem}. Their versions of elastic-agent, each with the first rank "
        f"that has it: {found}. Install the same version on all nodes and start the job again"
    )


def _body(raw: bytes) -> dict[str, Any]:
    """What a rank has sent; empty where that is nothing that `exchange` makes."""
    try:
        body = load_object(raw, "record of a rank")
    except Invalid:
        return {}
    return body if isinstance(body.get("record"), dict) else {}


class _Lent:
    """Tensors that a collective has until this ends, and only this process's own threads after that.

    gloo's thread lets go of them only after it has reported the collective done, and needs Python's lock for it.
    A script whose last line takes the process group apart holds that lock while it waits for that thread: for ever.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # On a GPU it is NCCL's watchdog that lets go of them, in its own time.
        self._tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]

    def __enter__(self) -> None:
        self._before = self._holders()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        give_up_at = time.monotonic() + LET_GO_S
        # After an error it may never let go.
        while kind is None and self._holders() != self._before and time.monotonic() < give_up_at:
            time.sleep(0)

    def _holders(self) -> list[tuple[int, int]]:
        """Python's references and torch's, for each."""
        return [(sys.getrefcount(one), one._use_count()) for one in self._tensors]  # type: ignore[attr-defined]


def current_group() -> Group:
    """The default process group, or a group of one for a plain `python train.py`."""
    if dist.is_available() and dist.is_initialized():
        return Group(dist.get_rank(), dist.get_world_size(), _device())
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise CheckpointError(
            f"WORLD_SIZE is {world_size} but there is no process group, so every rank would save and load as if "
            "it were alone: call torch.distributed.init_process_group() before it saves or loads"
        )
    return Group(0, 1, torch.device("cpu"))


def _bytes(row: torch.Tensor) -> bytes:
    copy = bytearray(len(row))
    if copy:
        torch.frombuffer(copy, dtype=torch.uint8).copy_(row)
    return bytes(copy)


def _device() -> torch.device:
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    first = int(local_rank) * WorkerEnv.of(os.environ).devices if local_rank is not None else None
    # With --devices-per-worker 0 more workers than devices may share them, as the script decides.
    if first is None or first >= torch.cuda.device_count():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", first)


# ---------------------------------------------------------------- errors of all ranks together
#
# Errors that all ranks share: a rank that raised alone would leave the others waiting in the next collective.


_TYPES = {
    name: kind
    for name, kind in vars(errors).items()
    # One that is made of more than a text is its base here.
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind is not BadCheckpoint
}


_UNDONE, _DONE, _FAILED = (bytes([number]) for number in range(3))


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What one rank raises; `error` is the name of a type in `_TYPES`, empty: nothing."""

    error: ErrorName = ""
    reason: Reason = ""


def raise_together(group: Group, error: CheckpointError | None) -> None:
    """Raise on every rank when one has an error: its own there, and the first rank's on those without.

    The others get the nearest type of `worker/errors.py`: they may not have a script's own.
    """
    own = _Refusal(_name_of(error), str(error)[:MAX_REASON_CHARS]) if error is not None else _Refusal()
    refusals = group.exchange(own)
    if error is not None:
        raise error
    for rank, refusal in enumerate(refusals):
        if refusal.error:
            raise _TYPES.get(refusal.error, CheckpointError)(f"rank {rank}: {refusal.reason}")


def _name_of(error: CheckpointError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if _TYPES.get(kind.__name__) is kind)


def together(group: Group, part: Callable[[], object], otherwise: str) -> None:
    """Do this rank's part, wait for the others, and raise on every rank when one has an error.

    An error of another kind becomes a CheckpointError whose text begins with `otherwise`.
    """
    raise_together(group, tried(part, otherwise)[1])


def all_did(group: Group, part: Callable[[], bool], otherwise: str) -> bool:
    """As `together`, of a part that can be left undone: whether all ranks have done it.

    One collective of a byte where no rank has an error. Only for ranks that have seen that they have the same version.
    """
    done, error = tried(part, otherwise)
    found = group.gather_fixed(_FAILED if error is not None else _DONE if done else _UNDONE)
    if _FAILED in found:
        raise_together(group, error)
    return _UNDONE not in found


def tried(part: Callable[[], _T], otherwise: str) -> tuple[_T | None, CheckpointError | None]:
    """What it returns, or raises: the other ranks are waiting, and must get an error before it ends this one."""
    try:
        return part(), None
    except CheckpointError as refusal:
        return None, refusal
    except Exception as failure:
        return None, because(CheckpointError, f"{otherwise}: {failure!r}", failure)


def because(kind: type[CheckpointError], text: str, cause: Exception) -> CheckpointError:
    error = kind(text)
    error.__cause__ = cause
    return error
