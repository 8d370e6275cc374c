"""What a job has printed on a node: which file is meant, who may read it, what is kept, and how commands show it."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import pytest

from elastic_agent.agent.output.log_files import RunFolder
from elastic_agent.health.http import Request
from elastic_agent.pool import job_logs
from elastic_agent.pool.commands.logs import (
    JobLog,
    RankLog,
    Unreadable,
    ask_daemon,
    nodes_of,
)
from elastic_agent.pool.job_logs import (
    KEPT_BEYOND,
    MARK,
    JobFolders,
    LogRequest,
    Piece,
    hold,
    prune,
    read_piece,
    split_piece,
)
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


def rank_file(root: Path, generation: int, text: str, *, rank: int = 0, run: str = "j-r1") -> Path:
    folder = root / "j" / run / f"gen{generation}" / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "stdout.log"
    file.write_text(text)
    return file


# --- Which file


def test_a_query_means_what_was_asked_for() -> None:
    for wanted in (LogRequest("j"), LogRequest("j", 7, 3, "stderr", 12)):
        query = dict(part.split("=") for part in wanted.target.partition("?")[2].split("&"))
        assert LogRequest.read(query) == wanted


@pytest.mark.parametrize(
    "query",
    [
        {"start": "-1"},
        {"start": "1e3"},
        {"rank": "x"},
        {"rank": ""},
        {"generation": "9" * 19},
        {"stream": "../../etc/passwd"},
    ],
)
def test_a_query_that_is_none_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        LogRequest.read({"job": "j", **query})


@pytest.mark.parametrize("job", ["..", ".", "", "a/b", "../j", "j\0", "x" * 129, "other", "-j"])
def test_only_the_folder_of_a_job_is_read(root: Path, job: str) -> None:
    begin(root, "j")
    (root / "other").mkdir()
    (root / "other/a.log").write_text("private")
    with pytest.raises(FileNotFoundError):
        read_piece(root, "a", LogRequest(job))


def test_what_cannot_be_read_is_no_failure_of_the_daemon(root: Path) -> None:
    begin(root, "j")
    (root / "j/a.log").unlink()
    (root / "j/a.log").symlink_to("/etc/passwd")
    status, _, text, _ = LogPage(root, "a", "t").answer(Request({"job": "j"}, "t"))
    assert status == HTTPStatus.SERVICE_UNAVAILABLE
    assert b"root" not in text


def test_a_link_is_no_file_of_a_job(root: Path, tmp_path: Path) -> None:
    begin(root, "j")
    secret = tmp_path / "secret"
    secret.write_text("private")
    (root / "j/a.log").unlink()
    (root / "j/a.log").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        read_piece(root, "a", LogRequest("j"))
    os.rename(root / "j", tmp_path / "moved")
    (root / "j").symlink_to(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        read_piece(root, "a", LogRequest("j"))


def test_a_pipe_in_the_place_of_a_file_holds_no_reader_up(root: Path) -> None:
    begin(root, "j")
    (root / "j/a.log").unlink()
    os.mkfifo(root / "j/a.log")
    assert split_piece(read_piece(root, "a", LogRequest("j"))) == (Piece(0, 0), b"")


def test_a_file_comes_in_pieces(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_logs, "MOST_BYTES", 3)
    begin(root, "j")
    assert split_piece(read_piece(root, "a", LogRequest("j"))) == (Piece(0, 5), b"of ")
    assert split_piece(read_piece(root, "a", LogRequest("j", 3))) == (Piece(3, 5), b"j\n")
    assert split_piece(read_piece(root, "a", LogRequest("j", 99))) == (Piece(99, 5), b"")


def test_the_newest_generation_of_a_rank_is_that_of_any_attempt(root: Path) -> None:
    begin(root, "j")
    assert split_piece(read_piece(root, "a", LogRequest("j", rank=0))) == (Piece(0, 0, 0), b"")
    rank_file(root, 1, "one")
    rank_file(root, 9, "nine", run="j-r2")
    rank_file(root, 10, "ten", run="j-r2")
    rank_file(root, 11, "of another", rank=1)
    (root / "j/j-r2/gen10/rank0/stdout.log").rename(root / "j/j-r2/gen10/rank0/stderr.log")
    rank_file(root, 12, "no run of this job", run="k-r1")
    (root / "j/j-r1/gen999x/rank0").mkdir(parents=True)
    assert split_piece(read_piece(root, "a", LogRequest("j", rank=0))) == (Piece(0, 0, 10), b"")
    found = read_piece(root, "a", LogRequest("j", rank=0, generation=9))
    assert split_piece(found) == (Piece(0, 4, 10), b"nine")


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


def test_nothing_is_deleted_where_the_disk_does_not_say_who_has_it_open(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    for age in range(KEPT_BEYOND + 1):
        begin(root, f"e{age:02}")
        os.utime(root / f"e{age:02}" / MARK, (age, age))
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", without_locks)
        prune(root, POOL, set())
    assert len(list(root.iterdir())) == KEPT_BEYOND + 1
    assert (root / "e00/a.log").exists()
    prune(root, POOL, set())
    assert not (root / "e00").exists()


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
    assert job_logs.job_folder(root, "j") is None


# --- How commands put it together


@dataclass
class Nodes:
    """What the daemons of some nodes have, in place of theirs."""

    files: dict[tuple[str, int | None, str, int], bytes] = field(default_factory=dict)
    """By node, rank, stream and generation."""
    silent: dict[str, str] = field(default_factory=dict)
    most: int = 1 << 20
    asked: int = 0

    def ask(self, node: PoolNode, wanted: LogRequest) -> tuple[Piece, bytes]:
        self.asked += 1
        if node.node in self.silent:
            raise Unreadable(self.silent[node.node])
        key = (node.node, wanted.rank, wanted.stream, wanted.generation)
        of_rank = [key[3] for key in self.files if key[:3] == (node.node, wanted.rank, wanted.stream)]
        if wanted.rank is None and key not in self.files:
            raise Unreadable("it has nothing of the job", lasting=True)
        data = self.files.get(key, b"")
        newest = max(of_rank, default=0) if wanted.rank is not None else 0
        return Piece(wanted.start, len(data), newest), data[wanted.start :][: self.most]


def view_of(*records: Record) -> PoolView:
    view = PoolView()
    entries = (Entry(one.key, one.to_json(), number, number) for number, one in enumerate(records, 1))
    view.read(Snapshot(99, tuple(entries)))
    return view


JOB = Job("j", "train.py", (), ("--", "train.py"), {}, "/", 2, 2, None, 0.0, "u")
A, B, C = (PoolNode(name, f"{name}1", "10.0.0.1", logs="/l") for name in "abc")
BOTH = Plan(2, (Run("j", 1, 0.0, (Seat("a", "a1", 1), Seat("b", "b1", 2))),))
ON_A = Plan(1, (Run("j", 1, 0.0, (Seat("a", "a1", 1),)),))
RUNNING = view_of(A, B, C, JOB, BOTH)


@dataclass
class Screen:
    shown: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b""})
    said: list[str] = field(default_factory=list)

    def show(self, stream: str, lines: bytes) -> None:
        self.shown[stream] += lines

    def take(self) -> bytes:
        found, self.shown["stdout"] = self.shown["stdout"], b""
        return found


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def nodes() -> Nodes:
    return Nodes({("a", None, "stdout", 0): b"1\n\n2\n", ("b", None, "stdout", 0): b"3\n4"})


def job_log(screen: Screen, nodes: Nodes) -> JobLog:
    return JobLog("j", screen.show, screen.said.append, nodes.ask)


def test_lines_of_several_nodes_have_their_names(screen: Screen, nodes: Nodes) -> None:
    log = job_log(screen, nodes)
    assert not log.read(RUNNING, all_of_it=True)
    assert log.found
    assert screen.take() == b"a: 1\na: \na: 2\nb: 3\n"
    log.finish()
    assert screen.take() == b"b: 4\n"
    assert not screen.said


def test_lines_of_one_node_have_no_name(screen: Screen, nodes: Nodes) -> None:
    job_log(screen, nodes).read(view_of(A, C, JOB, ON_A), all_of_it=True)
    assert screen.take() == b"1\n\n2\n"


def test_pieces_become_whole_lines(screen: Screen, nodes: Nodes) -> None:
    nodes.most = 1
    log, view = job_log(screen, nodes), view_of(A, JOB, ON_A)
    reads = [(log.read(view, all_of_it=False), screen.take()) for _ in range(6)]
    assert reads == [(True, b""), (True, b"1\n"), (True, b"\n"), (True, b""), (False, b"2\n"), (False, b"")]
    nodes.files["a", None, "stdout", 0] += b"5\n"
    assert (log.read(view, all_of_it=True), screen.take()) == (False, b"5\n")


def test_a_file_that_has_begun_anew_is_read_anew(screen: Screen, nodes: Nodes) -> None:
    log, view = job_log(screen, nodes), view_of(A, JOB, ON_A)
    log.read(view, all_of_it=True)
    nodes.files["a", None, "stdout", 0] = b"9\n"
    screen.take()
    for _ in range(2):
        log.read(view, all_of_it=False)
    assert screen.take() == b"9\n"


def test_a_node_that_does_not_answer_is_named_once_and_the_others_are_shown(
    screen: Screen, nodes: Nodes
) -> None:
    nodes.silent["b"] = "no answer from 10.0.0.1:9 within 3 s"
    log = job_log(screen, nodes)
    for _ in range(3):
        log.read(RUNNING, all_of_it=True)
    assert screen.take() == b"a: 1\na: \na: 2\n"
    assert screen.said == ["node b: no answer from 10.0.0.1:9 within 3 s; what it has is in /l/j/b.log there"]


def test_a_node_that_is_gone_is_named_with_the_place_of_its_part(screen: Screen, nodes: Nodes) -> None:
    result = JobResult("j", Outcome.FAILED, "why", 1, 1, 0.0, 0.0, ("a", "b"), {"b": "/l/j/b.log"})
    view = view_of(A, JOB, result)
    log = job_log(screen, nodes)
    log.read(view, all_of_it=True)
    assert nodes_of(view, "j") == ("a", "b")
    assert screen.take() == b"a: 1\na: \na: 2\n"
    assert screen.said == ["node b has left the pool; what it has is in /l/j/b.log there"]


def test_a_node_whose_part_is_lost_is_named_when_the_job_is_over(screen: Screen, nodes: Nodes) -> None:
    del nodes.files["b", None, "stdout", 0]
    log = job_log(screen, nodes)
    log.read(RUNNING, all_of_it=True)
    assert not screen.said, "it may be about to begin"
    result = JobResult("j", Outcome.SUCCEEDED, "", 0, 1, 0.0, 0.0, ("a", "b"))
    for _ in range(2):
        log.read(view_of(A, B, JOB, result), all_of_it=True)
    assert screen.said == ["node b: it has nothing of the job"]


def test_a_node_without_a_part_is_asked_once(screen: Screen, nodes: Nodes) -> None:
    log = job_log(screen, nodes)
    log.read(RUNNING, all_of_it=True)
    before = nodes.asked
    log.read(RUNNING, all_of_it=False)
    assert nodes.asked == before + 2


def rank_log(screen: Screen, nodes: Nodes) -> RankLog:
    return RankLog("j", 0, screen.show, screen.said.append, nodes.ask)


def test_a_rank_is_followed_to_its_newest_generation(screen: Screen) -> None:
    nodes = Nodes(
        {("a", 0, "stdout", 1): b"old\n", ("b", 0, "stdout", 2): b"out", ("b", 0, "stderr", 2): b"err\n"}
    )
    log = rank_log(screen, nodes)
    log.read(RUNNING, all_of_it=True)
    assert screen.shown == {"stdout": b"", "stderr": b"err\n"}
    nodes.files["b", 0, "stdout", 2] += b"put\nlast"
    nodes.files["a", 0, "stdout", 3] = b"new\n"
    log.read(RUNNING, all_of_it=True)
    assert screen.take() == b"output\nlast\nnew\n"
    assert screen.said == ["rank 0 of generation 2, on node b:", "rank 0 of generation 3, on node a:"]


def test_a_rank_that_no_node_has_is_not_found(screen: Screen, nodes: Nodes) -> None:
    log = rank_log(screen, nodes)
    assert not log.read(RUNNING, all_of_it=True)
    assert not log.found


def test_a_rank_whose_node_falls_silent_is_named(screen: Screen) -> None:
    nodes = Nodes({("a", 0, "stdout", 1): b"old\n"})
    log = rank_log(screen, nodes)
    log.read(RUNNING, all_of_it=True)
    nodes.silent["a"] = "gone"
    assert not log.read(RUNNING, all_of_it=False)
    assert screen.said[1:] == ["node a: gone; what it has is in /l/j there"]


@pytest.mark.parametrize(
    ("http", "expected"),
    [
        (None, r"answers on its own loopback only \(--http-address\)"),
        (Endpoint("127.0.0.1", 1), "no process listens at 127.0.0.1:1: its daemon has ended"),
    ],
)
def test_a_daemon_that_cannot_be_asked(http: Endpoint | None, expected: str) -> None:
    with pytest.raises(Unreadable, match=expected):
        ask_daemon(PoolNode("a", "a1", "10.0.0.1", http=http), LogRequest("j"))
