"""Brings copies in memory to the disk: as the disk writer does it, and the worker itself where that cannot be asked.

A rank's copy becomes its part of an attempt: written under a temporary name, fsynced, renamed. A copy of a whole state
is the one part. The names are made durable by the one that commits, which looks at them all and then at the disk
(`commit`). A rank that cannot write leaves a file without a footer in the place of its part, with the reason if there
is room for one: so the others need not wait.

The directory of an attempt is its own: a writer of the past can do no harm in it, and a later save removes it. So the
questions of `CheckpointFiles` are asked only so that nothing large is written for nothing.

A worker that has died is no reason not to write. One that lives and no longer waits cancels its order: from then on
nothing is published, for it may have gone on to newer checkpoints by itself. What it takes to read all of a copy gives
its slot the checksums, too. No torch here: the disk writer imports this module.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, TypeVar, cast

from ... import errors
from ...errors import CheckpointError, Fenced, OtherRun, SaveFailed
from ...state.sharding.table import Shard, Table, Value, aligned, own_key
from ...wire.files import open_directory, open_for_reading, open_own_directory, remove, replace_file
from ...wire.messages import MAX_REASON_CHARS, WriteOutcome
from ..memory.copy_header import Header
from ..memory.slots import PIECE_BYTES, HeldSlot, Slots
from .checkpoint_files import CheckpointFiles
from .durable import make_directory, write_durably
from .shard_files import Footer, data_name, read_footer

_Row = TypeVar("_Row", Shard, Value)


@dataclass(frozen=True, slots=True)
class Part:
    """Of the attempt with that directory, by a writer of `generation`; `twin_of` as in `Footer`."""

    attempt: str
    generation: int
    twin_of: int | None = None


def write_held(
    files: CheckpointFiles, part: Part, slots: Slots, held: HeldSlot, may_change: Callable[[], None]
) -> int:
    """Write the copy in a slot. Its size; raises what `write_part` does."""
    with (
        mmap.mmap(held.stream.fileno(), held.header.size, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as view,
    ):
        if part.twin_of is not None:
            return _write_own(files, part, held.header, view, may_change)

        def pour(sink: BinaryIO) -> None:
            for offset in range(0, held.header.size, PIECE_BYTES):
                with view[offset : offset + PIECE_BYTES] as piece:
                    sink.write(piece)

        written = write_part(files, part, held.header, pour, may_change)
    if not held.header.sums:
        with contextlib.suppress(OSError):  # a memory without room for them is no reason to refuse the save
            slots.add_sums(held, written.sums)
    return written.size


def write_part(
    files: CheckpointFiles,
    part: Part,
    header: Header,
    pour: Callable[[BinaryIO], object],
    may_change: Callable[[], None],
) -> Footer:
    """Make durable what `pour` writes: the copy that `header` describes. Once is enough: what is there is left.

    Raises OSError, OtherRun, what `may_change` raises, and SaveFailed when it is not what the header says: then
    `refuse_part` spares the one that commits its wait.
    """
    may_change()
    make_directory(files.directory)
    with open_directory(files.directory) as root:
        files.claim.check(root, header.step)
        with files.claim.blaming(root), _attempt(files, part.attempt) as there:
            found = _find(there, part, header)
            if found is not None:
                return found
            try:
                return _write(files, there, part, header, pour)
            except FileNotFoundError:
                # Another has written the same meanwhile, and the one that commits has cleared up.
                found = _find(there, part, header)
                if found is None:
                    raise
                return found


def refuse_part(files: CheckpointFiles, attempt: str, rank: int, error: Exception) -> None:
    """Let the one that commits know why this rank's part will not come, or on a full disk at least that it will not.

    Where the generation, or the run, is over, there is no such one.
    """
    if isinstance(error, Fenced | OtherRun):
        return
    reason = (str(error) or repr(error))[:MAX_REASON_CHARS]
    name, temporary = data_name(rank), f"tmp-refused-{rank}"
    with contextlib.suppress(OSError), _attempt(files, attempt) as there:
        try:
            replace_file(there, temporary, reason.encode(errors="replace"))
            os.link(temporary, name, src_dir_fd=there, dst_dir_fd=there)  # a part that is there stays
        except OSError:
            os.mknod(name, dir_fd=there)


@contextlib.contextmanager
def _attempt(files: CheckpointFiles, name: str) -> Iterator[int]:
    """The directory of an attempt: the first one that needs it makes it. Raises OSError."""
    make_directory(files.directory)
    with open_directory(files.directory) as root:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=root)
        with open_own_directory(name, root) as there:
            yield there


def _find(there: int, part: Part, header: Header) -> Footer | None:
    """What is written already: the disk writer may have been quicker than its answer."""
    with (
        contextlib.suppress(OSError, ValueError),
        open_for_reading(there, data_name(header.part.rank)) as stream,
    ):
        found, _ = read_footer(stream)
        same = (found.copied_by, found.step, found.generation, found.twin_of)
        if same == (*header.version, part.generation, part.twin_of):
            return found
    return None


def _write(
    files: CheckpointFiles, there: int, part: Part, header: Header, pour: Callable[[BinaryIO], object]
) -> Footer:
    shards, name = header.part, data_name(header.part.rank)
    temporary = f"tmp-{files.claim.mark}-{name}"
    footers: list[Footer] = []

    def write(sink: BinaryIO) -> None:
        summing = _Summing(sink)
        pour(cast(BinaryIO, summing))
        if summing.size != header.size or (header.sums and header.sums != summing.sums):
            raise SaveFailed(
                f"rank {shards.rank}: the copy of step {header.step} is not what its header says: the next save takes "
                "another copy; if it happens again, test this node's memory"
            )
        footers.append(
            Footer(
                rank=shards.rank,
                step=header.step,
                world_size=header.world_size,
                copied_by=header.generation,
                generation=part.generation,
                size=header.size,
                table=header.table,
                digest=shards.digest,
                common=shards.common,
                twin_of=part.twin_of,
                sums=summing.sums,
            )
        )
        sink.write(footers[0].to_bytes())

    write_durably(there, temporary, write, digests=False)  # the footer has checksums
    try:
        os.rename(temporary, name, src_dir_fd=there, dst_dir_fd=there)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(there, temporary)
        raise
    return footers[0]


def _write_own(
    files: CheckpointFiles, part: Part, header: Header, copy: memoryview, may_change: Callable[[], None]
) -> int:
    assert header.shards is not None
    offset, length = header.table
    own, places = own_rows(Table.from_bytes(bytes(copy[offset : offset + length])), header.shards.rank)
    table, end = own.to_bytes(), sum(aligned(count) for _, count in places)
    shards = replace(header.shards, common=False)
    size, place = end + len(table), (end, len(table))
    smaller = replace(header, size=size, sums=(), rng_holes=(), shards=shards, table=place)

    def pour(sink: BinaryIO) -> None:
        for begin, count in places:
            with copy[begin : begin + count] as archive:
                sink.write(archive)
            sink.write(bytes(aligned(count) - count))
        sink.write(table)

    return write_part(files, part, smaller, pour, may_change).size


def own_rows(table: Table, rank: int) -> tuple[Table, tuple[tuple[int, int], ...]]:
    """What a rank writes of a copy whose shards a lower rank writes, too: what it has for itself alone.

    In HSDP each replica group has the same shards, and each rank its own random state. The table of the new copy, and
    the places of its archives in the old one, as offset and length. A function of the table alone: whoever writes DCP's
    index finds out the same places.
    """
    places: dict[tuple[int, int], int] = {}
    """By its place in the old copy: tensors that are tied have one archive."""
    end = 0

    def moved(row: _Row) -> _Row:
        nonlocal end
        place = row.begin, row.length
        if place not in places:
            places[place], end = end, end + aligned(row.length)
        begin = places[place]
        if isinstance(row, Shard):
            return replace(row, begin=begin, data=begin + row.data - row.begin)
        return replace(row, begin=begin)

    prefix = own_key(rank, "")
    shards = tuple(moved(row) for row in table.shards if row.key.startswith(prefix))
    values = tuple(moved(row) for row in table.values if row.key.startswith(prefix))
    paths = {key: path for key, path in table.paths.items() if key.startswith(prefix)}
    return Table(shards, values, paths), tuple(places)


class _Summing:
    """Writes to a file, and takes the checksums of the pieces of that, whatever the size in which it comes."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._done: list[int] = []
        self._crc = 0
        self.size = 0

    @property
    def sums(self) -> tuple[int, ...]:
        return (*self._done, self._crc) if self.size % PIECE_BYTES else tuple(self._done)

    def write(self, data: bytes | memoryview, /) -> int:
        count = self._sink.write(data)
        with memoryview(data) as view, view.cast("B") as flat:
            at = 0
            while at < len(flat):
                with flat[at : at + PIECE_BYTES - self.size % PIECE_BYTES] as stretch:
                    self._crc = zlib.crc32(stretch, self._crc)
                    self.size += len(stretch)
                    at += len(stretch)
                if self.size % PIECE_BYTES == 0:
                    self._done.append(self._crc)
                    self._crc = 0
        return count

    def flush(self) -> None:
        """Nothing is buffered here."""


# ---------------------------------------------------------------- how a write ended


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
