"""Reads pickles that hold nothing but numbers, texts, lists, tuples and dicts, as torch writes its flight records.

A pickle is a program. Here only those of its instructions exist that make such values: none imports, calls or builds
anything else, and a pickle that has another one is refused. So is one that is too long, or takes too long, for it comes
from a worker. Values may be shared, and may contain themselves: whoever looks at them goes to known places only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ....codec import Invalid

MOST_BYTES = 16 * 2**20
MOST_STEPS = 2_000_000
"""Instructions. torch needs 70 for one operation that it has recorded."""
_AT_ONCE = 20_000
"""Between two looks at the clock."""
_LONG_BYTES = 16
"""Of an integer."""


class _Reader:
    """One pickle that is read. `stack` holds what is made since the newest mark, `marked` what was there before."""

    __slots__ = ("at", "data", "marked", "memo", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def take(self, size: int) -> bytes:
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise Invalid("a pickle that is cut")
        return self.data[begin : self.at]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def since_mark(self) -> list[Any]:
        made, self.stack = self.stack, self.marked.pop()
        return made


_U1, _U2, _I4, _U4, _F8 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", ">d"))


def _mark(reader: _Reader) -> None:
    reader.marked.append(reader.stack)
    reader.stack = []


def _protocol(reader: _Reader) -> None:
    if (version := reader.byte()) != 2:
        raise Invalid(f"a pickle of protocol {version}, expected 2")


def _constant(value: object) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(value)


def _new(kind: type) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(kind())


def _number(form: struct.Struct) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(reader.number(form))


def _long(reader: _Reader) -> None:
    size = reader.byte()
    if size > _LONG_BYTES:
        raise Invalid(f"an integer of {size} bytes")
    reader.stack.append(int.from_bytes(reader.take(size), "little", signed=True))


def _text(reader: _Reader) -> None:
    reader.stack.append(reader.take(reader.number(_U4)).decode("utf-8", "replace"))


def _put(form: struct.Struct) -> Callable[[_Reader], None]:
    def put(reader: _Reader) -> None:
        reader.memo[reader.number(form)] = reader.stack[-1]

    return put


def _get_short(reader: _Reader) -> None:
    reader.stack.append(reader.memo[reader.byte()])


def _get(reader: _Reader) -> None:
    reader.stack.append(reader.memo[reader.number(_U4)])


def _append(reader: _Reader) -> None:
    value = reader.stack.pop()
    _list(reader).append(value)


def _appends(reader: _Reader) -> None:
    made = reader.since_mark()
    _list(reader).extend(made)


def _list(reader: _Reader) -> list[Any]:
    found = reader.stack[-1]
    if type(found) is not list:
        raise Invalid("a pickle that appends to what is no list")
    return found


def _set_items(reader: _Reader, items: list[Any]) -> None:
    found = reader.stack[-1]
    if type(found) is not dict or len(items) % 2:
        raise Invalid("a pickle that sets an item of what is no dict")
    # A tuple may be so deep that its hash ends the process, and integers can be chosen so that all have one hash: then
    # this one instruction takes hours, and no other thread of the agent runs meanwhile.
    if any(type(key) is not str for key in items[::2]):
        raise Invalid("a pickle with a key that is no text")
    found.update(zip(items[::2], items[1::2], strict=True))


def _items(reader: _Reader) -> None:
    _set_items(reader, reader.since_mark())


def _item(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _set_items(reader, [key, value])


def _tuple(size: int) -> Callable[[_Reader], None]:
    def make(reader: _Reader) -> None:
        made = tuple(reader.stack.pop() for _ in range(size))
        reader.stack.append(made[::-1])

    return make


def _tuple_since_mark(reader: _Reader) -> None:
    made = reader.since_mark()
    reader.stack.append(tuple(made))


_STOP = ord(".")

_INSTRUCTIONS: dict[int, Callable[[_Reader], None]] = {
    0x80: _protocol,
    ord("("): _mark,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("K"): _number(_U1),
    ord("M"): _number(_U2),
    ord("J"): _number(_I4),
    ord("G"): _number(_F8),
    0x8A: _long,
    ord("X"): _text,
    ord("]"): _new(list),
    ord("}"): _new(dict),
    ord(")"): _constant(()),
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _item,
    ord("u"): _items,
    ord("t"): _tuple_since_mark,
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("q"): _put(_U1),
    ord("r"): _put(_U4),
    ord("h"): _get_short,
    ord("j"): _get,
}


def read(data: bytes, until: float, clock: Callable[[], float]) -> Any:
    """The value. Raises Invalid, never anything else; also when it is not there by the instant `until`."""
    if len(data) > MOST_BYTES:
        raise Invalid(f"a pickle of {len(data)} bytes, at most {MOST_BYTES} are read")
    reader = _Reader(data)
    try:
        for _ in range(0, MOST_STEPS, _AT_ONCE):
            if clock() >= until:
                raise Invalid("a pickle that was not read in time")
            if _run(reader):
                return _only(reader)
    except (IndexError, KeyError) as error:  # of the stack, the data, the memo
        raise Invalid(f"a pickle that is not well-formed: {error}") from error
    raise Invalid(f"a pickle of more than {MOST_STEPS} instructions")


def _run(reader: _Reader) -> bool:
    """Some of it. Whether it has come to its end."""
    for _ in range(_AT_ONCE):
        code = reader.byte()
        instruction = _INSTRUCTIONS.get(code)
        if instruction is None:
            if code == _STOP:
                return True
            raise Invalid(f"a pickle with instruction {code:#04x}, which makes more than plain values")
        instruction(reader)
    return False


def _only(reader: _Reader) -> Any:
    if reader.at != len(reader.data) or reader.marked or len(reader.stack) != 1:
        raise Invalid("a pickle that does not end with one value")
    return reader.stack[0]
