"""Where each byte of one rank's copy belongs, and the copy of all tensors to their places.

Each tensor lies in an archive of its own, as `torch.save` writes it, at a multiple of 64 bytes: first all tensors, then
all values, then the table. What an archive has around a tensor's elements depends on dtype and sizes only, so `torch`
is asked once for each of these: it writes all but the elements (`torch.serialization.skip_data`). A value that has
changed moves no tensor.

On a CPU the copy is over when `copy_to` returns; a GPU copies while the process goes on, and whatever it computes next
waits for the copy on the GPU itself.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, BinaryIO, cast

import torch

from ..kinds import flat_bytes
from .items import PLAIN, Form, Items
from .leaves import Path, refuse_twice
from .pieces import Sizes, numel, strides_of
from .table import Shard, Table, Value, aligned


class CannotLayOut(RuntimeError):
    """This version of torch shows too little of where it puts a tensor's bytes: there are no copies in memory."""


class _Sink:
    """A file for `torch.save` that keeps what is written, and where a tensor's bytes were left out."""

    def __init__(self) -> None:
        self.written = [bytearray()]
        """Before and behind what was left out."""
        self.left_out: list[int] = []
        """How many bytes."""

    def write(self, data: bytes | memoryview, /) -> int:
        self.written[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence != os.SEEK_CUR or offset < 0:
            raise CannotLayOut(
                f"torch {torch.__version__} leaves a tensor out in a way that is not known here"
            )
        if offset:
            self.left_out.append(offset)
            self.written.append(bytearray())
        return self.tell()

    def tell(self) -> int:
        return sum(map(len, self.written)) + sum(self.left_out)

    def flush(self) -> None:
        """Nothing is buffered here."""


@dataclass(frozen=True, slots=True)
class _Template:
    """The archive of a tensor: what is before its elements, where these begin, and what is behind them."""

    head: bytes
    tail: bytes
    data: int
    size: int

    @classmethod
    def of(cls, dtype: torch.dtype, sizes: Sizes) -> _Template:
        """Raises CannotLayOut."""
        tensor, sink = torch.empty(sizes, dtype=dtype), _Sink()
        with torch.serialization.skip_data():
            torch.save(tensor, cast(Any, sink))
        length = tensor.untyped_storage().nbytes()
        if sink.left_out != ([length] if length else []):
            raise CannotLayOut(f"torch {torch.__version__} left out {sink.left_out} of {length} bytes")
        head, tail = (*map(bytes, sink.written), b"")[:2]
        return cls(head, tail, len(head), sink.tell())


@dataclass(frozen=True, slots=True)
class _Places:
    """All that does not change while the form does not."""

    form: Form
    written: list[tuple[int, bytes]]
    """What is between the tensors' elements, and the offset of each."""
    tensors: list[tuple[int, torch.dtype, Sizes]]
    """Where the elements of each begin."""
    shards: tuple[Shard, ...]
    end: int


@dataclass(frozen=True, slots=True)
class _Tail:
    """Where the values lie, and the table of all."""

    values: list[tuple[str, Path, int, bool]]
    """With the length of each."""
    table: Table
    packed: bytes
    digest: str


class ShardLayouts:
    """The layouts of one Checkpointer's copies, one after the other."""

    def __init__(self) -> None:
        self._templates: dict[tuple[torch.dtype, Sizes], _Template] = {}
        self._places: _Places | None = None
        self._tail: _Tail | None = None
        self._views = _Views()

    def lay_out(self, items: Items) -> ShardLayout:
        """Raises CannotLayOut, and NotPlainData where two values have one key."""
        places, tail = self._places, self._tail
        if places is None or places.form is not items.form:
            places, tail = self._place(items.form), None
            self._places = places
        values = [(key, path, len(archive), common) for key, path, archive, common in items.values]
        if tail is None or tail.values != values:
            tail = self._tail = self._tabulate(places, values, items)
        behind = bytearray()
        for _, _, archive, _ in items.values:
            behind += archive
            behind += bytes(aligned(len(behind)) - len(behind))
        table_at = places.end + len(behind)
        behind += tail.packed
        return ShardLayout(
            places.end + len(behind),
            tail.table,
            (table_at, len(tail.packed)),
            tail.digest,
            tail.packed,
            places,
            bytes(behind),
            items.tensors,
            self._views,
        )

    def _place(self, form: Form) -> _Places:
        forms: dict[int, tuple[torch.dtype, Sizes]] = {
            row.source: (row.dtype, row.sizes) for row in form.rows
        }
        written: list[tuple[int, bytearray]] = [(0, bytearray())]
        tensors: list[tuple[int, torch.dtype, Sizes]] = []
        archives: list[tuple[int, int, int]] = []
        offset = 0
        for source in range(form.sources):
            one = forms[source]
            template = self._templates.get(one)
            if template is None:
                template = self._templates[one] = _Template.of(*one)
            data = offset + template.data
            begin, stretch = written[-1]
            stretch += bytes(offset - begin - len(stretch)) + template.head
            written.append(
                (data + template.size - template.data - len(template.tail), bytearray(template.tail))
            )
            tensors.append((data, *one))
            archives.append((offset, template.size, data))
            offset = aligned(offset + template.size)
        begin, stretch = written[-1]
        stretch += bytes(offset - begin - len(stretch))
        shards = tuple(
            Shard(
                row.key,
                str(row.dtype).removeprefix("torch."),
                row.shape,
                row.offsets,
                row.sizes,
                *archives[row.source],
                row.common,
            )
            for row in form.rows
        )
        return _Places(form, [(at, bytes(data)) for at, data in written if data], tensors, shards, offset)

    def _tabulate(self, places: _Places, values: list[tuple[str, Path, int, bool]], items: Items) -> _Tail:
        found: list[Value] = []
        offset = places.end
        for key, _, length, common in values:
            found.append(Value(key, offset, length, common))
            offset = aligned(offset + length)
        paths = {row.key: row.path for row in places.form.rows}
        # The parts have seen to their tensors: one of them has several rows.
        refuse_twice(
            [*dict.fromkeys(row.path for row in places.form.rows), *(path for _, path, *_ in values)]
        )
        paths |= {key: path for key, path, *_ in values}
        table = Table(places.shards, tuple(found), paths)
        digest = table.digest
        if items.tells_ranks_apart:
            digest = sha256(f"{digest} {items.rank}".encode()).hexdigest()[:16]
        return _Tail(values, table, table.to_bytes(), digest)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A copy of `size` bytes. `table_place`: offset and length of the table in it. `digest`: see `RankShards`."""

    size: int
    table: Table
    table_place: tuple[int, int]
    digest: str
    packed_table: bytes
    """The same object until the table changes."""
    _places: _Places
    _behind: bytes
    """Values and table."""
    _tensors: Sequence[torch.Tensor]
    _views: _Views

    @torch.no_grad()
    def copy_to(self, view: memoryview, target: torch.Tensor) -> list[torch.cuda.Event]:
        """Fill `target`, the bytes that `view` shows; what a GPU still copies is there when its events are over."""
        for offset, data in self._places.written:
            view[offset : offset + len(data)] = data
        view[self._places.end : self._places.end + len(self._behind)] = self._behind
        return _copy_all(self._views.of(self._places, target), self._tensors)

    @torch.no_grad()
    def pour(self, sink: BinaryIO) -> None:
        """One piece after the other: there was no room, or no agent, for a copy that stays."""
        places = zip(self._places.tensors, self._tensors, strict=True)
        pieces: list[tuple[int, bytes | torch.Tensor]] = [*self._places.written]
        pieces += ((offset, tensor) for (offset, *_), tensor in places if tensor.numel())
        for _, piece in sorted(pieces, key=lambda one: one[0]):
            sink.write(piece if isinstance(piece, bytes) else _bytes_of(piece))
        sink.write(self._behind)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: Any = flat_bytes(plain).numpy()
    return memoryview(array)


def _copy_all(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[torch.cuda.Event]:
    """Of many small tensors the calls cost more than the bytes: one call copies all that are in plain memory."""
    streams: dict[torch.device, torch.cuda.Stream] = {}
    plain: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for place, source in zip(places, sources, strict=True):
        if source.is_cpu and type(source) in PLAIN:
            plain[0].append(place)
            plain[1].append(source)
        elif source.is_cuda:
            copy_beside(place, source, streams)
        else:
            place.copy_(source)
    if plain[0]:
        torch._foreach_copy_(*plain)
    return [over(device, stream) for device, stream in streams.items()]


def copy_beside(
    place: torch.Tensor, source: torch.Tensor, streams: dict[torch.device, torch.cuda.Stream]
) -> None:
    """Copy while the GPU's own work goes on, behind what has changed `source` up to now."""
    device = source.device
    if device not in streams:
        streams[device] = stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as below
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(streams[device]):
        place.copy_(source, non_blocking=True)
    source.record_stream(streams[device])


def over(device: torch.device, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The end of the copy. The GPU does nothing that could change the state before; this process need not wait."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    torch.cuda.current_stream(device).wait_event(event)
    return event


class _Views:
    """The places of all tensors in a slot's mapping, as tensors, for as long as the mapping is there."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[torch.Tensor], _Places, list[torch.Tensor]]] = []

    def of(self, places: _Places, target: torch.Tensor) -> list[torch.Tensor]:
        self._known = [one for one in self._known if one[0]() is not None and one[1] is places]
        for reference, _, views in self._known:
            if reference() is target:
                return views
        storage = target.untyped_storage()
        views = [_view(storage, offset, dtype, sizes) for offset, dtype, sizes in places.tensors]
        self._known.append((weakref.ref(target), places, views))
        return views


def _view(storage: torch.UntypedStorage, offset: int, dtype: torch.dtype, sizes: Sizes) -> torch.Tensor:
    """No view to autograd, which would keep the slot's own tensor alive."""
    made = torch.empty(0, dtype=dtype)
    if not numel(sizes):
        return made.reshape(sizes)
    arguments: Any = (storage, offset // dtype.itemsize, sizes, strides_of(sizes))
    return made.set_(*arguments)
