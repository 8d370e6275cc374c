"""What a job has printed on a node: which file is meant, who may read it, what is kept, and how commands show it."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import subprocess
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import IO

import pytest

from elastic_agent.health.http import PageRequest
from elastic_agent.pool import commands, job_agent
from elastic_agent.pool.commands import JobLog, Unreadable, ask_daemon, nodes_of
from elastic_agent.pool.job_agent import JobAgent, JobLogs
from elastic_agent.pool.pages import DaemonPages, PoolMetrics
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
from elastic_agent.pool.standby import AgentCommand, Standby
from elastic_agent.rendezvous.records import Endpoint
from elastic_agent.rendezvous.store.interface import Entry, Snapshot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def logs(root: Path) -> JobLogs:
    logs = JobLogs(root, "a")
    with logs.begin("j") as output:
        output.write(b"of j\n")
    return logs


def page_of(logs: JobLogs) -> DaemonPages:
    return DaemonPages(PoolMetrics("p", "a"), "a", logs, "t", time.monotonic)


# --- Which file


@pytest.mark.parametrize("job", ["..", ".", "", "a/b", "../j", "j\0", "x" * 129, "other", "-j"])
def test_only_the_log_of_a_job_is_read(logs: JobLogs, root: Path, job: str) -> None:
    (root / "j.log").write_text("private")
    with pytest.raises(FileNotFoundError):
        logs.read(job, 0)


def test_what_cannot_be_read_is_no_failure_of_the_daemon(logs: JobLogs, root: Path) -> None:
    (root / "a/j.log").unlink()
    (root / "a/j.log").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic link"):
        logs.read("j", 0)
    status, _, text, _ = page_of(logs).job_log(PageRequest({"job": "j"}, "t"))
    assert status == HTTPStatus.BAD_REQUEST
    assert b"root" not in text


def test_a_pipe_in_the_place_of_a_file_holds_no_reader_up(logs: JobLogs, root: Path) -> None:
    (root / "a/j.log").unlink()
    os.mkfifo(root / "a/j.log")
    assert logs.read("j", 0) == b""


def test_a_file_comes_in_pieces(logs: JobLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_agent, "MOST_LOG_BYTES", 3)
    assert [logs.read("j", start) for start in (0, 3, 99)] == [b"of ", b"j\n", b""]


# --- Who may read


@pytest.mark.parametrize(
    ("query", "token", "status"),
    [
        ({"job": "j"}, "t", HTTPStatus.OK),
        ({"job": "j"}, "", HTTPStatus.UNAUTHORIZED),
        ({"job": "j"}, "tt", HTTPStatus.UNAUTHORIZED),
        ({"job": "j"}, "\xe9", HTTPStatus.UNAUTHORIZED),
        ({"job": "k"}, "t", HTTPStatus.NOT_FOUND),
        ({}, "t", HTTPStatus.NOT_FOUND),
        ({"job": "j", "start": "x"}, "t", HTTPStatus.BAD_REQUEST),
        ({"job": "j", "start": "-1"}, "t", HTTPStatus.BAD_REQUEST),
        ({"job": "j", "start": "9" * 30}, "t", HTTPStatus.BAD_REQUEST),
    ],
)
def test_only_who_has_the_token_reads(logs: JobLogs, query: dict[str, str], token: str, status: int) -> None:
    assert page_of(logs).job_log(PageRequest(query, token))[0] == status


# --- What is kept


def test_the_newest_logs_are_kept_and_those_of_jobs_that_go_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_agent, "KEPT", 4)
    logs = JobLogs(root, "a")
    with logs.begin("goes_on"):
        for age, job in enumerate(("oldest", "old", "new", "newer")):
            logs.begin(job).close()
            os.utime(root / "a" / f"{job}.log", (age, age))
        os.utime(root / "a/goes_on.log", (0, 0))
        (root / "a/notes.txt").write_text("of a person")
        logs.begin("newest").close()
        wanted = {"goes_on.log", "old.log", "new.log", "newer.log", "newest.log", "notes.txt"}
        deadline = time.monotonic() + 20.0
        while (left := {path.name for path in (root / "a").iterdir()}) != wanted:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


def test_no_job_waits_for_the_disk_to_delete_old_logs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves, logs = threading.Event(), JobLogs(root, "a")
    monkeypatch.setattr(job_agent, "KEPT", 1)
    monkeypatch.setattr(job_agent, "_is_held", lambda log: not moves.wait(20.0))
    began = time.monotonic()
    for job in ("one", "two"):
        logs.begin(job).close()
    assert time.monotonic() - began < 10.0
    moves.set()


def test_a_job_whose_name_leads_elsewhere_does_not_begin(root: Path) -> None:
    for job in ("..", ".hidden", "a/b"):
        with pytest.raises(OSError, match="no name for a file"):
            JobLogs(root, "a").begin(job)
    assert not root.exists()


# --- Which have processes here still


def test_a_job_is_unfinished_while_a_process_has_its_output_open(tmp_path: Path) -> None:
    earlier = JobLogs(tmp_path, "a")
    for job in ("one", "two"):
        with earlier.begin(job) as output:
            if job == "one":
                child = subprocess.Popen(["sleep", "600"], stdout=output)
    other = JobLogs(tmp_path, "b")
    assert other.unfinished() == (), "another node's"
    later = JobLogs(tmp_path, "a")
    assert later.unfinished() == ("one",)
    assert later.unfinished() == ("one",)
    child.kill()
    child.wait()
    assert later.unfinished() == ()
    assert JobLogs(tmp_path / "none", "a").unfinished() == ()


def test_a_job_is_found_on_nfs_which_asks_how_a_file_that_is_locked_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def flock_of_nfs(file: int, operation: int) -> None:
        forbidden = os.O_WRONLY if operation & fcntl.LOCK_SH else os.O_RDONLY
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == forbidden:
            raise OSError(errno.EBADF, "bad file descriptor")
        flock(file, operation)

    def start_child(*_: object, stdout: IO[bytes], **__: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], stdout=stdout)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    monkeypatch.setattr("elastic_agent.pool.job_agent.start_child", start_child)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with JobLogs(tmp_path, "a").begin("one") as output:
        command = AgentCommand((), {}, str(tmp_path))
        agent = JobAgent(
            command, output, Standby((), "", {}, time.monotonic), lambda code, error: ended.put(code)
        )
    try:
        assert JobLogs(tmp_path, "a").unfinished() == ("one",)
    finally:
        agent.leave()
        ended.get(timeout=20.0)


# --- How commands put it together


@dataclass
class Nodes:
    """What the daemons of some nodes have, in place of theirs."""

    files: dict[str, bytes] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)

    def ask(self, node: PoolNode, job: str, start: int) -> bytes:
        if node.node in self.silent:
            raise Unreadable(self.silent[node.node])
        return self.files.get(node.node, b"")[start:][: commands.MOST_LOG_BYTES]


def view_of(*records: Record) -> PoolView:
    view = PoolView()
    entries = (Entry(one.key, one.to_json(), number, number) for number, one in enumerate(records, 1))
    view.read(Snapshot(99, tuple(entries)))
    return view


JOB = Job("j", "train.py", (), ("--", "train.py"), {}, "/", 2, 2, 0.0, "u")
A, B, C = (PoolNode(name, f"{name}1") for name in "abc")
BOTH = Plan(2, (Attempt("j", 1, 0.0, (Allocation("a", "a1", 1), Allocation("b", "b1", 2))),))
ON_A = Plan(1, (Attempt("j", 1, 0.0, (Allocation("a", "a1", 1),)),))
RUNNING = view_of(A, B, C, JOB, BOTH)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes({"a": b"1\n\n2\n", "b": b"3\n4"})
    monkeypatch.setattr(commands, "ask_daemon", nodes.ask)
    return nodes


Screen = pytest.CaptureFixture[bytes]


def test_whole_lines_of_all_nodes_are_shown_and_at_last_one_that_has_not_ended(
    nodes: Nodes, capsysbinary: Screen
) -> None:
    log = JobLog("j")
    assert not log.read(RUNNING, last=False)
    assert log.found
    assert capsysbinary.readouterr() == (b"1\n\n2\n3\n", b"")
    log.read(RUNNING, last=False)
    nodes.files["b"] += b"5\n6"
    log.read(RUNNING, last=False)
    assert capsysbinary.readouterr().out == b"45\n"
    for _ in range(2):
        log.read(RUNNING, last=True)
    assert capsysbinary.readouterr() == (b"6\n", b"")


def test_pieces_become_whole_lines(
    nodes: Nodes, capsysbinary: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "MOST_LOG_BYTES", 4)
    nodes.files = {"a": b"1\n23\n4567890\n"}
    log, view = JobLog("j"), view_of(A, JOB, ON_A)
    reads = [(log.read(view, last=False), capsysbinary.readouterr().out) for _ in range(5)]
    assert reads == [(True, b"1\n"), (True, b"23\n"), (True, b"4567"), (True, b"890\n"), (False, b"")]


def test_a_node_that_does_not_answer_is_named_once_and_the_others_are_shown(
    nodes: Nodes, capsysbinary: Screen
) -> None:
    nodes.silent["b"] = "no answer from 10.0.0.1:9 within 3 s"
    log = JobLog("j")
    for _ in range(3):
        log.read(RUNNING, last=False)
    said = b"node b cannot be read: no answer from 10.0.0.1:9 within 3 s\n"
    assert capsysbinary.readouterr() == (b"1\n\n2\n", said)


def test_a_node_that_is_gone_is_named(nodes: Nodes, capsysbinary: Screen) -> None:
    result = JobResult("j", Outcome.FAILED, "why", 1, 1, 0.0, 0.0, ("a", "b"))
    view = view_of(A, JOB, result)
    JobLog("j").read(view, last=False)
    assert nodes_of(view, "j") == ("a", "b")
    said = b"node b has left the pool; what it has is in its daemon's --log-dir\n"
    assert capsysbinary.readouterr() == (b"1\n\n2\n", said)


@pytest.mark.parametrize(
    ("http", "expected"),
    [
        (None, r"answers on its own loopback only \(--http-address\)"),
        (Endpoint("127.0.0.1", 1), "no answer from 127.0.0.1:1: .*refused"),
    ],
)
def test_a_daemon_that_cannot_be_asked(http: Endpoint | None, expected: str) -> None:
    with pytest.raises(Unreadable, match=expected):
        ask_daemon(PoolNode("a", "a1", http=http), "j", 0)
