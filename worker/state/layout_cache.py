"""Laying out one state after another: what is as it was the last time is not pickled anew.

From save to save most states keep their *form*: the same names in the same order, tensors of the same kinds and sizes
that share the same memory. What changes is the tensors' contents, which no layout holds, and a few numbers: steps,
learning rates, positions. So when a state has the form of the two before it, its file is theirs with the numbers
overwritten, each in the very bytes that it took, and the checksum of the pickle computed again.

Nothing is taken for granted. A number that needs more bytes than before, and all that is no number, is part of the
form. Where in the pickle each number stands is read from a pickle of that form, which must hold the expected numbers in
the expected order and no others: its opcodes are listed (`pickletools`), none is carried out. Whatever is not known
here in every detail is laid out by torch, each time.

Of the whole file one thing stays behind: torch's own `serialization_id`, which no reader uses.
"""

from __future__ import annotations

import enum
import logging
import pickletools
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .archive_layout import Layout, lay_out

logger = logging.getLogger(__name__)

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_CENTRAL = b"PK\x01\x02"
_LONG = b"\x8a"
_CRC = struct.Struct("<I")


class _Width(enum.Enum):
    """How a number is pickled: the opcode and what follows."""

    BYTE = struct.Struct("<cB"), b"K"
    SHORT = struct.Struct("<cH"), b"M"
    INT = struct.Struct("<ci"), b"J"
    FLOAT = struct.Struct(">cd"), b"G"

    def __init__(self, packing: struct.Struct, opcode: bytes) -> None:
        self.packing = packing
        self.opcode = opcode


@dataclass(frozen=True, slots=True)
class _Large:
    """A number that does not fit into any of these."""

    value: int


_NUMBER_OPCODES = frozenset(
    {"BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "LONG4", "INT", "LONG", "FLOAT"}
)
_CONSTANTS = frozenset({str, bytes, bool, type(None), torch.dtype})


class _Unknown(Exception):
    """There is something in the state, or in its pickle, that this file does not know in every detail."""


class _Tensor(NamedTuple):
    """What of a tensor is in the file besides its bytes; `storage` and `memory` are numbers of first appearance."""

    kind: type
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    storage: int
    memory: int
    nbytes: int

    def numbers(self) -> tuple[int, ...]:
        return (self.nbytes // self.dtype.itemsize, self.offset, *self.shape, *self.stride)


@dataclass(slots=True)
class _State:
    """A state, taken apart in the order in which it is pickled."""

    form: list[object] = field(default_factory=list)
    """Two states with equal forms have the same pickle but for their numbers, and the same storages but for bytes."""
    numbers: list[int | float] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)
    _storages: dict[int, int] = field(default_factory=dict)
    _memory: dict[int, int] = field(default_factory=dict)

    def take(self, value: Any) -> None:
        """Raises _Unknown."""
        kind = type(value)
        if kind is int or kind is float:
            self._take_number(value)
            return
        self.form.append(kind)
        if kind in _CONSTANTS:
            self.form.append(value)
            return
        # What appears once more is pickled as a reference.
        before = len(self._seen)
        number = self._seen.setdefault(id(value), before)
        self.form.append(number)
        if number < before:
            return
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self._take_tensor(value)
        elif kind is dict or kind is OrderedDict:
            self.form.append(len(value))
            for key, item in value.items():
                self.take(key)
                self.take(item)
            if kind is OrderedDict:
                self._take_attributes(value)
        elif kind is list or kind is tuple:
            self.form.append(len(value))
            for item in value:
                self.take(item)
        else:
            raise _Unknown(f"a {kind.__name__} in the state")

    def _take_number(self, value: int | float) -> None:
        width = _width(value)
        if width is None:
            self.form.append(_Large(int(value)))
        else:
            self.form.append(width)
            self.numbers.append(value)

    def _take_attributes(self, value: OrderedDict[Any, Any]) -> None:
        """Such as the `_metadata` of a module's state."""
        attributes = vars(value)
        self.form.append(len(attributes))
        for name, attribute in attributes.items():
            self.take(name)
            self.take(attribute)

    def _take_tensor(self, tensor: torch.Tensor) -> None:
        if (
            tensor.__dict__
            or tensor.layout != torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            raise _Unknown("an unusual tensor in the state")
        storage = tensor.untyped_storage()
        index = self._storages.setdefault(id(storage), len(self._storages))
        if index == len(self.storages):
            self.storages.append(storage)  # which also keeps its id from being another's
        self.form.append(
            _Tensor(
                type(tensor),
                tensor.dtype,
                tensor.device,
                tensor.shape,
                tensor.stride(),
                int(tensor.storage_offset()),
                tensor.requires_grad,
                index,
                self._memory.setdefault(storage.data_ptr(), len(self._memory)),
                storage.nbytes(),
            )
        )


def _width(value: int | float) -> _Width | None:
    if type(value) is float:
        return _Width.FLOAT
    if 0 <= value < 1 << 8:
        return _Width.BYTE
    if 0 <= value < 1 << 16:
        return _Width.SHORT
    return _Width.INT if -(1 << 31) <= value < 1 << 31 else None


def _pickled(value: int | float) -> bytes:
    """Raises _Unknown."""
    width = _width(value)
    if width is not None:
        return width.packing.pack(width.opcode, value)
    whole = int(value)
    # In two's complement, and no byte more than that takes.
    size = (whole if whole >= 0 else ~whole).bit_length() // 8 + 1
    if size >= 1 << 8:
        raise _Unknown("a number of thousands of bits in the state")
    return _LONG + bytes([size]) + whole.to_bytes(size, "little", signed=True)


@dataclass(frozen=True, slots=True)
class _Template:
    """The file of all states of one form; all places are offsets in it."""

    form: list[object]
    size: int
    written: list[tuple[int, bytearray]]
    storages: list[int]
    pickle: slice
    numbers: list[tuple[_Width, int]]
    sums: tuple[int, int]
    """Where the pickle's checksum stands: behind it, and in the directory at the end of the archive."""

    def layout_of(self, state: _State) -> Layout:
        written = list(self.written)
        # The first and the last stretch, which are one where there is no tensor: others are the same in each file.
        for index in {0, len(written) - 1}:
            offset, stretch = written[index]
            written[index] = offset, bytearray(stretch)
        (_, head), (last, tail) = written[0], written[-1]
        for (width, place), number in zip(self.numbers, state.numbers, strict=True):
            width.packing.pack_into(head, place, width.opcode, number)
        crc = zlib.crc32(memoryview(head)[self.pickle])
        _CRC.pack_into(head, self.sums[0], crc)
        _CRC.pack_into(tail, self.sums[1] - last, crc)
        filled = [storage for storage in state.storages if storage.nbytes()]
        return Layout(self.size, written, list(zip(self.storages, filled, strict=True)))


def _learn(state: _State, layout: Layout) -> _Template:
    """From the file of a state. Raises _Unknown."""
    head = bytes(layout.written[0][1])
    signature, name_length, extra_length = _LOCAL_HEADER.unpack_from(head)
    begin = _LOCAL_HEADER.size + name_length + extra_length
    found, end = [], begin
    for opcode, _, place in pickletools.genops(head[begin:]):
        end = begin + (place or 0) + 1
        if opcode.name in _NUMBER_OPCODES:
            found.append(begin + (place or 0))
    expected: list[tuple[int | float, _Width | None]] = []
    numbers = iter(state.numbers)
    for part in state.form:
        if isinstance(part, _Width):
            expected.append((next(numbers), part))
        elif isinstance(part, _Large):
            expected.append((part.value, None))
        elif isinstance(part, _Tensor):
            expected += [(number, None) for number in part.numbers()]
    if len(found) != len(expected) or not all(
        head.startswith(_pickled(number), place) for (number, _), place in zip(expected, found, strict=True)
    ):
        raise _Unknown("other numbers in the pickle than in the state")
    crc = _CRC.pack(zlib.crc32(head[begin:end]))
    last, tail = layout.written[-1]
    entry = tail.find(_CENTRAL)
    if (
        signature != b"PK\x03\x04"
        or head[end : end + 8] != b"PK\x07\x08" + crc
        or entry < 0
        or tail[entry + 16 : entry + 20] != crc
    ):
        raise _Unknown("an archive that begins and ends in an unknown way")
    return _Template(
        state.form,
        layout.size,
        layout.written,
        [offset for offset, _ in layout.storages],
        slice(begin, end),
        [(width, place) for (_, width), place in zip(expected, found, strict=True) if width is not None],
        (end + 4, last + entry + 16),
    )


class LayoutCache:
    """The layouts of one Checkpointer's states, one after the other."""

    def __init__(self) -> None:
        self._form: list[object] | None = None
        """Of the state before; None: not known."""
        self._template: _Template | None = None
        self._learns = True

    def lay_out(self, payload: Any) -> Layout:
        """As `layout.lay_out`, and raises the same."""
        state = _State()
        try:
            state.take(payload)
        except _Unknown:
            return lay_out(payload)
        if self._template is not None and self._template.form == state.form:
            return self._template.layout_of(state)
        layout = lay_out(payload)
        # To learn takes longer than to lay out: only what stays for a while is worth it.
        self._template = None
        if self._learns and self._form == state.form:
            try:
                self._template = _learn(state, layout)
            except _Unknown as reason:
                self._learns = False
                logger.info("every state is laid out anew: reason=%s", reason)
        self._form = state.form
        return layout
