"""Lines out of bytes, and the newest state of a line that is drawn anew."""

from __future__ import annotations

import random

import pytest

from elastic_agent.agent.output.worker_logs import LINE_MAX, LineSplitter


@pytest.mark.parametrize(
    ("reads", "lines", "rest"),
    [
        ([b"a\nb\n"], [b"a", b"b"], []),
        ([b"a", b"b", b"c\n"], [b"abc"], []),
        ([b"a\n\nb"], [b"a", b""], [b"b"]),
        ([b"a\r\nb\r", b"\nc"], [b"a", b"b"], [b"c"]),
        ([b"\r 1%", b"\r 2%", b"\r 3%\n"], [b" 3%"], []),
        ([b"1%\r", b"2%\r", b"done\n"], [b"done"], []),
        ([b"1%\r", b"2%\r\n"], [b"2%"], []),
        ([b"1%\r"], [], [b"1%"]),
        ([b"\r1%\r2%"], [], [b"2%"]),
        ([b"\xff\x00\xfe\n\x80"], [b"\xff\x00\xfe"], [b"\x80"]),
        ([b"x" * (LINE_MAX + 1) + b"\n"], [b"x" * LINE_MAX, b"x"], []),
        ([b"x" * LINE_MAX, b"\n"], [b"x" * LINE_MAX], []),
        ([b"x" * LINE_MAX + b"\r", b"\n"], [b"x" * LINE_MAX], []),
        ([b"a\r\r\n"], [b"a"], []),
        ([b""], [], []),
    ],
)
def test_a_stream_is_cut_into_lines(reads: list[bytes], lines: list[bytes], rest: list[bytes]) -> None:
    splitter = LineSplitter()
    assert [line for read in reads for line in splitter.feed(read)] == lines
    assert splitter.flush() == rest
    assert splitter.flush() == []


@pytest.mark.parametrize("seed", range(5))
def test_cutting_does_not_depend_on_how_the_bytes_arrive_and_never_holds_more_than_a_line(seed: int) -> None:
    rng = random.Random(seed)
    text = (
        b"".join(rng.choice((b"a", b"b", b"\n", b"\r")) for _ in range(4000)) + b"\n" + b"z" * (3 * LINE_MAX)
    )
    whole = LineSplitter()
    expected = whole.feed(text) + whole.flush()
    pieces = LineSplitter()
    got: list[bytes] = []
    at = 0
    while at < len(text):
        step = rng.choice((1, 2, 7, 60_000 if at > 4000 else 3))
        got += pieces.feed(text[at : at + step])
        assert len(pieces._rest) <= LINE_MAX + 1
        at += step
    assert got + pieces.flush() == expected


@pytest.mark.parametrize(
    ("reads", "drawn"),
    [
        ([b"begun"], b""),
        ([b"\r 1%"], b" 1%"),
        ([b"\r 1%", b"\r 2"], b" 2"),
        ([b"1%\r"], b"1%"),
        ([b"\r 1%\n", b"begun"], b""),
        ([b"a\r\nbegun"], b""),
        ([b"\r 1%", b"\r    "], b""),
        ([b"\r 1%\n\r in 1%\x1b[A", b"\n\r in 2%\x1b[", b"A\n\r in 3%\x1b[A"], b" in 3%"),
    ],
)
def test_a_line_that_is_drawn_anew_is_known_before_it_ends(reads: list[bytes], drawn: bytes) -> None:
    splitter = LineSplitter()
    for read in reads:
        splitter.feed(read)
    assert splitter.drawn == drawn
    splitter.flush()
    assert splitter.drawn == b""


@pytest.mark.parametrize(
    ("data", "rest"),
    [
        (b"\r100%\r     \r", []),
        (b"\r100%\r     \x1b[A", []),
        (b"\r100%\r     ", []),
        (b"   ", [b"   "]),
        (b"\n   ", [b"   "]),
    ],
)
def test_a_bar_that_was_wiped_out_at_the_end_leaves_no_line(data: bytes, rest: list[bytes]) -> None:
    splitter = LineSplitter()
    splitter.feed(data)
    assert splitter.flush() == rest


def test_bars_below_a_bar_end_no_lines() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"\r out 0%")
    for number in range(20):
        lines += splitter.feed(b"\n\r in %d%%\x1b[A" % number)
    assert lines + splitter.flush() == [b" out 0%", b" in 19%"]
