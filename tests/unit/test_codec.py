"""What annotations declare is what is read: one class of each kind of field, and what each refuses with which path."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from elastic_agent.codec import (
    Checked,
    Count,
    Invalid,
    Positive,
    Seconds,
    Text,
    Within,
    from_plain,
    load_object,
    plain,
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    name: Annotated[str, Text(4, re.compile("[a-z]+"))]


@dataclass(frozen=True, slots=True)
class Outer:
    count: Count
    positive: Positive
    below: Annotated[int, Within(-1, 5)]
    seconds: Seconds
    text: str
    truth: bool
    word: Literal["one", "two"]
    number: Literal[1, 2]
    colour: Colour
    maybe: Count | None
    many: tuple[Inner, ...]
    pair: tuple[Count, bool]
    ranks: frozenset[Count]


OUTER = Outer(
    0, 1, -1, 0.5, "any \udcff", True, "one", 2, Colour.BLUE, None, (Inner("ab"), Inner("c")), (3, False),
    frozenset({9, 1}),
)  # fmt: skip


def test_what_is_written_is_read_again() -> None:
    body = plain(OUTER)
    assert body["ranks"] == [1, 9]
    assert body["many"] == [{"name": "ab"}, {"name": "c"}]
    assert from_plain(Outer, load_object(json.dumps(body), "outer")) == OUTER


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": -1}, "outer.count is -1, expected a whole number from 0 to"),
        ({"count": True}, "outer.count is True"),
        ({"positive": 0}, "outer.positive is 0"),
        ({"below": -2}, "outer.below is -2, expected a whole number from -1 to 5"),
        ({"below": 2.0}, "outer.below is 2.0"),
        ({"seconds": float("nan")}, "outer.seconds is nan"),
        ({"seconds": "1"}, "outer.seconds is '1'"),
        ({"text": None}, "outer.text is None"),
        ({"truth": 1}, "outer.truth is 1, expected one of True, False"),
        ({"word": "three"}, "outer.word is 'three', expected one of 'one', 'two'"),
        ({"word": ["one"]}, "outer.word is ['one']"),
        ({"number": True}, "outer.number is True"),
        ({"number": 1.0}, "outer.number is 1.0"),
        ({"colour": "green"}, "outer.colour is 'green', expected one of 'red', 'blue'"),
        ({"colour": {}}, "outer.colour is {}"),
        ({"maybe": -1}, "outer.maybe is -1"),
        ({"many": {}}, "outer.many is {}, expected a list"),
        ({"many": [{"name": "a"}, {"name": "ABC"}]}, "outer.many[1].inner.name is 'ABC'"),
        ({"many": [{"name": "a"}, ["a"]]}, "outer.many[1] is ['a'], expected an object"),
        ({"many": [{}]}, "outer.many[0] is inner: missing fields ['name']"),
        ({"pair": [1]}, "outer.pair is [1], expected a list of 2"),
        ({"pair": [1, 1]}, "outer.pair[1] is 1"),
        ({"ranks": [1, -1]}, "outer.ranks[1] is -1"),
        ({"more": 1}, "outer: missing fields [], unknown ones ['more']"),
    ],
)
def test_what_is_not_declared_is_refused_by_its_path(change: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=re.escape(says)):
        from_plain(Outer, {**plain(OUTER), **change})


@dataclass(frozen=True, slots=True)
class Strict(Checked):
    inner: tuple[Inner, ...]
    count: Count = 0


def test_a_checked_class_refuses_the_same_of_python() -> None:
    Strict((Inner("a"),))
    for values in (((Inner("a"), "a"),), ((), -1), ((), True), (None,)):
        with pytest.raises(Invalid, match=r"strict\."):
            Strict(*values)  # type: ignore[arg-type]


def test_a_number_without_bounds_is_no_declaration() -> None:
    @dataclass(frozen=True, slots=True)
    class Loose:
        number: int

    with pytest.raises(TypeError, match="bound a number"):
        from_plain(Loose, {"number": 1})
