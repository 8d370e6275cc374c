"""Arguments as JSON: all that may be given comes back as it was, and what may not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.plain_data import MOST_DEEP, merged, plain_arguments, value_of


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels else []


def test_what_is_given_comes_back() -> None:
    given = {
        "a": None,
        "b": (1, 2.5, True),
        "c": {1, 2},
        "d": {0: "a", (1, "x"): Path("/x")},
        "e": [[], {}],
        "f": {"dict": {"path": "p"}},
        "g": 2**2000,
        "h": nested(MOST_DEEP - 2),
    }
    back = value_of(json.loads(json.dumps(plain_arguments(given, "arguments"))))
    assert (back, repr(back)) == (given, repr(given))


def itself() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"overrides": {"model": object()}}, r"arguments\['overrides'\]\['model'\] is a object"),
        ({"sizes": [1, {b"x"}]}, r"arguments\['sizes'\]\[1\]\[0\] is a bytes"),
        ({"names": {(1, object): 2}}, r"a key of arguments\['names'\]\[1\] is a type"),
        ({"deep": itself()}, r"arguments\['deep'\]\[0\].* is inside itself"),
        ({"deep": nested(MOST_DEEP)}, r"arguments\['deep'\]\[0\].* more than 50 levels deep"),
        ({"seed": -(10**5000)}, r"arguments\['seed'\] is an int of more than 2048 bits"),
        ({1: 2}, r"arguments is no dict of arguments by their names: {1: 2}"),
        ([1], r"arguments is no dict of arguments by their names: \[1\]"),
    ],
)
def test_what_is_no_data_is_named(arguments: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        plain_arguments(arguments, "arguments")


def test_what_a_restart_changes_is_put_in_dict_by_dict() -> None:
    arguments = {"overrides": {"lr": 1, "resume": False}, "cfg": None}
    changed = merged(arguments, {"overrides": {"resume": True}, "cfg": {"a": 1}})
    assert changed == {"overrides": {"lr": 1, "resume": True}, "cfg": {"a": 1}}
    assert arguments["overrides"] == {"lr": 1, "resume": False}
