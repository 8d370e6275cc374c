"""A checkpoint of a sharded state on disk: a directory in the format of `torch.distributed.checkpoint` (DCP).

    step-000000000120-3b9e0c51d7aa-00000007-91c2f0d4/
        __0_0.distcp     rank 0's copy, the very bytes of its slot in memory (see `table`)
        __0_0.json       what it is (`RankFile`): the copy's header, the checksums of its pieces, its digest
        __1_0.distcp     ...
        .metadata        DCP's index of all files, for `dcp.load`: a pickle, which nothing here ever reads
        files.json       size and digest of each of these (`FileList`)
    step-000000000120.json

The manifest has the digest of `files.json`, so that it vouches for every byte and stays as small as any other. A copy
is verified as it is read, piece by piece: no rank reads more of another rank's file than it needs.

A rank whose shards another one has too, a *twin*, writes only what it has for itself (see `parts`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from typing import Annotated, NamedTuple

from ....codec import Checked, Count, Invalid, Positive, Text, from_plain
from ...errors import BadCheckpoint
from ...state.sharding.table import Table
from ...wire.files import open_for_reading, open_own_directory, read_whole, remove, seal, unseal
from ..memory.copy_header import Header
from ..memory.slots import PIECE_BYTES
from .manifests import Manifest

LIST_NAME = "files.json"
METADATA_NAME = ".metadata"
REFUSED_SUFFIX = ".refused"
"""In it a rank that cannot write its part says why, so that the others need not wait for it."""
SCHEMA = 1

MAX_LIST_BYTES = 64 << 20
MAX_RANK_FILE_BYTES = 16 << 20
LOOKING_THREADS = 16
"""A shared file system answers one question slowly, and many at once."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_REFUSED_NAME = re.compile(r"__(\d{1,7})_0(?:\.(\d{1,5}))?" + re.escape(REFUSED_SUFFIX))
_FILE_NAME = re.compile(r"__\d{1,7}_0\.(?:distcp|json)|\.metadata")


def data_name(rank: int) -> str:
    """As DCP names the first file of a rank."""
    return f"__{rank}_0.distcp"


def rank_file_name(rank: int) -> str:
    return f"__{rank}_0.json"


@dataclass(frozen=True, slots=True)
class RefusedName:
    """The name of the file in which a rank says why it cannot write its part.

    A full disk takes a new name, but no content: then the file is empty, and `number` is the error number of the
    refusal, 0 where there is none.
    """

    rank: int
    number: int | None = None

    def __str__(self) -> str:
        number = "" if self.number is None else f".{self.number}"
        return f"__{self.rank}_0{number}{REFUSED_SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> RefusedName | None:
        found = _REFUSED_NAME.fullmatch(name)
        if found is None:
            return None
        return cls(int(found[1]), None if found[2] is None else int(found[2]))


@dataclass(frozen=True, slots=True)
class RankFile(Checked):
    """What one rank's data file holds. `generation` is the writer's; the one that made the copy may be an older one.

    `twin_of` is the rank whose file has the shards of this one, too: then this file has the rank's own rows alone, and
    the digest in its header is that of the other. None: the file has all of the copy.
    """

    header: Header
    sha256: Annotated[str, Text(64, _DIGEST)]
    generation: Count
    twin_of: Count | None

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        header = self.header
        if header.shards is None:
            raise Invalid("rank_file.header is of a state that is not sharded")
        if len(header.sums) != -(-header.size // PIECE_BYTES):
            raise Invalid(f"rank_file.header has {len(header.sums)} checksums for {header.size} bytes")
        if self.twin_of is not None and not self.twin_of < header.shards.rank:
            raise Invalid(f"rank_file.twin_of is {self.twin_of}, expected a lower rank")

    @property
    def rank(self) -> int:
        assert self.header.shards is not None
        return self.header.shards.rank

    def to_json(self) -> bytes:
        return seal(SCHEMA, self)

    @classmethod
    def from_json(cls, raw: bytes) -> RankFile:
        """Raises Invalid."""
        return from_plain(cls, unseal(raw, "rank_file", SCHEMA)[1])


class FileSum(NamedTuple):
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.size} {self.sha256}"

    @staticmethod
    def of(raw: bytes) -> FileSum:
        return FileSum(len(raw), hashlib.sha256(raw).hexdigest())


@dataclass(frozen=True, slots=True)
class FileList(Checked):
    """By name, size and sha256 of each file: one line each, as they are for a person with `sha256sum`."""

    world_size: Positive
    files: dict[
        Annotated[str, Text(32, _FILE_NAME)], Annotated[str, Text(84, re.compile(r"\d{1,19} [0-9a-f]{64}"))]
    ]

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        expected = {
            name for rank in range(self.world_size) for name in (data_name(rank), rank_file_name(rank))
        }
        if missing := (expected | {METADATA_NAME}) ^ self.files.keys():
            raise Invalid(f"file_list.files has too many, or lacks {min(missing)}")

    def __getitem__(self, name: str) -> FileSum:
        size, sha256 = self.files[name].split()
        return FileSum(int(size), sha256)

    @property
    def data_size(self) -> int:
        """Of all ranks' data files."""
        return sum(self[data_name(rank)].size for rank in range(self.world_size))

    def to_json(self) -> bytes:
        return seal(SCHEMA, self, indent=1)

    @classmethod
    def from_json(cls, raw: bytes) -> FileList:
        """Raises Invalid."""
        return from_plain(cls, unseal(raw, "file_list", SCHEMA)[1])


# ---------------------------------------------------------------- reading


def open_list(there: int, manifest: Manifest) -> tuple[BufferedReader, FileList]:
    """The list that this manifest vouches for, at its beginning. Raises OSError, ValueError."""
    stream = open_for_reading(there, LIST_NAME)
    try:
        raw = stream.read(MAX_LIST_BYTES + 1)
        if hashlib.sha256(raw).hexdigest() != manifest.sha256:
            raise ValueError(f"{LIST_NAME}: sha256 differs from the manifest's")
        found = FileList.from_json(raw)
        if (found.world_size, found.data_size) != (manifest.world_size, manifest.size):
            raise ValueError(f"{LIST_NAME} is not of as many ranks or bytes as the manifest says")
        stream.seek(0)
    except BaseException:
        stream.close()
        raise
    return stream, found


def look(there: int, manifest: Manifest, files: FileList) -> None:
    """A first look at all files: each is there with its size, and says what it is. Raises OSError, ValueError.

    The bytes of the data are verified when they are read.
    """
    check_size(there, METADATA_NAME, files[METADATA_NAME].size)
    with ThreadPoolExecutor(min(LOOKING_THREADS, manifest.world_size)) as threads:
        for _ in threads.map(
            lambda rank: read_rank_file(there, manifest, files, rank), range(manifest.world_size)
        ):
            pass


def read_rank_file(there: int, manifest: Manifest, files: FileList, rank: int) -> RankFile:
    """Raises OSError, and ValueError when it is not the one that the list names, or its data has another size."""
    name = rank_file_name(rank)
    raw = read_whole(there, name, MAX_RANK_FILE_BYTES)
    if FileSum.of(raw) != files[name]:
        raise ValueError(f"{name}: size or sha256 differs from that in {LIST_NAME}")
    found = RankFile.from_json(raw)
    expected = files[data_name(rank)]
    if (found.rank, found.header.step, found.header.world_size, FileSum(found.header.size, found.sha256)) != (
        rank, manifest.step, manifest.world_size, expected,
    ):  # fmt: skip
        raise ValueError(f"{name} is of another rank, step or file")
    check_size(there, data_name(rank), expected.size)
    return found


def check_size(there: int, name: str, size: int) -> None:
    found = os.stat(name, dir_fd=there, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name} is no file")
    if found.st_size != size:
        raise ValueError(f"{name}: {found.st_size} bytes long, {LIST_NAME} says {size}")


class DiskCopy:
    """One rank's copy in a checkpoint; several threads may read. What it gives is verified."""

    def __init__(self, step: int, path: str, stream: BufferedReader, file: RankFile) -> None:
        self.file = file
        self.path = path
        self._step = step
        self._stream = stream
        self._verified: set[int] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> DiskCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()

    @property
    def header(self) -> Header:
        return self.file.header

    @property
    def twin_of(self) -> int | None:
        """The rank whose copy has the shards of this one; see `RankFile`."""
        return self.file.twin_of

    @cached_property
    def table(self) -> Table:
        """Raises BadCheckpoint."""
        assert self.header.shards is not None
        offset, length = self.header.shards.table
        raw = bytearray(length)
        self.read(offset, raw)
        try:
            return Table.from_bytes(bytes(raw))
        except Invalid as error:
            raise self._bad(str(error)) from error

    def read(self, offset: int, into: bytearray | memoryview) -> None:
        """Fill `into` with the bytes from `offset` on. Raises BadCheckpoint, which names the piece that is damaged."""
        with memoryview(into) as view, view.cast("B") as target:
            end = offset + len(target)
            if end > self.header.size:
                raise self._bad(f"nothing lies at {offset} to {end}: the copy has {self.header.size} bytes")
            pieces = range(offset // PIECE_BYTES, -(-end // PIECE_BYTES)) if len(target) else ()
            for piece in pieces:
                begins = piece * PIECE_BYTES
                first, last = max(offset, begins), min(end, begins + PIECE_BYTES)
                with target[first - offset : last - offset] as part:
                    self._read_of_piece(piece, first - begins, part)

    def _read_of_piece(self, piece: int, offset: int, part: memoryview) -> None:
        begins = piece * PIECE_BYTES
        size = min(PIECE_BYTES, self.header.size - begins)
        with self._lock:
            is_verified = piece in self._verified
        if is_verified:
            self._fill(begins + offset, part)
            return
        if len(part) == size:
            self._fill(begins, part)
            self._verify(piece, part)
            return
        whole = bytearray(size)
        with memoryview(whole) as view:
            self._fill(begins, view)
            self._verify(piece, view)
            part[:] = view[offset : offset + len(part)]

    def _verify(self, piece: int, content: memoryview) -> None:
        if zlib.crc32(content) != self.header.sums[piece]:
            begins = piece * PIECE_BYTES
            raise self._bad(
                f"the bytes {begins} to {begins + len(content)} (piece {piece}) do not match their checksum"
            )
        with self._lock:
            self._verified.add(piece)

    def _fill(self, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            with target[done:] as rest:
                try:
                    count = os.preadv(self._stream.fileno(), [rest], offset + done)
                except OSError as error:
                    raise self._bad(str(error)) from error
            if not count:
                raise self._bad(f"it ends after {offset + done} bytes")
            done += count

    def _bad(self, reason: str) -> BadCheckpoint:
        return BadCheckpoint(self._step, self.path, reason)


# ---------------------------------------------------------------- removing


def remove_directory(dir_fd: int, name: str) -> None:
    """With the files in it. What a reader or another writer keeps there is left for the next time. Raises OSError."""
    try:
        with open_own_directory(name, dir_fd) as there:
            for entry in os.listdir(there):
                with contextlib.suppress(IsADirectoryError, PermissionError):
                    remove(there, entry)
        os.rmdir(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            remove(dir_fd, name)
        elif error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def ranks_in(names: Iterable[str], world_size: int) -> tuple[list[int], list[RefusedName]]:
    """Of a directory's names: the ranks that have not written their part, and the refusals of those that cannot."""
    there = set(names)
    missing = [rank for rank in range(world_size) if rank_file_name(rank) not in there]
    refusals = [refused for name in there if (refused := RefusedName.parse(name)) is not None]
    unwritten = set(missing)
    return missing, sorted(
        (refused for refused in refusals if refused.rank in unwritten),
        key=lambda refused: (refused.rank, refused.number is not None),
    )
