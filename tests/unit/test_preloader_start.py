"""What a spare is told to become: there and back, and what is refused."""

from __future__ import annotations

import json

import pytest

from elastic_agent.agent.preloader.start import BadStart, Start

START = Start("script", "train.py", ("--lr", "0.1"), {"RANK": "0", "ODD": "\udcff"}, "/work")


def test_a_start_survives_the_way_there() -> None:
    assert Start.from_json(START.to_json()) == START


def test_the_command_is_what_python_is_given() -> None:
    assert START.command == ("-u", "train.py", "--lr", "0.1")
    assert Start("module", "package.train", ("1",), {}, "/").command == ("-u", "-m", "package.train", "1")


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "binary"},
        {"target": ""},
        {"target": 1},
        {"args": "--lr"},
        {"args": [1]},
        {"args": ["a\0b"]},
        {"environment": []},
        {"environment": {"": "x"}},
        {"environment": {"A=B": "x"}},
        {"environment": {"A": 1}},
        {"cwd": None},
        {"more": "fields"},
    ],
    ids=str,
)
def test_what_no_process_can_be_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(BadStart):
        Start.from_json(json.dumps({**json.loads(START.to_json()), **changed}))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"kind": "script"}'])
def test_what_is_no_start_is_refused(text: str) -> None:
    with pytest.raises(BadStart):
        Start.from_json(text)
