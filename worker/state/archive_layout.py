"""Where each byte of a checkpoint file belongs, before there is one; and the copy of all tensors to their places.

`lay_out` lets `torch.save` write all of the file but the tensors' bytes (`torch.serialization.skip_data`), and notes
which storages it met and where it left them out. So shared storages, views and tied weights are what torch makes of
them. On a CPU the copy is over when `copy_to` returns; a GPU copies while the process goes on, and whatever it
computes next waits for the copy on the GPU itself.
"""

from __future__ import annotations

import io
import logging
import os
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from pickle import Pickler
from typing import Any, cast

import torch
from torch.serialization import DEFAULT_PROTOCOL, location_tag

_ALWAYS_FIRST = -1000


class CannotLayOut(RuntimeError):
    """This version of torch shows too little of where it puts a tensor's bytes: there are no copies in memory."""


class _Recorder(threading.local):
    """The storages that torch has met in the present `torch.save` of this thread, in the order of their numbers."""

    storages: list[torch.UntypedStorage] | None = None


_recorder = _Recorder()
_registered = False


def _note(storage: Any) -> None:
    """torch asks where each storage that it saves lives; None leaves the answer to others."""
    if _recorder.storages is not None:
        _recorder.storages.append(storage)


def _register() -> None:
    global _registered
    if not _registered:
        _registered = True
        torch.serialization.register_package(_ALWAYS_FIRST, _note, lambda _storage, _location: None)


class _Sink:
    """A file for `torch.save` that keeps what is written, and where a tensor's bytes were left out."""

    def __init__(self) -> None:
        self.size = 0
        self.written: list[tuple[int, bytearray]] = []
        """In whole stretches, for torch writes a few bytes at a time."""
        self.left_out: list[tuple[int, int]] = []

    def write(self, data: bytes | memoryview, /) -> int:
        begin, stretch = self.written[-1] if self.written else (0, bytearray())
        if not self.written or begin + len(stretch) != self.size:
            stretch = bytearray()
            self.written.append((self.size, stretch))
        stretch += data
        self.size += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence != os.SEEK_CUR or offset < 0:
            raise CannotLayOut(
                f"torch {torch.__version__} leaves a tensor out in a way that is not known here"
            )
        self.left_out.append((self.size, offset))
        self.size += offset
        return self.size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is buffered here."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint file of `size` bytes: what is `written` is known, and at each offset a storage's bytes belong."""

    size: int
    written: list[tuple[int, bytearray]]
    storages: list[tuple[int, torch.UntypedStorage]]

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where this tensor's storage begins in the file."""
        wanted = tensor.untyped_storage()
        return next(offset for offset, storage in self.storages if storage is wanted)

    def copy_to(self, view: memoryview, target: torch.Tensor) -> list[torch.cuda.Event]:
        """Fill `target`, the bytes that `view` shows; what a GPU still copies is there when its events are over."""
        for offset, data in self.written:
            view[offset : offset + len(data)] = data
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for offset, storage in self.storages:
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            place = target[offset : offset + storage.nbytes()]
            if storage.device.type == "cuda":
                copy_beside(place, source, streams)
            else:
                place.copy_(source)
        return [over(device, stream) for device, stream in streams.items()]


def lay_out(payload: Any) -> Layout:
    """How `torch.save` would write this. Raises CannotLayOut, and what the payload's own pickling raises."""
    _register()
    sink = _Sink()
    met: list[torch.UntypedStorage] = []
    _recorder.storages = met
    try:
        with torch.serialization.skip_data():
            torch.save(payload, cast(Any, sink))
    finally:
        _recorder.storages = None
    # By identity, in the order of their numbers, as torch does; of an empty one there is nothing to leave out.
    distinct = [one for one in {id(storage): storage for storage in met}.values() if one.nbytes()]
    left_out = [(offset, length) for offset, length in sink.left_out if length]
    if [storage.nbytes() for storage in distinct] != [length for _, length in left_out]:
        raise CannotLayOut(
            f"torch {torch.__version__} left out {len(left_out)} storages of {len(distinct)}, or of other sizes"
        )
    offsets = [offset for offset, _ in left_out]
    return Layout(sink.size, sink.written, list(zip(offsets, distinct, strict=True)))


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


# ---------------------------------------------------------------- the layout of the archive before
#
# Laying out one state after another: where only contents and numbers have changed, torch writes no new file.
#
# From save to save most states have the same names, and tensors of the same kinds and sizes. Then the file of the state
# before needs another pickle, of the same length, and that pickle's checksum. This module pickles the state itself, as
# torch does, but takes what torch says of a tensor from the state before, which is most of the work.
#
# Nothing is taken for granted. A file serves as template only if torch has put into it, bit by bit, the pickle that is
# made here of the same state. A pickle of another length, storages of other sizes, and every state that holds a tensor
# of an unusual kind are laid out by torch, and so is a state that torch refuses to save: torch raises its own error.
#
# Of the template one thing stays behind: torch's own `serialization_id`, which no reader uses.


logger = logging.getLogger(__name__)

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_CENTRAL = b"PK\x01\x02"
_CRC = struct.Struct("<I")


class _Unusual(Exception):
    """The state holds a tensor, or its file has a form, that this module does not know in every detail."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stands for a storage in what torch says of a tensor; `persistent_id` is what the pickle says of it."""

    persistent_id: tuple[Any, ...]


_Reduced = tuple[Hashable, Any]
"""All of a tensor that the pickle depends on, and what the pickler makes of it."""


@cache
def _key(number: int) -> str:
    """Always the same object, which a pickle refers to when it comes again."""
    return str(number)


class _StatePickler(Pickler):
    """Pickles one state. `reduced` is that of the tensors of the state before, by order of appearance."""

    def __init__(self, buffer: io.BytesIO, reduced: list[_Reduced]) -> None:
        super().__init__(buffer, protocol=DEFAULT_PROTOCOL)
        self.reduced: list[_Reduced] = []
        self.storages: list[torch.UntypedStorage] = []
        self._before = reduced
        self._numbers: dict[int, int] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        """By the address of a storage's bytes."""

    def persistent_id(self, one: Any) -> Any:
        return one.persistent_id if type(one) is _Reference else None

    def reducer_override(self, one: Any) -> Any:
        kind = type(one)
        if kind is torch.Tensor:
            return self._reduce(one)
        if kind is OrderedDict and not one and not one.__dict__:
            return OrderedDict, ()  # the hooks of every tensor: the usual way takes ten times as long
        if kind is not torch.nn.Parameter and isinstance(
            one, torch.Tensor | torch.TypedStorage | torch.UntypedStorage
        ):
            raise _Unusual(kind.__name__)
        return NotImplemented

    def _reduce(self, tensor: torch.Tensor) -> Any:
        """Raises _Unusual."""
        if (
            tensor.__dict__
            or tensor.layout != torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor._is_zerotensor()
        ):
            raise _Unusual(f"a tensor of {tensor.dtype} and {tensor.layout} on {tensor.device}")
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(id(storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)  # which also keeps its id from being another's
        # torch refuses a second dtype, which a load would lose. It compares addresses, which two storages may share.
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, tensor.dtype) != tensor.dtype:
            raise _Unusual("tensors of several dtypes view the same bytes")
        form = (
            tensor.dtype,
            tensor.device,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.requires_grad,
            number,
            storage.nbytes(),
        )
        index = len(self.reduced)
        if index < len(self._before) and self._before[index][0] == form:
            self.reduced.append(self._before[index])
        else:
            self.reduced.append((form, self._reduced_by_torch(tensor, number)))
        return self.reduced[index][1]

    def _reduced_by_torch(self, tensor: Any, number: int) -> Any:
        rebuild, (storage, *rest) = tensor.__reduce_ex__(DEFAULT_PROTOCOL)
        if not isinstance(storage, torch.TypedStorage):
            raise _Unusual(f"a tensor of {tensor.dtype}")
        kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]
        location = location_tag(tensor.untyped_storage())
        length = storage._size()  # type: ignore[no-untyped-call]
        return rebuild, (_Reference(("storage", kind, _key(number), location, length)), *rest)


@dataclass(frozen=True, slots=True)
class _Template:
    """The file of a state; all places are offsets in it."""

    size: int
    written: list[tuple[int, bytearray]]
    storages: list[int]
    lengths: list[int]
    """Of all storages, those without bytes included: they have a place in the archive's directory."""
    pickle: slice
    sums: tuple[int, int]
    """Where the pickle's checksum stands: behind it, and in the directory at the end of the archive."""

    def fits(self, pickled: memoryview, storages: list[torch.UntypedStorage]) -> bool:
        return len(pickled) == self.pickle.stop - self.pickle.start and self.lengths == [
            storage.nbytes() for storage in storages
        ]

    def layout_of(self, pickled: memoryview, storages: list[torch.UntypedStorage]) -> Layout:
        written = list(self.written)
        # The first and the last stretch, which are one where there is no tensor: others are the same in each file.
        for index in {0, len(written) - 1}:
            offset, stretch = written[index]
            written[index] = offset, bytearray(stretch)
        (_, head), (last, tail) = written[0], written[-1]
        head[self.pickle] = pickled
        crc = zlib.crc32(pickled)
        _CRC.pack_into(head, self.sums[0], crc)
        _CRC.pack_into(tail, self.sums[1] - last, crc)
        filled = [storage for storage in storages if storage.nbytes()]
        return Layout(self.size, written, list(zip(self.storages, filled, strict=True)))


def _learn(layout: Layout, pickled: memoryview, storages: list[torch.UntypedStorage]) -> _Template:
    """From the file of a state that is pickled so. Raises _Unusual."""
    head = bytes(layout.written[0][1])
    signature, name_length, extra_length = _LOCAL_HEADER.unpack_from(head)
    begin = _LOCAL_HEADER.size + name_length + extra_length
    end = begin + len(pickled)
    crc = _CRC.pack(zlib.crc32(pickled))
    last, tail = layout.written[-1]
    entry = tail.find(_CENTRAL)
    if (
        signature != b"PK\x03\x04"
        or head[begin:end] != pickled
        or head[end : end + 8] != b"PK\x07\x08" + crc
        or entry < 0
        or tail[entry + 16 : entry + 20] != crc
    ):
        raise _Unusual(
            f"torch {torch.__version__} pickles this state, or begins and ends its file, in another way"
        )
    return _Template(
        layout.size,
        layout.written,
        [offset for offset, _ in layout.storages],
        [storage.nbytes() for storage in storages],
        slice(begin, end),
        (end + 4, last + entry + 16),
    )


class LayoutCache:
    """The layouts of one Checkpointer's states, one after the other."""

    def __init__(self) -> None:
        self._reduced: list[_Reduced] = []
        self._template: _Template | None = None
        self._learns = True

    def lay_out(self, payload: Any) -> Layout:
        """As `archive_layout.lay_out`, and raises the same."""
        layout: Layout | None = None
        buffer = io.BytesIO()
        pickler = _StatePickler(buffer, self._reduced)
        try:
            if self._learns:
                pickler.dump(payload)
                pickled = buffer.getbuffer()
                if self._template is None or not self._template.fits(pickled, pickler.storages):
                    layout = lay_out(payload)
                    self._template = _learn(layout, pickled, pickler.storages)
                self._reduced = pickler.reduced
                return layout or self._template.layout_of(pickled, pickler.storages)
        except _Unusual as reason:
            self._learns = False
            logger.info("torch lays out every state: reason=%s", reason)
        return layout or lay_out(payload)
