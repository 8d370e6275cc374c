"""What a spare is told to become: there and back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from elastic_agent.agent.workers.preloader.start import BadStart, Start

START = Start("script", "train.py", ("--lr", "0.1"), {"RANK": "0", "ODD": "\udcff"}, "/work")


def test_a_start_survives_the_way_there() -> None:
    assert Start.of(json.loads(json.dumps(asdict(START)))) == START


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
        Start.of({**json.loads(json.dumps(asdict(START))), **changed})


@pytest.mark.parametrize("found", [None, "", [], {}, {"kind": "script"}], ids=repr)
def test_what_is_no_start_is_refused(found: object) -> None:
    with pytest.raises(BadStart):
        Start.of(found)
