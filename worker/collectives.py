"""The two collectives a checkpoint needs: everybody hears what everybody says, and one rank sends a file.

Only bytes travel, as uint8 tensors: torch's own object collectives would run what peers send. Everything runs on
the default process group, on the device its backend needs, and is a plain copy where there is one process.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from io import BufferedReader, BytesIO

import torch
import torch.distributed as dist

from .errors import CheckpointError

CHUNK_BYTES = 64 << 20


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
        padded = bytearray(max(1, *sizes))
        padded[: len(payload)] = payload
        rows = self._all_gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [_bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def send(self, stream: BufferedReader | BytesIO | None, size: int, *, source: int) -> int:
        """Copy the `size` bytes of the source rank's stream into that of every other rank which has one.

        Returns the checksum of what went by: a source that cannot read goes on sending, so that nobody waits for
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

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return [row.cpu() for row in rows]


def current_group() -> Group:
    """The default process group, or a group of one for a plain `python train.py`."""
    if dist.is_available() and dist.is_initialized():
        return Group(dist.get_rank(), dist.get_world_size(), _device())
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise CheckpointError(
            f"WORLD_SIZE is {world_size} but there is no process group, so every rank would write as if it were "
            "alone: call torch.distributed.init_process_group() before load() and save()"
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
    local_rank = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    return torch.device("cuda", local_rank)
