"""The journal: what is noted comes back, in memory and from its file, and no disk holds up who notes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elastic_agent.agent.output import journal as module
from elastic_agent.agent.output import log_files
from elastic_agent.agent.output.journal import (
    EVENT,
    MAX_EVENT_TEXT,
    EventKind,
    JobEvent,
    Journal,
    file_name,
    journals,
    read_events,
    read_file,
)
from elastic_agent.agent.output.log_files import MARK, LogFiles, delete_run

PATIENCE_S = 20.0


class Lost:
    def __init__(self) -> None:
        self.events = 0

    def __call__(self) -> None:
        self.events += 1


@pytest.fixture
def lost() -> Lost:
    return Lost()


def texts(events: tuple[JobEvent, ...]) -> list[str]:
    return [event.text for event in events]


def written(path: Path) -> list[str]:
    return [event.text for event in read_file(path)]


class Kept(Journal):
    """With files of its own, which end with it."""

    def __init__(self, lost: Lost, beside: Mapping[str, str] = {}) -> None:
        self.files = LogFiles()
        self.files.start()
        super().__init__("a", lambda: 1000.0, self.files, beside=beside, count_lost=lost)

    def close(self) -> None:
        self.files.close()


def a_journal(lost: Lost) -> Kept:
    return Kept(lost)


# --- Events


def test_no_event_has_a_secret_whether_it_is_known_or_looks_like_one() -> None:
    journal = Journal("a", lambda: 0.0, secrets={"c4n4ry-Value9"})
    journal.note(EventKind.FAILURE, "exit code 1: ValueError: c4n4ry-Value9, token=other-canary")
    [event] = journal.since(0, 10)
    assert event.text == "exit code 1: ValueError: ***, token=***"


def test_a_secret_at_the_end_of_a_long_text_is_masked_whole() -> None:
    journal = Journal("a", lambda: 0.0, secrets={"c4n4ry-Value9"})
    journal.note(EventKind.FAILURE, "x" * (MAX_EVENT_TEXT - 9) + " c4n4ry-Value9")
    assert "c4n4ry" not in journal.since(0, 10)[0].text


def test_an_event_comes_back_as_it_was_noted() -> None:
    journal = Journal("a", lambda: 1000.0004)
    about = {"rank": 3, "about": "b", "cause": "hang", "generation": 7}
    journal.note(EventKind.FAILURE, "rank 3 hangs", **about, seconds={"stop": 0.25}, counts={"nodes": 2})  # type: ignore[arg-type]
    [event] = journal.since(0, 10)
    assert EVENT.decode(EVENT.encode(event)) == event
    assert (event.number, event.at, event.node, event.generation, event.rank) == (1, 1000.0, "a", 7, 3)
    assert (event.kind, event.about, event.cause, event.text) == (
        EventKind.FAILURE,
        "b",
        "hang",
        "rank 3 hangs",
    )
    assert (event.seconds, event.counts) == ({"stop": 0.25}, {"nodes": 2})


def test_an_event_is_of_the_newest_world() -> None:
    journal = Journal("a", lambda: 0.0)
    journal.note(EventKind.AGENT_STARTED, "starts")
    journal.note(EventKind.WORLD, "the job starts", generation=4)
    journal.note(EventKind.LOAD, "saved")
    assert [event.generation for event in journal.since(0, 10)] == [0, 4, 4]


def test_texts_of_others_are_bounded_and_hold_nothing_that_a_terminal_obeys() -> None:
    journal = Journal("a", lambda: 0.0)
    journal.note(
        EventKind.FAILURE, "killed\n12:00 \x1b[31mred" + "x" * 10_000, cause="y" * 500, about="z" * 500
    )
    [event] = journal.since(0, 10)
    assert event.text.startswith("killed 12:00 redxx")
    assert (len(event.text), len(event.cause), len(event.about)) == (MAX_EVENT_TEXT, 64, 128)
    assert EVENT.decode(EVENT.encode(event)) == event


def test_a_reader_skips_what_it_cannot_read() -> None:
    journal = Journal("a", lambda: 0.0)
    journal.note(EventKind.WORLD, "one")
    [event] = journal.since(0, 10)
    good = EVENT.encode(event)
    lines = [
        "",
        good[:20],
        "[]",
        good.replace('"world"', '"of_tomorrow"'),
        good.replace(':1,"n', ':2,"n'),
        good,
    ]
    assert list(read_events(lines)) == [event]


# --- In memory


def test_the_newest_events_stay_in_memory() -> None:
    journal = Journal("a", lambda: 0.0, kept=3)
    for number in range(1, 6):
        journal.note(EventKind.WORLD, str(number))
    assert texts(journal.since(0, 10)) == ["3", "4", "5"]
    assert texts(journal.since(0, 2)) == ["3", "4"]
    assert texts(journal.since(3, 10)) == ["4", "5"]
    assert journal.since(5, 10) == journal.since(99, 10) == ()
    assert journal.newest == 5


def test_what_comes_again_and_again_pushes_nothing_else_out() -> None:
    journal = Journal("a", lambda: 0.0, kept=8)
    journal.note(EventKind.WORLD, "world 1")
    for number in range(2, 1000):
        journal.note(EventKind.LOAD, f"save {number}")
    journal.note(EventKind.WORLD, "world 1000")
    assert texts(journal.since(0, 10)) == ["world 1", "save 998", "save 999", "world 1000"]
    assert texts(journal.since(0, 2)) == ["world 1", "save 998"]
    assert texts(journal.since(998, 10)) == ["save 999", "world 1000"]


# --- On disk


def test_the_file_has_all_events_those_before_the_first_world_too(tmp_path: Path, lost: Lost) -> None:
    journal = a_journal(lost)
    journal.note(EventKind.AGENT_STARTED, "starts")
    journal.begin(tmp_path / "job-run")
    journal.note(EventKind.WORLD, "the job starts", generation=1)
    journal.begin(tmp_path / "job-run")
    journal.note(EventKind.AGENT_ENDED, "ends")
    journal.close()
    folder = tmp_path / "job-run"
    assert sorted(os.listdir(folder)) == [MARK, "events-a.jsonl"]
    assert written(folder / "events-a.jsonl") == ["starts", "the job starts", "ends"]
    assert journals(folder) == {"a": (folder / "events-a.jsonl",)}
    os.mkfifo(folder / "events-b.jsonl")
    assert "b" not in journals(folder), "its reader would wait for a writer"
    assert (folder / "events-a.jsonl").stat().st_mode & 0o777 == 0o640
    assert lost.events == 0


def test_another_life_of_the_agent_goes_on_behind_a_line_that_was_cut(tmp_path: Path, lost: Lost) -> None:
    for text in ("one", "two"):
        journal = a_journal(lost)
        journal.note(EventKind.AGENT_STARTED, text)
        journal.begin(tmp_path)
        journal.close()
        with (tmp_path / "events-a.jsonl").open("a") as file:
            file.write('{"schema":1,"num')
    journal = a_journal(lost)
    journal.note(EventKind.AGENT_STARTED, "three")
    journal.begin(tmp_path)
    journal.close()
    assert written(tmp_path / "events-a.jsonl") == ["one", "two", "three"]


def test_the_file_is_bounded_and_the_part_before_is_kept(
    tmp_path: Path, lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2000)
    journal = a_journal(lost)
    journal.begin(tmp_path)
    for number in range(100):
        journal.note(EventKind.LOAD, str(number))
    journal.close()
    older, newest = parts = journals(tmp_path)["a"]
    assert [path.name for path in parts] == ["events-a.jsonl.1", "events-a.jsonl"]
    assert all(0 < path.stat().st_size <= 2000 for path in parts)
    numbers = [int(text) for text in (*written(older), *written(newest))]
    assert numbers == list(range(numbers[0], 100))


def test_no_event_waits_for_a_disk_that_stands_still(
    tmp_path: Path, lost: Lost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moves, write = threading.Event(), os.write
    stuck = threading.Event()

    def still(fd: int, data: bytes) -> int:
        stuck.set()
        assert moves.wait(PATIENCE_S)
        return write(fd, data)

    monkeypatch.setattr(log_files, "QUEUE_MAX", 0)
    monkeypatch.setattr(log_files, "EVENTS_MAX", 2000)
    monkeypatch.setattr(log_files.os, "write", still)
    journal = a_journal(lost)
    journal.begin(tmp_path)
    journal.note(EventKind.LOAD, "first")
    assert stuck.wait(PATIENCE_S)
    for number in range(100):
        journal.note(EventKind.LOAD, str(number))
    assert lost.events > 80
    assert len(journal.since(0, 1000)) == 101, "memory has them"
    moves.set()
    journal.close()
    assert written(tmp_path / "events-a.jsonl")[0] == "first"
    assert len(written(tmp_path / "events-a.jsonl")) == 101 - lost.events
    [record] = caplog.records
    assert record.getMessage().startswith("the disk of the worker logs and events stands still")


def test_a_full_disk_costs_its_events_and_is_told_once(
    tmp_path: Path, lost: Lost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, write = [False], os.write
    journal = a_journal(lost)

    def write_some(fd: int, data: bytes) -> int:
        if not full[0]:
            return write(fd, data)
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:-30])

    monkeypatch.setattr(log_files.os, "write", write_some)
    done = threading.Event()
    journal.begin(tmp_path)
    for text, is_full in (("one", False), ("two", True), ("three", True), ("four", False)):
        done.clear()
        journal.files.do(lambda value=is_full: full.__setitem__(0, value))  # type: ignore[misc]
        journal.note(EventKind.LOAD, text)
    journal.close()
    assert written(tmp_path / "events-a.jsonl") == ["one", "four"]
    assert lost.events == 2
    [record] = caplog.records
    assert "events-a.jsonl: No space left on device; the job goes on" in record.getMessage()


def flushed(journal: Kept) -> None:
    done = threading.Event()
    journal.files.do(done.set)
    assert done.wait(PATIENCE_S)


def test_files_about_the_node_lie_beside_and_are_for_this_user_alone(tmp_path: Path, lost: Lost) -> None:
    beside = {"configuration-a.toml": "nnodes = 2"}
    journal = Kept(lost, beside)
    journal.begin(tmp_path / "job-run")
    journal.note(EventKind.LOAD, "one")
    journal.close()
    file = tmp_path / "job-run" / "configuration-a.toml"
    assert file.read_text() == "nnodes = 2\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_the_disk_has_lost_is_opened_again(
    tmp_path: Path, lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS, where another machine has removed the folder."""
    journal, write, stale = a_journal(lost), os.write, [False]

    def refuse(fd: int, data: bytes) -> int:
        if stale[0]:
            raise OSError(errno.ESTALE, "Stale file handle")
        return write(fd, data)

    monkeypatch.setattr(log_files.os, "write", refuse)
    journal.begin(tmp_path / "job-run")
    journal.note(EventKind.LOAD, "one")
    flushed(journal)
    shutil.rmtree(tmp_path / "job-run")
    stale[0] = True
    journal.note(EventKind.LOAD, "two")
    flushed(journal)
    stale[0] = False
    journal.note(EventKind.LOAD, "three")
    journal.close()
    assert written(tmp_path / "job-run" / "events-a.jsonl") == ["three"]


def test_no_link_is_followed(tmp_path: Path, lost: Lost) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / file_name("a")).symlink_to(tmp_path / "of-another")
    journal = a_journal(lost)
    journal.begin(tmp_path / "job")
    journal.note(EventKind.LOAD, "one")
    journal.close()
    assert lost.events == 1
    assert not (tmp_path / "of-another").exists()


def test_a_run_that_is_deleted_goes_with_its_events_and_not_before_the_agent_ends(
    tmp_path: Path, lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job-run"
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    journal = a_journal(lost)
    journal.begin(folder)
    for number in range(20):
        journal.note(EventKind.LOAD, str(number))
    flushed(journal)
    delete_run(folder)
    journal.close()
    assert folder.exists()
    delete_run(folder)
    assert not folder.exists()


# --- Saves


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [
        thread for thread in threading.enumerate() if thread.name == "log-files" and thread.is_alive()
    ]
