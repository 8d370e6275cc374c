"""What a job has printed on a node: which file is meant, who may read it, what is kept, and how commands show it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import pytest

from elastic_agent.agent.output.log_files import RunFolder
from elastic_agent.health.http import Request
from elastic_agent.pool import job_logs
from elastic_agent.pool.commands import logs
from elastic_agent.pool.commands.logs import JobLog, Unreadable, ask_daemon, nodes_of
from elastic_agent.pool.job_logs import KEPT_BEYOND, MARK, JobFolders, hold, prune, read_piece
from elastic_agent.pool.pages import LogPage
from elastic_agent.pool.records import Job, JobResult, Outcome, Plan, PoolNode, PoolView, Record, Run, Seat
from elastic_agent.rendezvous.records import Endpoint
from elastic_agent.rendezvous.store.interface import Entry, Snapshot

POOL = "pool at local:///x"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "logs"


def begin(root: Path, job: str, pool: str = POOL) -> None:
    JobFolders(root, pool, "a").begin(job).write_bytes(f"of {job}\n".encode())


# --- Which file


@pytest.mark.parametrize("job", ["..", ".", "", "a/b", "../j", "j\0", "x" * 129, "other", "-j"])
def test_only_the_folder_of_a_job_is_read(root: Path, job: str) -> None:
    begin(root, "j")
    (root / "other").mkdir()
    (root / "other/a.log").write_text("private")
    with pytest.raises(FileNotFoundError):
        read_piece(root, "a", job, 0)


def test_what_cannot_be_read_is_no_failure_of_the_daemon(root: Path) -> None:
    begin(root, "j")
    (root / "j/a.log").unlink()
    (root / "j/a.log").symlink_to("/etc/passwd")
    status, _, text, _ = LogPage(root, "a", "t").answer(Request({"job": "j"}, "t"))
    assert status == HTTPStatus.BAD_REQUEST
    assert b"root" not in text


def test_a_link_is_no_file_of_a_job(root: Path, tmp_path: Path) -> None:
    begin(root, "j")
    secret = tmp_path / "secret"
    secret.write_text("private")
    (root / "j/a.log").unlink()
    (root / "j/a.log").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        read_piece(root, "a", "j", 0)
    os.rename(root / "j", tmp_path / "moved")
    (root / "j").symlink_to(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        read_piece(root, "a", "j", 0)


def test_a_pipe_in_the_place_of_a_file_holds_no_reader_up(root: Path) -> None:
    begin(root, "j")
    (root / "j/a.log").unlink()
    os.mkfifo(root / "j/a.log")
    assert read_piece(root, "a", "j", 0) == b""


def test_a_file_comes_in_pieces(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_logs, "MOST_BYTES", 3)
    begin(root, "j")
    assert [read_piece(root, "a", "j", start) for start in (0, 3, 99)] == [b"of ", b"j\n", b""]


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
def test_only_who_has_the_token_reads(root: Path, query: dict[str, str], token: str, status: int) -> None:
    begin(root, "j")
    assert LogPage(root, "a", "t").answer(Request(query, token))[0] == status


# --- What is kept


def test_folders_of_forgotten_jobs_go_but_for_the_newest(root: Path) -> None:
    ended = [f"e{number:02}" for number in range(KEPT_BEYOND + 3)]
    for age, job in enumerate((*ended, "known", "elsewhere", "runs")):
        pool = "another pool" if job == "elsewhere" else POOL
        begin(root, job, pool=pool)
        rank = root / job / f"{job}-r1"
        run = RunFolder(rank)
        run.hold()
        run.release()
        (rank / "gen1/rank0").mkdir(parents=True)
        os.utime(root / job / MARK, (age, age))
    output = JobFolders(root, POOL, "b").begin("runs").open("ab")
    hold(output.fileno())
    os.utime(root / "runs" / MARK, (0, 0))
    (root / "mine").mkdir()
    (root / "file").write_text("")
    (root / ended[1] / "notes.txt").write_text("of a person")
    with output:
        prune(root, POOL, {"known"})
    left = {path.name for path in root.iterdir()}
    assert left == {*ended[1:2], *ended[4:], "known", "elsewhere", "runs", "mine", "file"} | {ended[3]}
    assert {path.name for path in (root / ended[1]).iterdir()} == {"notes.txt", MARK}


def test_a_job_whose_name_leads_elsewhere_does_not_begin(root: Path) -> None:
    for job in ("..", ".hidden", "a/b"):
        with pytest.raises(OSError, match="no name for a folder"):
            JobFolders(root, POOL, "a").begin(job)
    assert not root.exists()


def test_tidying_does_without_a_disk(root: Path) -> None:
    folders = JobFolders(root, POOL, "a")
    folders.tidy(set())
    assert folders._tidying is not None
    folders._tidying.join(10.0)


# --- How commands put it together


@dataclass
class Nodes:
    """What the daemons of some nodes have, in place of theirs."""

    files: dict[str, bytes] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)

    def ask(self, node: PoolNode, job: str, start: int) -> bytes:
        if node.node in self.silent:
            raise Unreadable(self.silent[node.node])
        return self.files.get(node.node, b"")[start:][: logs.MOST_BYTES]


def view_of(*records: Record) -> PoolView:
    view = PoolView()
    entries = (Entry(one.key, one.to_json(), number, number) for number, one in enumerate(records, 1))
    view.read(Snapshot(99, tuple(entries)))
    return view


JOB = Job("j", "train.py", (), ("--", "train.py"), {}, "/", 2, 2, 0.0, "u")
A, B, C = (PoolNode(name, f"{name}1", "10.0.0.1") for name in "abc")
BOTH = Plan(2, (Run("j", 1, 0.0, (Seat("a", "a1", 1), Seat("b", "b1", 2))),))
ON_A = Plan(1, (Run("j", 1, 0.0, (Seat("a", "a1", 1),)),))
RUNNING = view_of(A, B, C, JOB, BOTH)


@dataclass
class Screen:
    shown: bytes = b""
    said: list[str] = field(default_factory=list)

    def show(self, lines: bytes) -> None:
        self.shown += lines

    def take(self) -> bytes:
        found, self.shown = self.shown, b""
        return found


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def nodes() -> Nodes:
    return Nodes({"a": b"1\n\n2\n", "b": b"3\n4"})


def job_log(screen: Screen, nodes: Nodes) -> JobLog:
    return JobLog("j", screen.show, screen.said.append, nodes.ask)


def test_lines_of_several_nodes_have_their_names(screen: Screen, nodes: Nodes) -> None:
    log = job_log(screen, nodes)
    assert not log.read(RUNNING)
    assert log.found
    assert screen.take() == b"a: 1\na: \na: 2\nb: 3\n"
    log.finish()
    assert screen.take() == b"b: 4\n"
    assert not screen.said


def test_lines_of_one_node_have_no_name(screen: Screen, nodes: Nodes) -> None:
    job_log(screen, nodes).read(view_of(A, C, JOB, ON_A))
    assert screen.take() == b"1\n\n2\n"


def test_pieces_become_whole_lines(screen: Screen, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_BYTES", 1)
    log, view = job_log(screen, nodes), view_of(A, JOB, ON_A)
    reads = [(log.read(view), screen.take()) for _ in range(6)]
    assert reads == [(True, b""), (True, b"1\n"), (True, b"\n"), (True, b""), (True, b"2\n"), (False, b"")]


def test_a_node_that_does_not_answer_is_named_once_and_the_others_are_shown(
    screen: Screen, nodes: Nodes
) -> None:
    nodes.silent["b"] = "no answer from 10.0.0.1:9 within 3 s"
    log = job_log(screen, nodes)
    for _ in range(3):
        log.read(RUNNING)
    assert screen.take() == b"a: 1\na: \na: 2\n"
    assert screen.said == ["node b cannot be read: no answer from 10.0.0.1:9 within 3 s"]


def test_a_node_that_is_gone_is_named(screen: Screen, nodes: Nodes) -> None:
    result = JobResult("j", Outcome.FAILED, "why", 1, 1, 0.0, 0.0, ("a", "b"))
    view = view_of(A, JOB, result)
    log = job_log(screen, nodes)
    log.read(view)
    assert nodes_of(view, "j") == ("a", "b")
    assert screen.take() == b"a: 1\na: \na: 2\n"
    assert screen.said == ["node b has left the pool; what it has is in its daemon's --log-dir"]


@pytest.mark.parametrize(
    ("http", "expected"),
    [
        (None, r"answers on its own loopback only \(--http-address\)"),
        (Endpoint("127.0.0.1", 1), "no answer from 127.0.0.1:1: .*refused"),
    ],
)
def test_a_daemon_that_cannot_be_asked(http: Endpoint | None, expected: str) -> None:
    with pytest.raises(Unreadable, match=expected):
        ask_daemon(PoolNode("a", "a1", "10.0.0.1", http=http), "j", 0)
