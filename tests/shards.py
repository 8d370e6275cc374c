"""Copies of a sharded state, as tests need them: real tables and headers, and bytes that show whose they are."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from elastic_agent.worker.state.sharding.table import Shard, Table, Value, own_key
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.commit import commit, new_attempt
from elastic_agent.worker.storage.disk.manifests import Manifest
from elastic_agent.worker.storage.disk.parts import Part, write_part
from elastic_agent.worker.storage.disk.shard_files import data_name
from elastic_agent.worker.storage.memory.copy_header import Header, RankShards
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.wire.environment import Run
from elastic_agent.worker.wire.messages import CommitOrder

RUN = Run("run-a")
METADATA = b"what torch pickles"


def permitted() -> None:
    pass


def copy_of(
    rank: int, step: int, world_size: int, *, generation: int = 1, group: int | None = None, length: int = 400
) -> tuple[bytes, Header]:
    """The rank's shard of one tensor, a value, which rank 0 has for all, and what the rank has for itself.

    `group`: the shard is that of this rank, a twin's.
    """
    shown = rank if group is None else group
    archives = [
        f"shard {shown} after {step} ".encode().ljust(length, b"s"),
        f"rng {rank} ".encode().ljust(100, b"r"),
    ]
    rows = [
        Shard("model.weight", "uint8", (length * world_size,), (length * shown,), (length,), 0, length, 0),
        Shard(own_key(rank, "rng"), "uint8", (100,), (0,), (100,), _up(length), 100, _up(length)),
    ]
    at = _up(length) + 128
    values = (Value("step", at, 50, common=True),) if rank == 0 else ()
    paths: dict[str, tuple[str | int, ...]] = {
        "model.weight": ("model", "weight"), own_key(rank, "rng"): ("ranks", rank, "rng"), "step": ("step",)
    }  # fmt: skip
    table = Table(tuple(rows), values, {row.key: paths[row.key] for row in (*rows, *values)})
    body = b"".join(one.ljust(_up(len(one)), b"\0") for one in archives)
    if values:
        body += str(step).encode().ljust(64, b"v")
    raw = table.to_bytes()
    shards, place = RankShards(rank, table.digest, common=rank == 0), (len(body), len(raw))
    return body + raw, Header(
        step, generation, 0, world_size, sum(place), run="run-a", shards=shards, table=place
    )


def _up(length: int) -> int:
    return -(-length // 64) * 64


def in_slot(memory: os.PathLike[str], directory: str, local_rank: int, raw: bytes, header: Header) -> Slots:
    slots = Slots(str(memory), SlotFolder.of(directory, local_rank))
    opened = slots.begin(len(raw))
    opened.trim()
    os.pwrite(opened.fd, raw, 0)
    slots.seal(opened, header)
    return slots


def save_part(
    files: CheckpointFiles,
    attempt: str,
    rank: int,
    step: int,
    world_size: int,
    *,
    generation: int = 1,
    length: int = 400,
) -> None:
    raw, header = copy_of(rank, step, world_size, generation=generation, length=length)

    def pour(sink: BinaryIO) -> None:
        sink.write(raw)

    write_part(files, Part(attempt, generation), header, pour, permitted)


def commit_of(
    attempt: str, step: int, world_size: int, *, generation: int = 1, within_s: float = 0.0
) -> tuple[CommitOrder, bytes]:
    order = CommitOrder("", step, generation, RUN.id, attempt, world_size, world_size, 1, (), within_s)
    return order, METADATA


def save_all(nodes: list[CheckpointFiles], step: int, *, generation: int = 1, length: int = 400) -> Manifest:
    """One rank for each; the first commits."""
    attempt = new_attempt(nodes[0], step, generation)
    for rank, files in enumerate(nodes):
        save_part(files, attempt, rank, step, len(nodes), generation=generation, length=length)
    return commit(nodes[0], *commit_of(attempt, step, len(nodes), generation=generation), permitted)


# ---------------------------------------------------------------- a state that is the same on all ranks


def content(step: int) -> bytes:
    return f"state after {step} steps ".encode() * 40


def write_whole(
    files: CheckpointFiles,
    step: int,
    *,
    generation: int = 1,
    raw: bytes | None = None,
    may_change: Callable[[], None] = permitted,
) -> str:
    """The one part, of a world of two ranks, which is no checkpoint yet: the name of its attempt."""
    raw = content(step) if raw is None else raw
    attempt = new_attempt(files, step, generation)
    header = Header(step, generation, 0, 2, len(raw), run=files.run.id)
    write_part(files, Part(attempt, generation), header, lambda sink: sink.write(raw), may_change)
    return attempt


def commit_whole(
    files: CheckpointFiles,
    attempt: str,
    step: int,
    *,
    generation: int = 1,
    may_change: Callable[[], None] = permitted,
) -> Manifest:
    order = CommitOrder("", step, generation, files.run.id, attempt, 2, 1, 1, (), 0.0)
    return commit(files, order, METADATA, may_change)


def save_whole(files: CheckpointFiles, step: int, *, generation: int = 1) -> Manifest:
    return commit_whole(files, write_whole(files, step, generation=generation), step, generation=generation)


def data_of(directory: Path, manifest: Manifest) -> Path:
    """The file with all of it."""
    return directory / manifest.file / data_name(0)


def state_on_disk(directory: Path, step: int) -> dict[str, Any]:
    """By part, as torch's own tool reads it; what ranks have for themselves is under `ranks`."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    manifest = json.loads((directory / f"step-{step:012d}.json").read_bytes())
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(directory / manifest["file"], file.name)
        state: dict[str, Any] = torch.load(file.name, map_location="cpu", weights_only=True)
    return state


# ---------------------------------------------------------------- nodes


def nodes(directory: Path, count: int = 3, *, keep: int = 2, run: Run = RUN) -> list[CheckpointFiles]:
    return [CheckpointFiles(directory, keep=keep, run=run) for _ in range(count)]


def check(reader: CheckpointFiles, manifest: Manifest) -> None:
    """Every rank's copy is there to the last byte. Raises BadCheckpoint."""
    for rank in range(manifest.world_size):
        raw, header = copy_of(rank, manifest.step, manifest.world_size, generation=manifest.generation)
        with reader.open_rank(manifest, rank) as copy:
            into = bytearray(copy.footer.size)
            copy.read(0, into)
            assert into == raw
            assert (copy.footer.copied_by, copy.footer.step) == header.version
            assert {row.key for row in copy.table.shards} == {"model.weight", f"ranks.{rank}.rng"}
