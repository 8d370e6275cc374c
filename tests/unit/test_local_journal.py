"""What the next host of a local store reads, whatever the last one has left."""

from __future__ import annotations

import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.rendezvous.local.frames import FrameInvalid, Frames, frame
from elastic_agent.rendezvous.local.journal import Begun, Damaged, Ended, Leased, Past, Written, encode, parse
from elastic_agent.rendezvous.store.interface import Entry

BASE = 5 * 2**32
CHANGES = [
    Written((Entry("jobs/b", "näme \ud800\n", 1, 1), Entry("jobs/a", "\x00\r", 1, 1)), (), {}),
    Written((Entry("plan", "1", 2, 2),), ("jobs/a",), {}),
    Written((), ("plan",), {}),
    Written((Entry("plan", "2", 4, 4), Entry("jobs/b", "again", 1, 4)), (), {}),
]


def lines(durable_lag: int = 0) -> list[bytes]:
    """Each but the last `durable_lag` before it was on disk when it was written."""
    made = [encode(Begun("pool", BASE), 0)]
    for change in CHANGES:
        made.append(encode(change, sum(map(len, made[: max(1, len(made) - durable_lag)]))))
    return made


def entries_after(changes: int) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for change in CHANGES[:changes]:
        found |= {entry.key: entry for entry in change.entries}
        for key in change.deleted:
            del found[key]
    return found


def held(past: Past) -> dict[str, Entry]:
    assert (past.job, past.base) == ("pool", BASE)
    return {entry.key: entry for entry in past.entries}


@pytest.mark.parametrize("changes", range(len(CHANGES) + 1))
def test_all_changes_are_read_in_their_order(changes: int) -> None:
    past = parse(b"".join(lines()[: changes + 1]))
    assert held(past) == entries_after(changes)
    assert past.torn_bytes == 0


def test_wherever_the_file_ends_its_whole_lines_count() -> None:
    made = lines()
    whole = b"".join(made)
    for end in range(len(made[0]), len(whole) + 1):
        kept = next(n for n in reversed(range(len(made) + 1)) if len(b"".join(made[:n])) <= end)
        past = parse(whole[:end])
        assert held(past) == entries_after(kept - 1)
        assert past.torn_bytes == end - len(b"".join(made[:kept]))


def test_what_a_lease_held_ends_with_it_and_what_was_written_without_it_stays() -> None:
    def a_key(name: str, **lease_of: int) -> Written:
        return Written((Entry(name, "", 1, 1),), (), lease_of)

    kept, ended = Leased(BASE + 1, 5.0, 4711, 90210), Leased(BASE + 2, 5.0, 0, 0)
    story = [
        *(kept, ended),
        *(
            a_key("a", a=kept.lease),
            a_key("b", b=ended.lease),
            a_key("c", c=ended.lease),
            a_key("d", d=ended.lease),
        ),
        *(a_key("c"), a_key("d", d=kept.lease), a_key("e", e=kept.lease)),
        *(Written((), ("e",), {}), a_key("e"), Ended(ended.lease), Ended(BASE + 99)),
    ]
    past = parse(lines()[0] + b"".join(encode(line, 0) for line in story))
    assert sorted(held(past)) == ["a", "c", "d", "e"]
    assert past.lease_of == {"a": kept.lease, "d": kept.lease}
    assert past.leases == (kept,)


@pytest.mark.parametrize("raw", [b"", b"\n", b"garbage", lines()[0][:-1], lines()[1], b"\x00" * 4096])
def test_a_file_without_its_beginning_is_damaged(raw: bytes) -> None:
    with pytest.raises(Damaged):
        parse(raw)


def test_a_file_of_another_version_is_damaged_and_not_torn() -> None:
    other = encode(CHANGES[0], 0).replace(b'"v": 1', b'"v": 2')
    said = other.partition(b" ")[2]
    with pytest.raises(Damaged, match="line 2 is of another version"):
        parse(lines()[0] + b"%08x %s" % (zlib.crc32(said), said))


@given(st.integers(0, sum(map(len, lines())) - 1), st.integers(1, 255))
def test_no_byte_that_was_on_disk_can_change_unseen(at: int, bits: int) -> None:
    """The last line is on disk for all that the file tells: a change there cannot be told from a torn end."""
    whole = bytearray(b"".join(lines()))
    last = len(whole) - len(lines()[-1])
    whole[at] ^= bits
    if at < last:
        with pytest.raises(Damaged):
            parse(bytes(whole))
    else:
        assert held(parse(bytes(whole))) == entries_after(len(CHANGES) - 1)


def test_no_end_of_a_line_that_was_on_disk_can_change_unseen() -> None:
    """What such a change joins to one line are two, and the second says that the first was on disk."""
    made = lines()
    for end in itertools.accumulate(map(len, made[:-1])):
        for bits in range(1, 256):
            whole = bytearray(b"".join(made))
            whole[end - 1] ^= bits
            with pytest.raises(Damaged):
                parse(bytes(whole))


@pytest.mark.parametrize("broken", [2, 3, 4])
def test_lines_that_had_not_reached_the_disk_may_be_broken_in_any_order(broken: int) -> None:
    """The power went before any of the last three was on disk: what is whole behind a broken one does not count."""
    made = lines(durable_lag=3)
    made[broken] = b"\x00" * len(made[broken])
    past = parse(b"".join(made))
    assert held(past) == entries_after(broken - 1)
    assert past.torn_bytes == len(b"".join(made[broken:]))


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.integers(1, 9))
def test_messages_arrive_whole_in_whatever_pieces_they_come(messages: list[bytes], piece: int) -> None:
    stream, frames, taken = b"".join(map(frame, messages)), Frames(40), []
    for start in range(0, len(stream), piece):
        frames.feed(stream[start : start + piece])
        while (message := frames.take()) is not None:
            taken.append(message)
    assert taken == messages
    assert not frames


@pytest.mark.parametrize("length", [0, 41, 2**32 - 1])
def test_no_message_is_waited_for_that_is_empty_or_too_long(length: int) -> None:
    frames = Frames(40)
    frames.feed(length.to_bytes(4, "big"))
    with pytest.raises(FrameInvalid):
        frames.take()
