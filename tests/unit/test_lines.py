"""Lines out of bytes, and what is shown of those that are drawn anew."""

from __future__ import annotations

import random

import pytest

from elastic_agent.agent.output.lines import LINE_MAX, REDRAW_S, Line, LineSplitter, Redrawn, Tail


@pytest.mark.parametrize(
    ("reads", "lines", "rest"),
    [
        ([b"a\nb\n"], [Line(b"a"), Line(b"b")], []),
        ([b"a", b"b", b"c\n"], [Line(b"abc")], []),
        ([b"a\n\nb"], [Line(b"a"), Line(b"")], [Line(b"b")]),
        ([b"a\r\nb\r", b"\nc"], [Line(b"a"), Line(b"b")], [Line(b"c")]),
        ([b"\r 1%", b"\r 2%", b"\r 3%\n"], [Line(b" 1%", True), Line(b" 2%", True), Line(b" 3%")], []),
        ([b"1%\r", b"2%\r", b"done\n"], [Line(b"1%", True), Line(b"2%", True), Line(b"done")], []),
        ([b"1%\r"], [], [Line(b"1%")]),
        ([b"\xff\x00\xfe\n\x80"], [Line(b"\xff\x00\xfe")], [Line(b"\x80")]),
        ([b"x" * (LINE_MAX + 1) + b"\n"], [Line(b"x" * LINE_MAX), Line(b"x")], []),
        ([b"x" * LINE_MAX, b"\n"], [Line(b"x" * LINE_MAX)], []),
        ([b"x" * LINE_MAX + b"\r", b"\n"], [Line(b"x" * LINE_MAX)], []),
        ([b"a\r\r\n"], [Line(b"a", True), Line(b"")], []),
        # Bars below each other: down, drawn, and up again.
        (
            [b"\rall 0\n\rone 0\x1b[A\n\n", b"\n\rtwo 0\x1b[A\x1b[", b"A\n\rone 1\x1b[A"],
            [Line(b"all 0"), Line(b"one 0", True), Line(b"two 0", True)],
            [Line(b"one 1")],
        ),
        ([b""], [], []),
    ],
)
def test_a_stream_is_cut_into_lines(reads: list[bytes], lines: list[Line], rest: list[Line]) -> None:
    splitter = LineSplitter()
    assert [line for read in reads for line in splitter.feed(read)] == lines
    assert splitter.flush() == rest
    assert splitter.flush() == []


@pytest.mark.parametrize("seed", range(5))
def test_cutting_does_not_depend_on_how_the_bytes_arrive_and_never_holds_more_than_a_line(seed: int) -> None:
    rng = random.Random(seed)
    tokens = (b"a", b"b", b"\n", b"\r", b"\x1b[A")
    text = b"".join(rng.choice(tokens) for _ in range(4000)) + b"z" * (3 * LINE_MAX) + b"\rend"
    whole = LineSplitter()
    expected = whole.feed(text) + whole.flush()
    pieces = LineSplitter()
    got: list[Line] = []
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
    [(b"\r100%\r     \r", []), (b"\r100%\r     ", []), (b"   ", [Line(b"   ")]), (b"\n   ", [Line(b"   ")])],
)
def test_a_bar_that_was_wiped_out_at_the_end_leaves_no_line(data: bytes, rest: list[Line]) -> None:
    splitter = LineSplitter()
    splitter.feed(data)
    assert splitter.flush() == rest


def shown(*reads: tuple[float, bytes]) -> list[tuple[float, bytes]]:
    """What is shown when, if nothing but these reads and `due_at` makes it so."""
    splitter, redrawn, found = LineSplitter(), Redrawn(), []
    for now, data in (*reads, (1000.0, b"")):
        while (due_at := redrawn.due_at) is not None and due_at < now:
            found += [(due_at, text) for text in redrawn.show([], splitter.drawn, due_at)]
        found += [(now, text) for text in redrawn.show(splitter.feed(data), splitter.drawn, now)]
    return found


@pytest.mark.parametrize(
    ("reads", "texts"),
    [
        ([(0, b"a\n"), (0, b"\n"), (1, b"a\nb\n")], [(0, b"a"), (0, b""), (1, b"a"), (1, b"b")]),
        # A bar that is drawn ten times a second, as tqdm does, and its end.
        (
            [(t / 10, b"\r%d" % t) for t in range(120)] + [(12, b"\rdone\n")],
            [(0, b"0"), (REDRAW_S, b"50"), (2 * REDRAW_S, b"100"), (12, b"done")],
        ),
        # It stands still: its newest state comes, once.
        ([(0, b"\r1"), (1, b"\r2"), (2, b"\r3")], [(0, b"1"), (REDRAW_S, b"3")]),
        ([(0, b"1\r"), (1, b"2\r"), (2, b"3\r")], [(0, b"1"), (REDRAW_S, b"3")]),
        # One below another, which ends.
        (
            [(0, b"\rall 0\n\r1\x1b[A"), (1, b"\n\r2\x1b[A"), (2, b"\n\r \r\x1b[A"), (2, b"\rall 1\nend\n")],
            [(0, b"all 0"), (0, b"1"), (2, b"all 1"), (2, b"end")],
        ),
        # Another line in its place, and behind it.
        ([(0, b"\r1"), (1, b"\r2"), (2, b"\rwarning\n\r3")], [(0, b"1"), (2, b"warning"), (REDRAW_S, b"3")]),
        ([(0, b"\r1"), (1, b" warning\n")], [(0, b"1"), (1, b"1 warning")]),
        # An end alone leaves the state standing, and shows it once.
        ([(0, b"a\r\r\n")], [(0, b"a")]),
        ([(0, b"\r1"), (1, b"\r2"), (2, b"\n")], [(0, b"1"), (2, b"2")]),
        ([(0, b"\r1"), (1, b"\n"), (1, b"1\n")], [(0, b"1"), (1, b"1")]),
        # What is no earlier state of the same bar is shown, whatever takes its place.
        (
            [(0, b"ERROR: cuda device 3 has fallen off the bus\r"), (0, b"1%\r2%\n")],
            [(0, b"ERROR: cuda device 3 has fallen off the bus"), (0, b"2%")],
        ),
        ([(0, b"important line\rX\n")], [(0, b"important line"), (0, b"X")]),
        (
            [(0, b"\r1%"), (1, b"\rWARNING: loss is nan\r2%"), (2, b"\n")],
            [(0, b"1%"), (1, b"WARNING: loss is nan"), (2, b"2%")],
        ),
        ([(0, b"\r1%"), (1, b"\rloading\r   \r"), (2, b"log\n")], [(0, b"1%"), (1, b"loading"), (2, b"log")]),
        (
            [(0, b"\rfoo 1/9"), (1, b"\rfoo of a 2/9"), (2, b"\rfoo of bb 3/9\n")],
            [(0, b"foo 1/9"), (2, b"foo of bb 3/9")],
        ),
        # Blanks at the end are no line, and what only moves the cursor is no state.
        ([(0, b"\r1%"), (1, b"\r2%\r    \n"), (2, b"log\n")], [(0, b"1%"), (2, b"log")]),
        ([(0, b"\r1%"), (1, b"\r2%\r\x1b[2K"), (9, b"\rlog\n")], [(0, b"1%"), (9, b"log")]),
        ([(0, b"\r1%"), (1, b"\r2%\r\x1b[?25h"), (2, b"\n")], [(0, b"1%"), (2, b"2%")]),
        # Blanks wipe it out, and are not shown.
        ([(0, b"\r1"), (1, b"\r2"), (2, b"\r   \r"), (3, b"log\n")], [(0, b"1"), (3, b"log")]),
    ],
)
def test_of_a_line_that_is_drawn_anew_the_newest_state_is_shown_now_and_then(
    reads: list[tuple[float, bytes]], texts: list[tuple[float, bytes]]
) -> None:
    assert shown(*reads) == texts


@pytest.mark.parametrize("seed", range(5))
def test_no_line_that_ends_is_lost_between_states(seed: int) -> None:
    rng = random.Random(seed)
    lines = [b"line %d" % i for i in range(200)]
    reads, now = [], 0.0
    for line in lines:
        for _ in range(rng.randrange(4)):
            now += rng.random()
            reads.append((now, b"\r%d%%" % rng.randrange(100)))
        reads.append((now, rng.choice((b"\r", b"\r      \r")) + line + b"\n"))
    assert [text for _, text in shown(*reads) if text.startswith(b"line")] == lines


def test_the_tail_keeps_a_state_that_only_an_end_follows() -> None:
    tail = Tail()
    tail.add([Line(b"a"), Line(b"1%", True), Line(b"2%", True), Line(b""), Line(b"b")])
    assert tail.lines() == ("a", "2%", "b")
    tail.add([Line(b"ERROR", True), Line(b"1%", True), Line(b"\x1b[?25h", True), Line(b"2%")])
    assert tail.lines() == ("a", "2%", "b", "ERROR", "2%")
