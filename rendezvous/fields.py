"""Typed access to a JSON object that somebody else wrote: a record in the store, a page of another agent.

Whatever it holds, reading it either gives values of the expected type, size and range, or raises `RecordInvalid`,
which names the key and the field.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from ..codec import Invalid, Text, Within, from_plain
from .errors import RecordInvalid

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Of a node, a job or an incarnation."""
Name = Annotated[str, Text(128, NAME)]
Age = Annotated[float, Within(0, 2**63 - 1)]
"""Seconds."""

SHOWN = 8
"""Of many names, so many."""

_TERMINAL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, and movements of the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, links, the clipboard
    r"|\x1b[ -/]*[0-~]",
    re.DOTALL,
)
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")

_T = TypeVar("_T")
_E = TypeVar("_E", bound=enum.Enum)


def clean(text: str) -> str:
    """One line without what a terminal obeys: it will stand in the logs of all nodes.

    >>> clean("killed\\n12:00:00 [a] all is well\\x1b]0;title\\x07 \\x1b[31mred")
    'killed 12:00:00 [a] all is well red'
    """
    if text.isprintable():
        return text
    return _HIDDEN.sub(" ", _TERMINAL.sub("", text))


def line(most_chars: int) -> Text:
    """The bounds of a text of a peer, which is read as `clean` makes it."""
    return Text(most_chars, clean=clean)


def shortened(names: Iterable[str], separator: str = ", ") -> str:
    """The first few: a sentence is for people, and a record must stay small enough to be read.

    >>> shortened(map(str, range(10)))
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    known = list(names)
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return separator.join(known[:SHOWN]) + more


class Fields:
    """`key` and `path` say where the object was found, for those who have to look at it."""

    def __init__(self, key: str, values: dict[str, Any], path: str = "") -> None:
        self._key = key
        self._values = values
        self._path = path

    @classmethod
    def of_text(cls, key: str, text: str, schema: int, at_most: int) -> Fields:
        """`text` is a JSON object of that schema, of at most so many characters."""
        if len(text) > at_most:
            raise RecordInvalid(key, f"{len(text)} characters, more than {at_most}")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordInvalid(key, f"not JSON ({error})") from error
        if not isinstance(values, dict):
            raise RecordInvalid(key, "not a JSON object")
        version = values.get("v")
        if type(version) is not int or version != schema:
            raise RecordInvalid(key, f"schema version {version!r}, this agent reads {schema}")
        return cls(key, values)

    def declared(self, kind: type[_T]) -> _T:
        """As the annotations of `kind` say. Raises RecordInvalid."""
        try:
            return from_plain(kind, {name: value for name, value in self._values.items() if name != "v"})
        except Invalid as error:
            raise RecordInvalid(self._key, f"field {self._path!r}: {error}") from error

    def value(self, name: str) -> Any:
        if name not in self._values:
            raise self.bad(name, "missing")
        return self._values[name]

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, at_most: int) -> str:
        """As it may be shown: see `clean`."""
        value = self.value(name)
        if not isinstance(value, str) or len(value) > at_most:
            raise self.bad(name, f"not a text of at most {at_most} characters")
        return clean(value)

    def name(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise self.bad(name, "not a name of letters, digits, '.', '_' and '-'")
        return value

    def integer(self, name: str, low: int = 0, high: int = 2**63 - 1) -> int:
        value = self.value(name)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(name, f"not a whole number from {low} to {high}")
        return value

    def integer_or_none(self, name: str, low: int = 0, high: int = 2**63 - 1) -> int | None:
        return None if self.value(name) is None else self.integer(name, low, high)

    def age(self, name: str) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 <= value < 2**63:
            raise self.bad(name, "not an age in seconds")
        return float(value)

    def duration(self, name: str) -> float:
        seconds = self.age(name)
        if seconds is None:
            raise self.bad(name, "not a duration in seconds")
        return seconds

    def boolean(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.bad(name, "neither true nor false")
        return value

    def choice(self, name: str, kind: type[_E]) -> _E:
        try:
            return kind(self.value(name))
        except ValueError as error:
            known = ", ".join(repr(item.value) for item in kind)
            raise self.bad(name, f"not one of {known}") from error

    def one(self, name: str, read: Callable[[Fields], _T]) -> _T:
        value = self.value(name)
        if not isinstance(value, dict):
            raise self.bad(name, "not an object")
        return read(Fields(self._key, value, f"{self._path}{name}."))

    def optional(self, name: str, read: Callable[[Fields], _T]) -> _T | None:
        return None if self.value(name) is None else self.one(name, read)

    def many(self, name: str, read: Callable[[Fields], _T]) -> tuple[_T, ...]:
        values = self.value(name)
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.bad(name, "not a list of objects")
        return tuple(
            read(Fields(self._key, value, f"{self._path}{name}[{place}]."))
            for place, value in enumerate(values)
        )

    def texts(self, name: str, most: int, at_most: int) -> tuple[str, ...]:
        """Up to `most` texts of `at_most` characters."""
        value: Any = self.value(name)
        texts = isinstance(value, list) and all(
            isinstance(text, str) and len(text) <= at_most for text in value
        )
        if not texts or len(value) > most:
            raise self.bad(name, f"not a list of at most {most} texts of at most {at_most} characters")
        return tuple(map(clean, value))

    def rows(self, name: str) -> list[list[Any]]:
        value: Any = self.value(name)
        if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
            raise self.bad(name, "not a list of lists")
        return value

    def bad(self, name: str, problem: str) -> RecordInvalid:
        return RecordInvalid(self._key, f"field {self._path + name!r} is {problem}")
