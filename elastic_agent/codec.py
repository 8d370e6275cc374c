"""Frozen dataclasses as JSON: the annotation of a field declares what it may hold, and is what reads and writes it.

    @dataclass(frozen=True, slots=True)
    class Held(Checked):
        step: Count | None

    codec: Codec[Held | Kept] = Codec((Held, Kept), version=3, most_bytes=8192)
    codec.encode(Held(120))      {"v": 3, "kind": "held", "step": 120}

    RECORD = Document(World, version=7, most_chars=2**20)
    RECORD.encode(world)         {"v":7,"job":"digits", ...}

Whatever is read, `decode` returns one of these objects or raises `Invalid`, which names the field. Fields may be int,
float, bool, str, None, Literal, enums, tuples, dicts, frozensets of numbers or enums, other dataclasses, and one of
several dataclasses that differ in their fields. `Annotated` with `Within`, `Text` or `AtMost` bounds a field; with a
function, that function reads it. Texts may be any that Python has, those that stand for a path of bytes included.

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
_WRITTEN_AS_THEY_ARE = frozenset({str, int, float, bool, type(None)})


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
    """Bounds of a text; the whole of it must match `pattern`. `clean` makes of it what the reader gets."""

    most_chars: int
    pattern: re.Pattern[str] | None = None
    clean: Callable[[str], str] | None = None


@dataclass(frozen=True, slots=True)
class AtMost:
    """Bound of the number of items in a list."""

    items: int


Count = Annotated[int, Within(0, 2**63 - 1)]
Positive = Annotated[int, Within(1, 2**63 - 1)]
Seconds = Annotated[float, Within(0, 2**31)]


class Checked:
    """Base of dataclasses that refuse what their annotations do not allow, however they are made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raises Invalid."""
        for name, read in _readers(type(self)).items():
            _read_part(f"{kind_of(type(self))}.{name}", read, getattr(self, name))


class Row:
    """Base of dataclasses that are written as a list, or a text. The field that holds them declares the function that
    reads it."""

    __slots__ = ()

    @property
    def row(self) -> tuple[Any, ...] | str:
        raise NotImplementedError


class Codec(Generic[_T]):
    """Messages of some kinds. Each travels as one JSON object that names its kind and the version of all."""

    def __init__(self, kinds: tuple[type[_T], ...], version: int, most_bytes: int) -> None:
        self._kinds = {kind_of(kind): kind for kind in kinds}
        self._version = version
        self.most_bytes = most_bytes
        """Of one message."""

    def prepare(self) -> None:
        """Read all annotations now: later `sys.modules` may lack the modules whose names they use."""
        for kind in self._kinds.values():
            _readers(kind)

    def encode(self, message: _T) -> bytes:
        """One line."""
        return json.dumps(self.pack(message)).encode() + b"\n"

    def decode(self, raw: bytes) -> _T:
        """Raises Invalid, never anything else."""
        return self.unpack(self.load(raw))

    def pack(self, message: _T) -> dict[str, Any]:
        """The object, for those who put more into it."""
        return {"v": self._version, "kind": kind_of(type(message)), **plain(message)}

    def load(self, raw: bytes) -> dict[str, Any]:
        """The object, of any version and kind. Raises Invalid."""
        if len(raw) > self.most_bytes:
            raise Invalid(f"message of {len(raw)} bytes, at most {self.most_bytes} are read")
        return load_object(raw, "message")

    def unpack(self, body: dict[str, Any]) -> _T:
        """The message, when what was put in besides has been taken out. Raises Invalid."""
        _take_version(body, "message", self._version)
        kind = body.pop("kind", None)
        cls = self._kinds.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise Invalid(f"message of kind {shown(kind)}, expected one of {', '.join(self._kinds)}")
        return from_plain(cls, body)


class Document(Generic[_T]):
    """Texts that each hold one object of one kind, with its version. Fields that are not declared are ignored."""

    def __init__(self, kind: type[_T], version: int, most_chars: int, version_key: str = "v") -> None:
        """`version_key`: of the version in the object. `schema` is its name in forms that other programs read."""
        self._kind = kind
        self._version = version
        self._version_key = version_key
        self.most_chars = most_chars

    def encode(self, value: _T) -> str:
        return json.dumps({self._version_key: self._version, **plain(value)}, separators=(",", ":"))

    def decode(self, text: str) -> _T:
        """Raises Invalid, never anything else."""
        if len(text) > self.most_chars:
            raise Invalid(f"text of {len(text)} characters, at most {self.most_chars} are read")
        body = load_object(text, "text")
        _take_version(body, "text", self._version, self._version_key)
        return _made(self._kind, body, strict=False)


def _take_version(body: dict[str, Any], what: str, expected: int, key: str = "v") -> None:
    version = body.pop(key, None)
    if type(version) is not int or version != expected:
        raise Invalid(f"{what} of version {shown(version)}, this process reads {expected}")


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
    try:
        return _made(cls, body, strict=True)
    except Invalid as error:
        raise error.within(kind_of(cls)) from None


def _made(cls: type[_T], body: Mapping[str, Any], *, strict: bool) -> _T:
    """`strict`: a field that is not declared is refused."""
    readers = _readers(cls, strict)
    if body.keys() != readers.keys():
        if missing := [name for name in readers if name not in body]:
            raise Invalid("missing", missing[0])
        if strict:
            raise Invalid("not a field that is known", min(body.keys() - readers.keys()))
    values: dict[str, Any] = {}
    name = ""
    try:
        for name, read in readers.items():
            values[name] = read(body[name])
    except Invalid as error:
        raise error.within(name) from None
    return cls(**values)


def plain(value: Any) -> Any:
    """What json writes of it."""
    if type(value) in _WRITTEN_AS_THEY_ARE:
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(map(plain, value))
    if isinstance(value, Row):
        return value.row
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
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


_known_readers: dict[tuple[type, bool], dict[str, Reader]] = {}


def _readers(cls: type, strict: bool = True) -> dict[str, Reader]:
    """By field."""
    if (cls, strict) not in _known_readers:
        hints = get_type_hints(cls, include_extras=True)
        _known_readers[cls, strict] = {one.name: _reader(hints[one.name], strict) for one in fields(cls)}
    return _known_readers[cls, strict]


def _read_part(path: str, read: Reader, raw: Any) -> Any:
    try:
        return read(raw)
    except Invalid as error:
        raise error.within(path) from None


def _reader(hint: Any, strict: bool, most: int | None = None) -> Reader:
    """Of what JSON makes of a value, or of the value itself. `most`: items of a list."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        hint, bound = parts[:2]
        if callable(bound):
            own: Reader = bound
            return own
        if isinstance(bound, AtMost):
            return _reader(hint, strict, bound.items)
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
        read_all = _many(_reader(parts[0], strict), most)
        return lambda raw: raw if isinstance(raw, frozenset) else frozenset(read_all(raw))
    if origin is dict:
        return _mapping(*(_reader(part, strict) for part in parts))
    if origin is tuple:
        each = [_reader(part, strict) for part in parts if part is not ...]
        return _many(each[0], most) if parts[1:] == (...,) else _row(tuple(each))
    if origin in (Union, types.UnionType):
        some = tuple(part for part in parts if part is not type(None))
        read = _reader(some[0], strict) if len(some) == 1 else _object(some, strict)
        return read if some == parts else lambda raw: None if raw is None else read(raw)
    if isinstance(hint, type) and is_dataclass(hint):
        return _object((hint,), strict)
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
    most, pattern, clean = bound.most_chars, bound.pattern, bound.clean
    form = f" of the form {pattern.pattern}" if pattern is not None else ""

    def read(raw: Any) -> str:
        if not isinstance(raw, str) or len(raw) > most or (pattern and not pattern.fullmatch(raw)):
            raise Invalid(f"{shown(raw)}, expected a text of at most {most} characters{form}")
        return raw if clean is None else clean(raw)

    return read


def _one_of(choices: Mapping[Any, Any]) -> Reader:
    known = ", ".join(dict.fromkeys(repr(plain(choice)) for choice in choices))

    def read(raw: Any) -> Any:
        for choice, value in choices.items():  # 1 is True to a dict
            if type(raw) is type(choice) and raw == choice:
                return value
        raise Invalid(f"{shown(raw)}, expected one of {known}")

    return read


def _many(read: Reader, most: int | None) -> Reader:
    def items(raw: Any) -> tuple[Any, ...]:
        if not isinstance(raw, list | tuple):
            raise Invalid(f"{shown(raw)}, expected a list")
        if most is not None and len(raw) > most:
            raise Invalid(f"a list of {len(raw)}, expected at most {most}")
        done: list[Any] = []
        try:
            for item in raw:
                done.append(read(item))
        except Invalid as error:
            raise error.within(f"[{len(done)}]") from None
        return tuple(done)

    return items


def _row(reads: tuple[Reader, ...]) -> Reader:
    def row(raw: Any) -> tuple[Any, ...]:
        if not isinstance(raw, list | tuple) or len(raw) != len(reads):
            raise Invalid(f"{shown(raw)}, expected a list of {len(reads)}")
        return tuple(_read_part(f"[{place}]", read, raw[place]) for place, read in enumerate(reads))

    return row


def _mapping(read_key: Reader, read: Reader) -> Reader:
    def mapping(raw: Any) -> dict[str, Any]:
        if not isinstance(raw, dict):
            raise Invalid(f"{shown(raw)}, expected an object")
        return {read_key(key): _read_part(f"[{shown(key)}]", read, item) for key, item in raw.items()}

    return mapping


def _object(classes: tuple[type, ...], strict: bool) -> Reader:
    """Of several classes it is the one with most fields of which all are there."""

    def read(raw: Any) -> Any:
        if isinstance(raw, classes):
            return raw
        if not isinstance(raw, dict):
            raise Invalid(f"{shown(raw)}, expected an object")
        cls = classes[0]
        if len(classes) > 1:
            fit = (one for one in classes if _readers(one).keys() <= raw.keys())
            cls = max(fit, key=lambda one: len(_readers(one)), default=cls)
        return _made(cls, raw, strict=strict)

    return read
