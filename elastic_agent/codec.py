"""Frozen dataclasses as JSON: the annotation of a field declares what it may hold, and is what reads and writes it.

    @dataclass(frozen=True, slots=True)
    class Held(Checked):
        step: Count | None

    codec: Codec[Held | Kept] = Codec((Held, Kept), version=3, most_bytes=8192)
    codec.encode(Held(120))      {"v": 3, "kind": "held", "step": 120}

Whatever the bytes hold, `decode` returns one of these messages or raises `Invalid`, which names the field. Fields may
be int, float, bool, str, None, Literal, enums, tuples, frozensets of numbers and other dataclasses; `Annotated` with
`Within` or `Text` bounds them. Texts may be any that Python has, those that stand for a path of bytes included.

Standard library only: processes without any other package read with it.
"""

from __future__ import annotations

import enum
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
Reader = Callable[[Any], Any]

_SHOWN_CHARS = 80


class Invalid(ValueError):
    """A value is not of the declared form; the text names the field and what was expected."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path} is {problem}" if path else problem)
        self.problem = problem
        self.path = path

    def within(self, outer: str) -> Invalid:
        """The same as seen from the object, or list, that holds the value as `outer`."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        return Invalid(self.problem, f"{outer}{dot}{self.path}")


@dataclass(frozen=True, slots=True)
class Within:
    """Bounds of a number: `high` included, and `low` unless the number must be `above` it. NaN is outside of all."""

    low: float
    high: float
    above: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Bounds of a text; the whole of it must match `pattern`."""

    most_chars: int
    pattern: re.Pattern[str] | None = None


Count = Annotated[int, Within(0, 2**63 - 1)]
Positive = Annotated[int, Within(1, 2**63 - 1)]
Seconds = Annotated[float, Within(0, 2**31)]


class Checked:
    """Base of dataclasses that refuse what their annotations do not allow, however they are made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raises Invalid."""
        for name, read in _readers(type(self)).items():
            _read_part(kind_of(type(self)) + "." + name, read, getattr(self, name))


class Codec(Generic[_T]):
    """Messages of some kinds. Each travels as one JSON object that names its kind and the version of all."""

    def __init__(self, kinds: tuple[type[_T], ...], version: int, most_bytes: int) -> None:
        self._kinds = {kind_of(kind): kind for kind in kinds}
        self._version = version
        self.most_bytes = most_bytes
        """Of one message."""

    def encode(self, message: _T) -> bytes:
        """One line."""
        head = {"v": self._version, "kind": kind_of(type(message))}
        return json.dumps({**head, **plain(message)}).encode() + b"\n"

    def decode(self, raw: bytes) -> _T:
        """Raises Invalid, never anything else."""
        if len(raw) > self.most_bytes:
            raise Invalid(f"message of {len(raw)} bytes, at most {self.most_bytes} are read")
        body = load_object(raw, "message")
        version, kind = body.pop("v", None), body.pop("kind", None)
        if type(version) is not int or version != self._version:
            raise Invalid(f"message of version {shown(version)}, this process reads {self._version}")
        cls = self._kinds.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise Invalid(f"message of kind {shown(kind)}, expected one of {', '.join(self._kinds)}")
        return from_plain(cls, body)


def load_object(raw: bytes | str, what: str) -> dict[str, Any]:
    """Raises Invalid."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{what} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Invalid(f"{what} is a JSON {type(body).__name__}, expected an object")
    return body


def from_plain(cls: type[_T], body: Mapping[str, Any]) -> _T:
    """The dataclass whose fields `body` holds, all of them and no others. Raises Invalid."""
    readers, kind = _readers(cls), kind_of(cls)
    if body.keys() != readers.keys():
        missing, unknown = sorted(readers.keys() - body.keys()), sorted(body.keys() - readers.keys())
        raise Invalid(f"{kind}: missing fields {shown(missing)}, unknown ones {shown(unknown)}")
    return cls(**{name: _read_part(f"{kind}.{name}", read, body[name]) for name, read in readers.items()})


def plain(value: Any) -> Any:
    """What json writes of it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def kind_of(cls: type) -> str:
    """SaveReport is a "save_report"."""
    return _with_underscores(cls.__name__)


@cache
def _with_underscores(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


_known_readers: dict[type, dict[str, Reader]] = {}


def _readers(cls: type) -> dict[str, Reader]:
    """By field."""
    if cls not in _known_readers:
        hints = get_type_hints(cls, include_extras=True)
        _known_readers[cls] = {field.name: _reader(hints[field.name]) for field in fields(cls)}
    return _known_readers[cls]


def _read_part(path: str, read: Reader, raw: Any) -> Any:
    try:
        return read(raw)
    except Invalid as error:
        raise error.within(path) from None


def _reader(hint: Any) -> Reader:
    """Of what JSON makes of a value, or of the value itself."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        hint, bound = parts[:2]
        return _text(bound) if isinstance(bound, Text) else _number(hint, bound)
    if hint is str:
        return _text(Text(2**31))
    if hint is bool:
        return _one_of({True: True, False: False})
    if origin is Literal:
        return _one_of({choice: choice for choice in parts})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of({choice.value: choice for choice in hint} | {choice: choice for choice in hint})
    if origin is frozenset:
        read_all = _many(_reader(parts[0]))
        return lambda raw: raw if isinstance(raw, frozenset) else frozenset(read_all(raw))
    if origin is tuple:
        return _many(_reader(parts[0])) if parts[1:] == (...,) else _row(tuple(map(_reader, parts)))
    if origin in (Union, types.UnionType) and len(parts) == 2 and parts[1] is type(None):
        read = _reader(parts[0])
        return lambda raw: None if raw is None else read(raw)
    if isinstance(hint, type) and is_dataclass(hint):
        return _object(hint)
    raise TypeError(f"no reader for {hint}: bound a number by Within")


def _number(kind: type, bound: Within) -> Reader:
    low, high, above = bound.low, bound.high, bound.above
    # bool is an int to isinstance, and numpy's integers do not go through JSON.
    accepted = (int,) if kind is int else (int, float)
    what = "a whole number" if kind is int else "a number"

    def read(raw: Any) -> Any:
        if type(raw) not in accepted or not low <= raw <= high or (above and raw == low):
            raise Invalid(f"{shown(raw)}, expected {what} {'above' if above else 'from'} {low} to {high}")
        return raw

    return read


def _text(bound: Text) -> Reader:
    most, pattern = bound.most_chars, bound.pattern
    form = f" of the form {pattern.pattern}" if pattern is not None else ""

    def read(raw: Any) -> str:
        if not isinstance(raw, str) or len(raw) > most or (pattern and not pattern.fullmatch(raw)):
            raise Invalid(f"{shown(raw)}, expected a text of at most {most} characters{form}")
        return raw

    return read


def _one_of(choices: Mapping[Any, Any]) -> Reader:
    known = ", ".join(dict.fromkeys(repr(plain(choice)) for choice in choices))

    def read(raw: Any) -> Any:
        for choice, value in choices.items():  # 1 is True to a dict
            if type(raw) is type(choice) and raw == choice:
                return value
        raise Invalid(f"{shown(raw)}, expected one of {known}")

    return read


def _many(read: Reader) -> Reader:
    def items(raw: Any) -> tuple[Any, ...]:
        if not isinstance(raw, list | tuple):
            raise Invalid(f"{shown(raw)}, expected a list")
        return tuple(_read_part(f"[{place}]", read, item) for place, item in enumerate(raw))

    return items


def _row(reads: tuple[Reader, ...]) -> Reader:
    def row(raw: Any) -> tuple[Any, ...]:
        if not isinstance(raw, list | tuple) or len(raw) != len(reads):
            raise Invalid(f"{shown(raw)}, expected a list of {len(reads)}")
        return tuple(_read_part(f"[{place}]", read, raw[place]) for place, read in enumerate(reads))

    return row


def _object(cls: type) -> Reader:
    def read(raw: Any) -> Any:
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, dict):
            raise Invalid(f"{shown(raw)}, expected an object")
        return from_plain(cls, raw)

    return read
