"""A checkpoint on disk: a directory in the format of `torch.distributed.checkpoint` (DCP).

    step-000000000120-3b9e0c51d7aa-00000007-91c2f0d4/
        __0_0.distcp     rank 0's part
        __1_0.distcp     ...
        .metadata        DCP's index of all parts, for `dcp.load`: a pickle, which nothing here ever reads
    step-000000000120.json

Of a state that is the same on all ranks there is one part, rank 0's, with all of it.

A part is the very bytes of the rank's copy in memory (see `table`), and behind them, where DCP does not look, a footer:
what the copy is, and the checksums of its pieces. The manifest lists each file's size with a sha256 of the footer, of
`.metadata` of all of it. It is one line for each rank. A copy is verified as it is read, piece by piece: no rank reads
more of another rank's file than it needs. Of `.metadata`, which no load here reads, a load looks at the size alone.

A rank whose shards another one has too, a *twin*, writes only what it has for itself (see `parts`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import struct
import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from typing import Annotated

from ....codec import Checked, Count, Invalid, Positive, Text, from_plain, load_object, plain
from ...errors import BadCheckpoint
from ...state.sharding.table import Table
from ...wire.files import open_for_reading, open_own_directory, remove
from ..memory.slots import PIECE_BYTES
from .manifests import FileSum, Manifest

METADATA_NAME = ".metadata"

MAX_FOOTER_BYTES = 16 << 20
LOOKING_THREADS = 16
"""A shared file system answers one question slowly, and many at once."""

_END = struct.Struct(">Q8s")
"""Of a part: the length of the footer before it, and `_MAGIC`."""
_MAGIC = b"\0ea-part"


def data_name(rank: int) -> str:
    """As DCP names the first file of a rank."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True, slots=True)
class Footer(Checked):
    """What one rank's part holds. `generation` is the writer's; the one that made the copy may be an older one.

    `size`, `table` and `digest` are of the copy, see `RankShards`; `common`: it also has what is the same on all ranks.
    `twin_of` is the rank whose part has the shards of this one, too: then this one has the rank's own rows alone, and
    the digest is that of the other. None: the part has all of the copy.
    """

    rank: Count
    step: Count
    world_size: Positive
    copied_by: Count
    generation: Count
    size: Count
    table: tuple[Count, Count]
    digest: Annotated[str, Text(16, re.compile(r"[0-9a-f]{16}"))]
    common: bool
    twin_of: Count | None
    sums: tuple[Count, ...]

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if len(self.sums) != -(-self.size // PIECE_BYTES):
            raise Invalid(f"footer has {len(self.sums)} checksums for {self.size} bytes")
        if sum(self.table) > self.size:
            raise Invalid(f"footer: the table {self.table!r} lies outside the {self.size} bytes of the copy")
        if self.twin_of is not None and not self.twin_of < self.rank:
            raise Invalid(f"footer.twin_of is {self.twin_of}, expected a lower rank")

    def to_bytes(self) -> bytes:
        """With the end of the file."""
        raw = json.dumps(plain(self)).encode()
        return raw + _END.pack(len(raw), _MAGIC)


def read_footer(part: BufferedReader) -> tuple[Footer, FileSum]:
    """And what the manifest says of this part. Raises OSError, and ValueError where a file is no part."""
    fd = part.fileno()
    size = os.fstat(fd).st_size
    end = os.pread(fd, _END.size, max(0, size - _END.size))
    if not end.endswith(_MAGIC) or len(end) < _END.size:
        raise ValueError("it has no footer")
    length, _ = _END.unpack(end)
    if length > min(MAX_FOOTER_BYTES, size - _END.size):
        raise ValueError(f"a footer of {length} bytes")
    raw = os.pread(fd, length, size - _END.size - length)
    footer = from_plain(Footer, load_object(raw, "footer"))
    if footer.size + length + _END.size != size:
        raise ValueError(f"{size} bytes long, which its footer does not say")
    return footer, FileSum(size, hashlib.sha256(raw).hexdigest())


# ---------------------------------------------------------------- reading


def look(there: int, files: Mapping[str, FileSum]) -> None:
    """A first look: each file is there with its size. Raises OSError, ValueError.

    The bytes are verified when they are read.
    """
    with ThreadPoolExecutor(min(LOOKING_THREADS, len(files))) as threads:
        for _ in threads.map(lambda name: check_size(there, name, files[name].size), files):
            pass


def check_size(there: int, name: str, size: int) -> None:
    found = os.stat(name, dir_fd=there, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name} is no file")
    if found.st_size != size:
        raise ValueError(f"{name}: {found.st_size} bytes long, the manifest says {size}")


def open_copy(there: int, path: str, manifest: Manifest, files: Mapping[str, FileSum], rank: int) -> DiskCopy:
    """That rank's, for the caller to close. Raises OSError, and ValueError when it is not the one that is listed."""
    stream = open_for_reading(there, data_name(rank))
    try:
        footer, found = read_footer(stream)
        if found != files.get(data_name(rank)):
            raise ValueError("its size or footer is not what the manifest says")
        if (footer.rank, footer.step, footer.world_size) != (rank, manifest.step, manifest.world_size):
            raise ValueError("it is of another rank or step")
    except BaseException:
        stream.close()
        raise
    return DiskCopy(manifest.step, path, stream, footer)


class DiskCopy:
    """One rank's copy in a checkpoint; several threads may read. What it gives is verified."""

    def __init__(self, step: int, path: str, stream: BufferedReader, footer: Footer) -> None:
        self.footer = footer
        self.path = path
        self.stream = stream
        self._step = step
        self._verified: set[int] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> DiskCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stream.close()

    def verify(self) -> None:
        """All of it, by several threads. Raises BadCheckpoint."""

        def look(begin: int) -> None:
            self.read(begin, bytearray(min(PIECE_BYTES, self.footer.size - begin)))

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for _ in threads.map(look, range(0, self.footer.size, PIECE_BYTES)):
                pass

    @property
    def twin_of(self) -> int | None:
        """The rank whose copy has the shards of this one; see `Footer`."""
        return self.footer.twin_of

    @cached_property
    def table(self) -> Table:
        """Raises BadCheckpoint."""
        offset, length = self.footer.table
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
            if end > self.footer.size:
                raise self._bad(f"nothing lies at {offset} to {end}: the copy has {self.footer.size} bytes")
            pieces = range(offset // PIECE_BYTES, -(-end // PIECE_BYTES)) if len(target) else ()
            for piece in pieces:
                begins = piece * PIECE_BYTES
                first, last = max(offset, begins), min(end, begins + PIECE_BYTES)
                with target[first - offset : last - offset] as part:
                    self._read_of_piece(piece, first - begins, part)

    def _read_of_piece(self, piece: int, offset: int, part: memoryview) -> None:
        begins = piece * PIECE_BYTES
        size = min(PIECE_BYTES, self.footer.size - begins)
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
        if zlib.crc32(content) != self.footer.sums[piece]:
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
                    count = os.preadv(self.stream.fileno(), [rest], offset + done)
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
