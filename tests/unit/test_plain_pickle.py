"""Pickles from workers: plain values are read, and nothing that such a pickle may do otherwise is ever done."""

from __future__ import annotations

import math
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.workers.evidence import plain_pickle
from elastic_agent.codec import Invalid

LATER = math.inf
PLAIN: dict[str, Any] = {
    "version": "2.10",
    "entries": [{"group": ("0", "default_pg"), "sizes": [[3], []], "ended": True, "took": 0.25, "at": 2**60}],
    "none": None,
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "numbers": [0, 255, 256, 65535, 65536, -1, -(2**31), -(2**62), False],
    "text": "größer \U0001f525",
    "many": list(map(str, range(400))),
    "7": {},
}


def read(data: bytes) -> Any:
    return plain_pickle.read(data, LATER, time.monotonic)


def test_plain_values_come_back() -> None:
    assert read(pickle.dumps(PLAIN, protocol=2)) == PLAIN


def test_a_value_that_is_there_twice_is_one() -> None:
    twice = ["shared"]
    found = read(pickle.dumps([twice, twice], protocol=2))
    assert found[0] is found[1]


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_no_code_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps({"entries": [Evil(mark)]}, protocol=2)
    with pytest.raises(Invalid, match="more than plain values"):
        read(data)
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists(), "it would have"


PLAIN_INSTRUCTIONS = set(map(ord, "(NKMJGX]})aesutqrhj.")) | {0x80, 0x88, 0x89, 0x8A, 0x85, 0x86, 0x87}


@pytest.mark.parametrize("code", sorted(set(range(256)) - PLAIN_INSTRUCTIONS))
def test_no_other_instruction_exists(code: int) -> None:
    """GLOBAL, INST, OBJ, NEWOBJ, REDUCE, BUILD, PERSID, EXT and whatever there is beside."""
    with pytest.raises(Invalid, match=rf"instruction {code:#04x}"):
        read(b"\x80\x02N" + bytes([code]) + b"os\nsystem\n.")


DATA = pickle.dumps(PLAIN, protocol=2)


def test_a_part_of_one_is_none() -> None:
    for size in range(len(DATA)):
        with pytest.raises(Invalid):
            read(DATA[:size])
    with pytest.raises(Invalid, match="does not end with one value"):
        read(DATA + b"x")


@pytest.mark.parametrize("seed", range(8))
def test_nothing_but_invalid_comes_of_what_is_spoilt(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        spoilt = bytearray(DATA)
        for _ in range(chance.randint(1, 4)):
            spoilt[chance.randrange(len(spoilt))] = chance.choice(
                [*PLAIN_INSTRUCTIONS, chance.randrange(256)]
            )
        try:
            read(bytes(spoilt))
        except Invalid:
            continue


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "well-formed"),
        (b".", "does not end with one value"),
        (b"\x80\x04N.", "protocol 4"),
        (b"e", "well-formed"),
        (b"Na", "well-formed"),
        (b"}Na", "no list"),
        (b"](e]a(1", "more than plain values"),
        (b"](NNu", "no dict"),
        (b"}(Nu", "no dict"),
        (b"}]Ns", "that is no text"),
        (b"})Ns", "that is no text"),
        (b"h\x05", "well-formed"),
        (b"q\x05", "well-formed"),
        (b"X\xff\xff\xff\x7fabc", "cut"),
        (b"\x8a\x11" + bytes(17), "an integer of 17 bytes"),
        (b"(N.", "does not end with one value"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        read(data)


def test_a_key_so_deep_that_its_hash_would_end_the_process_is_refused() -> None:
    with pytest.raises(Invalid, match="that is no text"):
        read(b"})" + b"\x85" * 1_000_000 + b"Ns.")


def test_keys_that_would_all_have_one_hash_are_refused() -> None:
    """A dict of 40,000 of them takes a minute, in one instruction, in which no other thread of the agent runs."""
    keys = [number * (2**61 - 1) for number in range(3)]
    assert len(set(map(hash, keys))) == 1
    with pytest.raises(Invalid, match="that is no text"):
        read(pickle.dumps(dict.fromkeys(keys), protocol=2))


def test_a_large_place_in_the_memo_takes_no_memory() -> None:
    assert read(b"Nr\xff\xff\xff\xff.") is None


def test_it_ends_within_its_bounds() -> None:
    with pytest.raises(Invalid, match="at most"):
        read(bytes(plain_pickle.MOST_BYTES + 1))
    with pytest.raises(Invalid, match="instructions"):
        read(b"N" * (plain_pickle.MOST_STEPS + 1))
    ticks = iter(range(100))
    with pytest.raises(Invalid, match="in time"):
        plain_pickle.read(b"N" * 1_000_000, 3.0, lambda: float(next(ticks)))
    assert next(ticks) == 4
