"""Worker logs with real pipes: what goes in comes out in file, console and tail, and no fault stops a worker."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import elastic_agent.agent.output.console as console_module
import elastic_agent.agent.output.log_files as log_files_module
from elastic_agent.agent.output.console import Console
from elastic_agent.agent.output.log_files import LogFiles
from elastic_agent.agent.output.worker_logs import TAIL_LINES, OutputRoute, WorkerLogs
from tests.waiting import wait_for

PATIENCE_S = 20.0
ROUTES = (OutputRoute("[n1/0] "),) * 2


eventually = partial(wait_for, what="the logs to have it", within_s=PATIENCE_S, every_s=0.002)


def drained(logs: WorkerLogs, generation: int, rank: int, within_s: float = PATIENCE_S) -> bool:
    done = threading.Event()
    logs.drain(generation, rank, done.set)
    return done.wait(within_s)


def started(console: Console) -> Console:
    console.start()
    return console


class Logs(WorkerLogs):
    """With files of its own, which end with it."""

    def __init__(
        self,
        directory: Path | None,
        node: str,
        console: Console,
        lost: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.files = LogFiles()
        super().__init__(directory, node, console, self.files, lost)

    def start(self) -> None:
        self.files.start()
        super().start()

    def close(self, timeout_s: float = 2.0) -> None:
        super().close(timeout_s)
        self.files.close(timeout_s)


class Rig:
    """`WorkerLogs` whose console is two files, and pipes that play workers."""

    def __init__(
        self, directory: Path | None, console: Path, lost: Callable[[int], None] = lambda size: None
    ) -> None:
        self.directory = directory / "job-run" if directory is not None else None
        self.console = console
        self._out = (console / "out").open("wb", buffering=0)
        self._err = (console / "err").open("wb", buffering=0)
        self.shown = started(Console("n1", self._out.fileno(), self._err.fileno()))
        self.logs = Logs(directory, "n1", self.shown, lost)
        self.logs.start()
        self.logs.begin("job", "run", 1)

    def close(self) -> None:
        self.logs.close()
        self.shown.close(PATIENCE_S)

    def worker(self, generation: int = 1, rank: int = 0, **route: Any) -> tuple[int, int]:
        (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
        routes = (OutputRoute(f"[n1/{rank}] ", **route),) * 2
        self.logs.attach(generation, rank, (out_read, err_read), routes)
        return out_write, err_write

    def out(self) -> bytes:
        return (self.console / "out").read_bytes()

    def err(self) -> bytes:
        return (self.console / "err").read_bytes()

    def file(self, name: str, generation: int = 1, rank: int = 0) -> bytes:
        assert self.directory is not None
        path = self.directory / f"gen{generation}" / f"rank{rank}" / f"{name}.log"
        return path.read_bytes() if path.exists() else b""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "logs", tmp_path)
    yield rig
    rig.close()


def test_each_stream_goes_to_its_file_as_it_is_and_to_its_console_with_the_prefix(rig: Rig) -> None:
    out, err = rig.worker(generation=3, rank=5)
    os.write(out, b"hello\nworld\n")
    os.write(err, b"warning \xff\n")
    eventually(lambda: rig.out() == b"[n1/5] hello\n[n1/5] world\n" and rig.err() == b"[n1/5] warning \xff\n")
    assert drained(rig.logs, 3, 5)
    assert rig.file("stdout", 3, 5) == b"hello\nworld\n"
    assert rig.file("stderr", 3, 5) == b"warning \xff\n"
    assert rig.logs.log_file(3, 5) == rig.directory / "gen3" / "rank5" / "stderr.log"  # type: ignore[operator]
    assert rig.logs.log_file(3, 6) is None


def test_a_route_leaves_out_the_console_or_the_file(rig: Rig) -> None:
    silent, _ = rig.worker(rank=0, console=False)
    shown, _ = rig.worker(rank=1, file=False)
    assert rig.logs.log_file(1, 1) is None
    nowhere, _ = rig.worker(rank=2, file=False, console=False)
    for out in (silent, shown, nowhere):
        os.write(out, b"hello\n")
    for rank in range(3):
        assert drained(rig.logs, 1, rank)
        assert rig.logs.tail(1, rank) == ("hello",), "the report of a failure has it in any case"
    eventually(lambda: rig.out() == b"[n1/1] hello\n")
    assert [rig.file("stdout", rank=rank) for rank in range(3)] == [b"hello\n", b"", b""]


def test_lines_that_are_looked_for_are_copied_with_their_prefix(rig: Rig) -> None:
    (zero, err), (one, _) = (rig.worker(generation=2, rank=rank, copied=("loss", "nan")) for rank in (0, 1))
    os.write(zero, b"loss 1\nother\n")
    assert drained(rig.logs, 2, 0)
    os.write(one, b"is nan\n\r 1% loss 2\r 2% loss 3\n")
    os.write(err, b"loss of sleep\n")
    assert drained(rig.logs, 2, 0)
    assert drained(rig.logs, 2, 1)
    folder = "node-n1"
    assert rig.directory is not None
    found = {path.name: path.read_bytes() for path in (rig.directory / "gen2" / folder).iterdir()}
    assert found == {
        "filtered_stdout.log": b"[n1/0] loss 1\n[n1/1] is nan\n[n1/1]  2% loss 3\n",
        "filtered_stderr.log": b"[n1/0] loss of sleep\n",
    }


def test_of_a_bar_that_is_drawn_often_little_is_shown(rig: Rig) -> None:
    out, _ = rig.worker()
    for percent in range(100):
        os.write(out, b"\r%d%%" % percent)
    eventually(lambda: rig.out().startswith(b"[n1/0] "))
    assert drained(rig.logs, 1, 0)
    eventually(lambda: rig.out().endswith(b"[n1/0] 99%\n"))
    assert rig.out().count(b"\n") < 5
    assert rig.file("stdout") == b"".join(b"\r%d%%" % percent for percent in range(100))


def test_a_last_line_without_newline_is_shown_at_end_of_file_and_at_detach(rig: Rig) -> None:
    out, err = rig.worker()
    os.write(out, b"ended")
    os.close(out)
    eventually(lambda: rig.out() == b"[n1/0] ended\n")
    os.write(err, b"detached")
    rig.logs.detach_generation(1)
    eventually(lambda: rig.err() == b"[n1/0] detached\n")
    eventually(lambda: rig.file("stderr") == b"detached")


def test_detach_closes_the_pipes_of_that_generation_only(rig: Rig) -> None:
    old, _ = rig.worker(generation=1)
    new, _ = rig.worker(generation=2)
    rig.logs.detach_generation(1)

    def refused() -> bool:
        try:
            os.write(old, b"into the void\n")
        except BrokenPipeError:
            return True
        return False

    eventually(refused)
    os.write(new, b"alive\n")
    eventually(lambda: b"[n1/0] alive\n" in rig.out())
    folder = rig.directory
    assert folder is not None
    eventually(lambda: sorted(path.name for path in folder.glob("gen*")) == ["gen1", "gen2"])


def test_drain_reads_what_a_dead_worker_wrote_though_a_grandchild_holds_the_pipe_open(rig: Rig) -> None:
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    rig.logs.attach(1, 0, (out_read, err_read), ROUTES)
    script = "sleep 60 & echo $! >&1; for i in $(seq 500); do echo line $i >&2; done; printf last >&2"
    worker = subprocess.Popen(["sh", "-c", script], stdout=out_write, stderr=err_write)
    os.close(out_write)
    os.close(err_write)
    worker.wait(PATIENCE_S)
    try:
        assert drained(rig.logs, 1, 0)
        assert rig.logs.tail(1, 0)[-2:] == ("line 500", "last")
        assert rig.file("stderr").endswith(b"line 500\nlast")
    finally:
        os.kill(int(rig.file("stdout")), 9)


def test_drain_ends_though_another_process_writes_without_end(rig: Rig) -> None:
    _, err = rig.worker()
    stop = threading.Event()

    def chatter() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                os.write(err, b"y\n" * 32768)

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        assert drained(rig.logs, 1, 0)
    finally:
        stop.set()
        thread.join()


def test_the_tail_is_the_last_lines_of_stderr_with_the_newest_state_of_a_bar(rig: Rig) -> None:
    out, err = rig.worker()
    os.write(out, b"result\n")
    assert drained(rig.logs, 1, 0)
    assert rig.logs.tail(1, 0) == ("result",), "stdout, as long as stderr is empty"
    for i in range(TAIL_LINES + 10):
        os.write(err, b"line %d\n" % i)
    for i in range(1000):
        os.write(err, b"\rstep %d" % i)
    os.write(err, b"\nbad \xff byte\n" + b"x" * 100_000)
    assert drained(rig.logs, 1, 0)
    tail = rig.logs.tail(1, 0)
    assert len(tail) == TAIL_LINES
    assert tail[-5:-2] == (f"line {TAIL_LINES + 9}", "step 999", r"bad \xff byte")
    assert max(map(len, tail)) <= 2048
    assert rig.err().count(b"step ") <= 3, "on the console, too, a state takes the place of the one before"


def test_a_line_that_would_mislead_is_in_the_file_only(rig: Rig) -> None:
    _, err = rig.worker()
    rig.logs.leave_out(b"port 7 is taken.")
    os.write(err, b"[E1] port 7 is taken.\n[E2] port 70 is taken.\n")
    assert drained(rig.logs, 1, 0)
    assert rig.logs.tail(1, 0) == ("[E2] port 70 is taken.",)
    assert rig.file("stderr") == b"[E1] port 7 is taken.\n[E2] port 70 is taken.\n"
    eventually(lambda: rig.err() == b"[n1/0] [E2] port 70 is taken.\n")
    os.close(err)


def test_eight_workers_that_write_at_once_lose_nothing(rig: Rig) -> None:
    lines, ranks = 5000, range(8)

    def write(rank: int, fd: int) -> None:
        text = b"".join(b"%d:%d %s\n" % (rank, i, b"." * (i % 97)) for i in range(lines))
        for at in range(0, len(text), 777):
            os.write(fd, text[at : at + 777])
        os.close(fd)

    threads = [threading.Thread(target=write, args=(rank, rig.worker(rank=rank)[0])) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    eventually(lambda: rig.out().count(b"\n") == lines * len(ranks))
    shown = rig.out().splitlines()
    for rank in ranks:
        expected = [b"%d:%d %s" % (rank, i, b"." * (i % 97)) for i in range(lines)]
        assert drained(rig.logs, 1, rank)
        assert rig.file("stdout", rank=rank).splitlines() == expected
        prefix = b"[n1/%d] " % rank
        assert [line[len(prefix) :] for line in shown if line.startswith(prefix)] == expected


def disk_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "worker log" in record.getMessage()]


def test_a_disk_that_does_not_answer_costs_the_main_thread_no_wait(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "logs", tmp_path)
    disk_answers = threading.Event()
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        for rank in range(8):
            rig.worker(rank=rank)
        rig.logs.files.do(lambda: disk_answers.wait() and None)  # what the thread does when a write hangs
        for rank in range(8):
            rig.logs.drain(1, rank, partial(done.put, rank))
        assert rig.logs.folder(1, "flight_records") == tmp_path / "logs/job-run/gen1/flight_records"
        rig.logs.log_file(1, 0)
        assert done.empty(), "all calls have returned, and the disk has not answered"
        disk_answers.set()
        assert [done.get(timeout=PATIENCE_S) for _ in range(8)] == list(range(8)), "in the order of the calls"
        eventually((tmp_path / "logs/job-run/gen1/flight_records").is_dir)
    finally:
        disk_answers.set()
        rig.close()


def test_a_disk_that_does_not_answer_stops_no_worker_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(console_module, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(log_files_module, "PATIENCE_S", 0.05)
    lost: list[int] = []
    rig = Rig(tmp_path / "logs", tmp_path, lost.append)
    disk_answers = threading.Event()
    try:
        out, _ = rig.worker()
        os.write(out, b"first\n")
        assert drained(rig.logs, 1, 0)
        rig.logs.files.do(lambda: disk_answers.wait() and None)
        writer = write_numbered_lines(out)
        writer.join(PATIENCE_S)
        assert not writer.is_alive(), "the worker waits for the disk"
        eventually(lambda: rig.out().count(b"\n") == 1 + NUMBERED)
        eventually(lambda: "stands still" in caplog.text)
        disk_answers.set()
        eventually(lambda: drained(rig.logs, 1, 0))
        os.write(out, b"moves again\n")
        assert drained(rig.logs, 1, 0)
        kept = rig.file("stdout").removesuffix(b"moves again\n")
        assert b"".join([b"first\n", *(b"%099d\n" % i for i in range(NUMBERED))]).startswith(kept)
        assert sum(lost) == NUMBERED * 100 - (len(kept) - len(b"first\n"))
        assert caplog.text.count("stands still") == 1
    finally:
        disk_answers.set()
        rig.close()


def test_the_end_does_not_wait_for_a_disk_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path / "logs", tmp_path)
    disk_answers = threading.Event()
    try:
        rig.worker()
        rig.logs.files.do(lambda: disk_answers.wait() and None)
        ends = threading.Thread(target=rig.logs.close, args=(0.2,))
        ends.start()
        ends.join(PATIENCE_S)
        assert not ends.is_alive()
        assert "the last lines of workers and events may be missing" in caplog.text
    finally:
        disk_answers.set()
        rig.shown.close(PATIENCE_S)


@contextlib.contextmanager
def tiny_disk(at: Path, options: str) -> Iterator[None]:
    at.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tiny file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tiny file system here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.mark.parametrize(
    ("options", "reason"), [("size=16k", "No space left on device"), ("ro", "Read-only file system")]
)
def test_a_full_or_read_only_disk_costs_the_files_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: str, reason: str
) -> None:
    disk = tmp_path / "disk"
    with tiny_disk(disk, options):
        rig = Rig(disk / "logs", tmp_path)
        workers = [rig.worker(rank=rank) for rank in range(3)]
        for fd in (fd for worker in workers for fd in worker):
            for _ in range(3):
                os.write(fd, b"x" * 9_999 + b"\n")
        eventually(lambda: (rig.out() + rig.err()).count(b"\n") == 18)
        rig.close()
        [warning] = disk_warnings(caplog)
        assert str(disk) in warning
        assert reason in warning


def test_what_no_file_takes_is_shown_whatever_the_route(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in-the-way").write_text("a file")
    rig = Rig(tmp_path / "in-the-way" / "logs", tmp_path)
    out, _ = rig.worker(console=False)
    eventually(lambda: len(disk_warnings(caplog)) == 1)
    os.write(out, b"not lost\n")
    eventually(lambda: rig.out() == b"[n1/0] not lost\n")
    rig.close()


def test_a_disk_with_room_again_takes_what_comes_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in-the-way").write_text("a file")
    rig = Rig(tmp_path / "in-the-way" / "logs", tmp_path)
    out, _ = rig.worker(console=False)
    eventually(lambda: bool(disk_warnings(caplog)))  # before that, output is on its way to the file, and lost
    os.write(out, b"shown\n")
    eventually(lambda: rig.out() == b"[n1/0] shown\n")
    (tmp_path / "in-the-way").unlink()
    os.write(out, b"kept\n")
    eventually(lambda: rig.logs.log_file(1, 0) is not None)
    rig.close()
    [file] = (tmp_path / "in-the-way").rglob("stdout.log")
    assert file.read_bytes() in (b"kept\n", b"shown\nkept\n"), (
        "the disk may have had room again for all that was on its way"
    )


def test_a_console_that_is_gone_costs_the_console_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as gone, (tmp_path / "err").open("wb", buffering=0) as err:
        shown = started(Console("n1", gone.fileno(), err.fileno()))
        logs = Logs(tmp_path / "logs", "n1", shown)
        logs.start()
        logs.begin("job", "run", 1)
        (out_read, out), (err_read, errors) = os.pipe(), os.pipe()
        logs.attach(1, 0, (out_read, err_read), ROUTES)
        os.write(out, b"one\n")
        os.write(out, b"two\n")
        os.write(errors, b"three\n")
        logs.close()
        shown.close(PATIENCE_S)
    assert (tmp_path / "logs/job-run/gen1/rank0/stdout.log").read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "err").read_bytes() == b"[n1/0] three\n"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


NUMBERED = 60_000  # lines, 6 MB: more than a pipe and the console's memory take


def write_numbered_lines(fd: int) -> threading.Thread:
    text = b"".join(b"%099d\n" % i for i in range(NUMBERED))
    writer = threading.Thread(target=lambda: os.write(fd, text), daemon=True)
    writer.start()
    return writer


def test_a_slow_console_slows_the_workers_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(console_module, "QUEUE_MAX", 4096)  # full after each read
    read, write = os.pipe()
    with os.fdopen(write, "wb", buffering=0) as slow:
        logs = Logs(None, "n1", started(Console("n1", slow.fileno(), slow.fileno())))
        logs.start()
        (out_read, out), (err_read, _) = os.pipe(), os.pipe()
        logs.attach(1, 0, (out_read, err_read), ROUTES)
        write_numbered_lines(out)
        shown = bytearray()
        while not shown.endswith(b"%099d\n" % (NUMBERED - 1)):
            shown += os.read(read, 4096)
        assert shown.splitlines() == [b"[n1/0] %099d" % i for i in range(NUMBERED)]
        logs.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_console_that_stands_still_does_not_stop_workers_and_gaps_are_marked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    monkeypatch.setattr(console_module, "PATIENCE_S", 0.05)
    read, write = os.pipe()
    os.set_blocking(write, blocking)
    with os.fdopen(write, "wb", buffering=0) as stuck:
        logs = Logs(tmp_path / "logs", "n1", started(Console("n1", stuck.fileno(), stuck.fileno())))
        logs.start()
        logs.begin("job", "run", 1)
        (out_read, out), (err_read, _) = os.pipe(), os.pipe()
        logs.attach(1, 0, (out_read, err_read), ROUTES)
        writer = write_numbered_lines(out)
        writer.join(PATIENCE_S)
        assert not writer.is_alive(), "the worker waits for the console"
        assert drained(logs, 1, 0)
        assert (tmp_path / "logs/job-run/gen1/rank0/stdout.log").stat().st_size == NUMBERED * 100

        shown = bytearray()
        while b"missing here\n" not in shown:
            shown += os.read(read, 65536)
        *kept, note, end = bytes(shown).split(b"\n")
        assert end == b""
        assert kept == [b"[n1/0] %099d" % i for i in range(len(kept))], "in order, from the first on"
        assert note == b"[n1] the console stood still: %d lines missing here" % (NUMBERED - len(kept))
        os.write(out, b"moves again\n")
        assert os.read(read, 65536) == b"[n1/0] moves again\n"
        logs.close()


def test_where_the_disk_has_no_locks_all_is_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("elastic_agent.agent.output.log_files.fcntl.flock", no_locks)
    out, _ = rig.worker(rank=0)
    os.write(out, b"hello\n")
    eventually(lambda: rig.file("stdout", rank=0) == b"hello\n")
