"""What a job has printed on a node: which file is meant, who may read it, what is kept, and how commands show it."""

from __future__ import annotations

import os
import threading
import time
from http import HTTPStatus
from pathlib import Path

import pytest

from elastic_agent.agent.common.http_client import NoAnswer
from elastic_agent.health.http import PageRequest
from elastic_agent.pool import logs as pool_logs
from elastic_agent.pool.logs import JobLogs, LogReader, ask_daemon, nodes_of
from elastic_agent.pool.records import (
    Allocation,
    Attempt,
    Job,
    JobResult,
    Outcome,
    Plan,
    PoolNode,
    PoolView,
    Record,
)
from elastic_agent.rendezvous.records import Endpoint
from elastic_agent.rendezvous.store.interface import Entry, Snapshot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def logs(root: Path) -> JobLogs:
    logs = JobLogs(root, "a", "t")
    with logs.begin("j") as output:
        output.write(b"of j\n")
    (root / "j.log").write_text("private")
    return logs


# --- What a daemon shows, and to whom


@pytest.mark.parametrize(
    ("query", "token", "status", "body"),
    [
        ({"job": "j"}, "t", HTTPStatus.OK, b"of j\n"),
        ({"job": "j", "start": "3"}, "t", HTTPStatus.OK, b"j\n"),
        ({"job": "j", "start": "99"}, "t", HTTPStatus.OK, b""),
        ({"job": "j"}, "", HTTPStatus.UNAUTHORIZED, None),
        ({"job": "j"}, "tt", HTTPStatus.UNAUTHORIZED, None),
        ({"job": "j"}, "\xe9", HTTPStatus.UNAUTHORIZED, None),
        *(({"job": job}, "t", HTTPStatus.OK, b"") for job in ("k", "", "../j", "/j", "x" * 129)),
        ({}, "t", HTTPStatus.OK, b""),
        ({"job": "j", "start": "x"}, "t", HTTPStatus.BAD_REQUEST, None),
        ({"job": "j", "start": "-1"}, "t", HTTPStatus.BAD_REQUEST, None),
        ({"job": "j", "start": "9" * 30}, "t", HTTPStatus.BAD_REQUEST, None),
    ],
)
def test_who_has_the_token_reads_the_log_of_a_job_and_nothing_else(
    logs: JobLogs, query: dict[str, str], token: str, status: int, body: bytes | None
) -> None:
    page = logs.page(PageRequest(query, token))
    assert page.status == status
    assert body is None or page.body == body


def test_what_lies_in_the_place_of_a_log_is_not_followed_and_holds_no_reader_up(
    logs: JobLogs, root: Path
) -> None:
    (root / "a/j.log").unlink()
    (root / "a/j.log").symlink_to("/etc/passwd")
    page = logs.page(PageRequest({"job": "j"}, "t"))
    assert page.status == HTTPStatus.BAD_REQUEST
    assert b"root" not in page.body
    (root / "a/j.log").unlink()
    os.mkfifo(root / "a/j.log")
    assert logs.read("j", 0) == b""


# --- What is kept


def test_the_newest_logs_are_kept_and_no_job_waits_for_the_disk_to_delete_the_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_logs, "KEPT", 3)
    moves, unlink, logs = threading.Event(), Path.unlink, JobLogs(root, "a", "t")
    monkeypatch.setattr(Path, "unlink", lambda path: unlink(path) if moves.wait(20.0) else None)
    began = time.monotonic()
    for age, job in enumerate(("oldest", "old", "new", "newest")):
        logs.begin(job).close()
        if job != "newest":
            os.utime(root / "a" / f"{job}.log", (age, age))
    (root / "a/notes.txt").write_text("of a person")
    assert time.monotonic() - began < 10.0
    moves.set()
    while (left := {path.name for path in (root / "a").iterdir()}) != {
        "old.log",
        "new.log",
        "newest.log",
        "notes.txt",
    }:
        assert time.monotonic() < began + 20.0, left
        time.sleep(0.01)


# --- How commands put it together

JOB = Job("j", "train.py", (), ("--", "train.py"), {}, "/", 2, 2, 0.0, "u")
A, B = (PoolNode(name, f"{name}1") for name in "ab")
BOTH = Plan(2, (Attempt("j", 1, 0.0, (Allocation("a", "a1", 1), Allocation("b", "b1", 2))),))
ON_A = Plan(1, (Attempt("j", 1, 0.0, (Allocation("a", "a1", 1),)),))


def view_of(*records: Record) -> PoolView:
    view = PoolView()
    entries = (Entry(one.key, one.to_json(), number, number) for number, one in enumerate(records, 1))
    view.read(Snapshot(99, tuple(entries)))
    return view


RUNNING = view_of(A, B, JOB, BOTH)
Screen = pytest.CaptureFixture[bytes]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the daemons have. One that has none does not answer."""
    files = {"a": b"1\n\n2\n", "b": b"3\n4"}

    def ask(node: PoolNode, job: str, start: int) -> bytes:
        if node.node not in files:
            raise NoAnswer("no answer within 3 s")
        return files[node.node][start:][: pool_logs.MOST_BYTES]

    monkeypatch.setattr(pool_logs, "ask_daemon", ask)
    return files


def test_lines_of_all_nodes_are_shown_once_they_have_ended(
    files: dict[str, bytes], capsysbinary: Screen
) -> None:
    log = LogReader("j")
    assert not log.read(RUNNING)
    assert log.found
    assert capsysbinary.readouterr() == (b"1\n\n2\n3\n", b"")
    log.read(RUNNING)
    files["b"] += b"5\n6"
    for _ in range(2):
        log.read(RUNNING)
    assert capsysbinary.readouterr() == (b"45\n", b"")


def test_pieces_become_whole_lines(
    files: dict[str, bytes], capsysbinary: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_logs, "MOST_BYTES", 4)
    files["a"] = b"1\n23\n4567890\n"
    log, view = LogReader("j"), view_of(A, JOB, ON_A)
    reads = [(log.read(view), capsysbinary.readouterr().out) for _ in range(5)]
    assert reads == [(True, b"1\n"), (True, b"23\n"), (True, b"4567"), (True, b"890\n"), (False, b"")]


def test_a_node_that_does_not_answer_or_is_gone_is_named_once_and_the_others_are_shown(
    files: dict[str, bytes], capsysbinary: Screen
) -> None:
    del files["b"]
    log = LogReader("j")
    for _ in range(3):
        log.read(RUNNING)
    said = b"node b cannot be read: no answer within 3 s\n"
    assert capsysbinary.readouterr() == (b"1\n\n2\n", said)
    view = view_of(A, JOB, JobResult("j", Outcome.FAILED, "why", 1, 1, 0.0, 0.0, ("a", "b")))
    LogReader("j").read(view)
    assert nodes_of(view, "j") == ("a", "b")
    said = b"node b has left the pool; what it has is in its daemon's --log-dir\n"
    assert capsysbinary.readouterr() == (b"1\n\n2\n", said)


@pytest.mark.parametrize(
    ("http", "error", "expected"),
    [
        (None, NoAnswer, r"answers on its own loopback only \(--http-address\)"),
        (Endpoint("127.0.0.1", 1), OSError, "refused"),
    ],
)
def test_a_daemon_that_cannot_be_asked(http: Endpoint | None, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        ask_daemon(PoolNode("a", "a1", http=http), "j", 0)
