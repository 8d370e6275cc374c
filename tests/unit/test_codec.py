"""What annotations declare is what is read: one class of each kind of field, and what each refuses with which path."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pytest

from elastic_agent.codec import (
    AtMost,
    Checked,
    Count,
    Document,
    Invalid,
    Positive,
    Row,
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
class Pair:
    name: str
    other: str


@dataclass(frozen=True, slots=True)
class Short(Row):
    name: str

    @property
    def row(self) -> tuple[str]:
        return (self.name,)


def read_short(raw: Any) -> Short:
    return Short(raw[0])


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
    colours: frozenset[Colour]
    few: Annotated[tuple[Count, ...], AtMost(2)]
    either: Inner | Pair
    row: Annotated[Short, read_short]
    clean: Annotated[str, Text(4, clean=str.strip)]


OUTER = Outer(
    0, 1, -1, 0.5, "any \udcff", True, "one", 2, Colour.BLUE, None, (Inner("ab"), Inner("c")), (3, False),
    frozenset({9, 1}), frozenset(Colour), (1, 2), Inner("e"), Short("f"), "g",
)  # fmt: skip


def test_what_is_written_is_read_again() -> None:
    body = plain(OUTER)
    assert body["ranks"] == [1, 9]
    assert body["colours"] == ["blue", "red"]
    assert body["many"] == [{"name": "ab"}, {"name": "c"}]
    assert body["row"] == ("f",)
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
        ({"many": [{"name": "a"}, {"name": "ABC"}]}, "outer.many[1].name is 'ABC'"),
        ({"many": [{"name": "a"}, ["a"]]}, "outer.many[1] is ['a'], expected an object"),
        ({"many": [{}]}, "outer.many[0].name is missing"),
        ({"pair": [1]}, "outer.pair is [1], expected a list of 2"),
        ({"pair": [1, 1]}, "outer.pair[1] is 1"),
        ({"ranks": [1, -1]}, "outer.ranks[1] is -1"),
        ({"colours": ["red", "green"]}, "outer.colours[1] is 'green'"),
        ({"few": [1, 2, 3]}, "outer.few is a list of 3, expected at most 2"),
        ({"either": {}}, "outer.either.name is missing"),
        ({"either": {"name": "A"}}, "outer.either.name is 'A'"),
        ({"clean": " abc "}, "outer.clean is ' abc ', expected a text of at most 4 characters"),
        ({"more": 1}, "outer.more is not a field that is known"),
    ],
)
def test_what_is_not_declared_is_refused_by_its_path(change: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=re.escape(says)):
        from_plain(Outer, {**plain(OUTER), **change})


def test_one_of_several_classes_is_told_by_its_fields() -> None:
    body = plain(OUTER) | {"either": {"name": "ABC", "other": "d"}}
    assert from_plain(Outer, body).either == Pair("ABC", "d")


def test_a_text_is_cleaned_when_it_is_read() -> None:
    assert from_plain(Outer, plain(OUTER) | {"clean": " h "}).clean == "h"


DOCUMENT = Document(Outer, version=4, most_chars=2000)


def test_a_document_comes_back_whatever_else_it_holds() -> None:
    text = DOCUMENT.encode(OUTER)
    assert text.startswith('{"v":4,"count":0,')
    assert DOCUMENT.decode(text) == OUTER
    root = json.loads(text) | {"more": 1, "either": {"name": "e", "more": 1}}
    assert DOCUMENT.decode(json.dumps(root).ljust(2000)) == OUTER


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "text is not JSON"),
        ("[]", "text is a JSON list"),
        ("[" * 2000, "text is not JSON"),
        (" " * 2001, "text of 2001 characters, at most 2000 are read"),
        ("{}", "text of version None, this process reads 4"),
        ('{"v": true}', "text of version True"),
        ('{"v": 4}', "count is missing"),
        (DOCUMENT.encode(replace(OUTER, count=-1)), "count is -1, expected a whole number"),
    ],
)
def test_a_document_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(Invalid, match=f"^{re.escape(says)}"):
        DOCUMENT.decode(text)


@dataclass(frozen=True, slots=True)
class Strict(Checked):
    inner: tuple[Inner, ...]
    count: Count = 0


def test_a_checked_class_refuses_the_same_of_python() -> None:
    Strict((Inner("a"),))
    for values in (((Inner("a"), "a"),), ((), -1), ((), True), (None,)):
        with pytest.raises(Invalid, match=r"strict\."):
            Strict(*values)  # type: ignore[arg-type]
