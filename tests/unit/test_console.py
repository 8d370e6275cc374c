"""The agent's console: whoever reads it or not, nobody but its own threads ever waits for that."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import elastic_agent.agent.output.console as console_module
from elastic_agent.agent.output.console import Console, ConsoleHandler
from tests.consoles import FullPipe, full_pipe

PATIENCE_S = 20.0


def test_a_log_line_never_waits_and_what_has_no_room_is_counted_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console_module, "QUEUE_MAX", 1000)
    monkeypatch.setattr(console_module, "LOG_MAX", 500)
    lost: list[int] = []
    with full_pipe() as stuck:
        console = Console("n1", stuck.write, stuck.write)
        console.count_lost(lost.append)
        console.start()
        log = logging.Logger("test")
        log.addHandler(ConsoleHandler(console))
        for number in range(100):
            log.info("line %03d %s", number, "x" * 50)
        assert sum(lost) > 50, "it is bounded"
        shown = stuck.take_all(until=b"missing here\n").decode().splitlines()
        assert shown[:-1] == [f"line {number:03d} {'x' * 50}" for number in range(len(shown) - 1)]
        assert shown[-1] == f"[n1] the console stood still: {sum(lost)} lines missing here"
        assert len(shown) - 1 + sum(lost) == 100
        log.info("moves again")
        console.close(PATIENCE_S)
        assert os.read(stuck.read, 100) == b"moves again\n"


def test_the_agents_own_lines_have_room_behind_those_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "PATIENCE_S", 0.01)
    with full_pipe() as stuck:
        console = Console("n1", stuck.write, stuck.write)
        console.start()
        for _ in range(40):
            console.show("stdout", b"w" * 65535 + b"\n")
        console.print("the agent's own")
        assert b"the agent's own\n" in stuck.take_all(until=b"missing here\n")


def test_a_stdout_that_stands_still_keeps_no_line_from_stderr(tmp_path: Path) -> None:
    with full_pipe() as stuck, (tmp_path / "err").open("wb") as err:
        console = Console("n1", stuck.write, err.fileno())
        console.start()
        console.show("stdout", b"for nobody\n")
        console.print("for the log")
        deadline = time.monotonic() + PATIENCE_S
        while (tmp_path / "err").read_bytes() != b"for the log\n":
            assert time.monotonic() < deadline
            time.sleep(0.002)


def test_the_end_waits_for_the_last_lines_but_not_for_ever() -> None:
    read, write = os.pipe()
    console = Console("n1", write, write)
    console.start()
    console.print("the last line")
    console.close(PATIENCE_S)
    assert os.read(read, 100) == b"the last line\n"
    with full_pipe() as stuck:
        console = Console("n1", stuck.write, stuck.write)
        console.start()
        console.print("nobody will read this")
        ends = threading.Thread(target=console.close, args=(0.05,))
        ends.start()
        ends.join(PATIENCE_S)
        assert not ends.is_alive()


def test_a_console_on_a_disk_that_was_full_shows_again_what_comes_and_how_much_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "out"
    console_fd, lost, said = os.open("/dev/full", os.O_WRONLY), [], 0
    try:
        console = Console("n1", console_fd, console_fd)
        console.count_lost(lost.append)
        console.start()
        deadline = time.monotonic() + PATIENCE_S
        while not file.exists() or not file.read_bytes():
            assert time.monotonic() < deadline
            console.print(f"line {said}")
            said += 1
            if len(lost) == 3:
                with file.open("wb") as room:
                    os.dup2(room.fileno(), console_fd)
            time.sleep(0.002)
        console.close(PATIENCE_S)
    finally:
        os.close(console_fd)
    first, missing, *shown = file.read_text().splitlines()
    assert missing == f"[n1] the console stood still: {sum(lost)} lines missing here"
    assert [first, *shown] == [f"line {number}" for number in range(sum(lost), said)]
    assert len(caplog.records) == 1, "it is said once"


WHOEVER_WRITES = """
import faulthandler, logging, os, subprocess, sys, warnings
from elastic_agent.agent.output.console import take
console = take("n1")
faulthandler.enable(2)
for _ in range(3000):
    print("x" * 1000)
    print("y" * 1000, file=sys.stderr)
    sys.stdout.flush()
warnings.warn("a warning")
logging.error("a library's log")
faulthandler.dump_traceback(2)
try:
    os.write(2, b"from C")
except BlockingIOError:
    pass
try:
    os.write(1, b"from C")
except BlockingIOError:
    pass
subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('from a process that inherits it')"])
console.close(0.01)
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_nothing_in_the_process_waits_for_a_console_that_stands_still(kind: str) -> None:
    with full_pipe() as pipe:
        stuck = pipe if kind == "pipe" else full_socket()
        run = [sys.executable, "-c", WHOEVER_WRITES]
        process = subprocess.run(run, stdout=stuck.write, stderr=stuck.write, timeout=PATIENCE_S)
        assert process.returncode == 7


def full_socket() -> FullPipe:
    import socket

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    try:
        while True:
            theirs.send(bytes(65536))
    except BlockingIOError:
        theirs.setblocking(True)
    return FullPipe(ours.detach(), theirs.detach())
