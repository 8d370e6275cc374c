"""Stacks of worker processes, written at a signal: who is asked, who must not be, and what is read of the answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from elastic_agent.agent.workers import rank_activity as facts
from elastic_agent.agent.workers.hang_detector import ActivityReader
from elastic_agent.agent.workers.processes.proc import stat_of
from elastic_agent.agent.workers.rank_activity import (
    MOST_FRAMES,
    Frame,
    StackFile,
    Target,
    ask,
    parse,
    why_not,
)
from elastic_agent.worker.wire.shared_progress import STACKS_DESCRIPTOR, STACKS_SIGNAL

BEGIN = """
import faulthandler, os, signal, sys, threading, time, ctypes
from elastic_agent.worker.wire.shared_progress import register_stacks
register_stacks(sys.argv[1])
def stand_here():
    os.write(1, f"{os.getpid()}\\n".encode())
    sys.stdin.read()
"""


@pytest.fixture
def file() -> StackFile:
    return StackFile()


@contextmanager
def running(file: StackFile, script: str, lines: int = 1, begin: str = BEGIN) -> Iterator[list[int]]:
    """The pids that this script prints, once it has."""
    command = [sys.executable, "-c", begin + script, file.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield [int(process.stdout.readline()) for _ in range(lines)]
        process.kill()


@dataclass
class Answer:
    text: str
    refused: str


def asked(file: StackFile, pid: int, within_s: float = 10.0) -> Answer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "ANSWER_S", within_s)
        [answer] = ask([Target(0, 0, pid, file)], time.monotonic, time.sleep).values()
    return Answer(*answer)


def functions(text: str) -> list[str]:
    """Of the main thread, the innermost first."""
    return [frame.function for frame in parse(text)[-1].frames]


def test_a_process_says_where_it_stands(file: StackFile) -> None:
    with running(file, "stand_here()") as [pid]:
        found = asked(file, pid)
        assert functions(found.text) == ["stand_here", "<module>"]
        assert found.refused == ""
        assert functions(asked(file, pid).text) == ["stand_here", "<module>"]  # again


def test_also_while_native_code_holds_the_lock_of_python(file: StackFile) -> None:
    script = "def native():\n  print(os.getpid(), flush=True)\n  ctypes.PyDLL(None).getchar()\nnative()"
    with running(file, script) as [pid]:
        assert functions(asked(file, pid).text) == ["native", "<module>"]


def test_all_its_threads_do_and_the_main_one_is_the_last(file: StackFile) -> None:
    with running(
        file, "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nstand_here()"
    ) as [pid]:
        threads = parse(asked(file, pid).text)
        assert [thread.frames[-1].function for thread in threads] == ["_bootstrap", "<module>"]


def test_one_that_lets_go_of_the_signal_is_not_killed_by_it(file: StackFile) -> None:
    script = f"faulthandler.unregister({STACKS_SIGNAL}); signal.signal({STACKS_SIGNAL}, signal.SIG_DFL); stand_here()"
    with running(file, script) as [pid]:
        assert "has let go" in asked(file, pid).refused
        assert stat_of(f"/proc/{pid}") is not None


def test_nor_a_program_that_it_has_become(file: StackFile) -> None:
    script = "os.execv(sys.executable, [sys.executable, '-c', 'import os; print(os.getpid(), flush=True); input()'])"
    with running(file, script) as [pid]:
        assert "has let go" in why_not(pid, file)


def test_nor_one_whose_descriptor_is_another_file(file: StackFile) -> None:
    script = f"os.dup2(os.open('/dev/null', os.O_WRONLY), {STACKS_DESCRIPTOR}); stand_here()"
    with running(file, script) as [pid]:
        assert "has let go" in why_not(pid, file)


def test_a_worker_that_started_cold_shows_them_from_its_first_step_on(file: StackFile) -> None:
    script = """
import os, sys
os.environ["ELASTIC_AGENT_STACKS"] = sys.argv[1]
from elastic_agent.worker.steps.progress import step
step(1)
def stand_here():
    os.write(1, f"{os.getpid()}\\n".encode())
    sys.stdin.read()
stand_here()
"""
    with running(file, script, begin="") as [pid]:
        assert functions(asked(file, pid).text) == ["stand_here", "<module>"]


def test_faulthandler_stays_the_scripts(file: StackFile) -> None:
    script = (
        "faulthandler.disable(); faulthandler.enable(); faulthandler.dump_traceback_later(600)\n"
        "faulthandler.register(signal.SIGUSR1); stand_here()"
    )
    with running(file, script) as [pid]:
        assert functions(asked(file, pid).text) == ["stand_here", "<module>"]


def test_one_that_is_stopped_is_not_asked_nor_one_that_has_ended(file: StackFile) -> None:
    with running(file, "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)") as [pid]:
        deadline = time.monotonic() + 10
        while (stat := stat_of(f"/proc/{pid}")) is not None and stat.state != "T":
            assert time.monotonic() < deadline
        assert "cannot answer" in why_not(pid, file)
    assert why_not(pid, file) == "it has ended"


@pytest.mark.parametrize(
    ("beside", "threads_active"),
    [
        ("while True: time.sleep(0.1)", True),
        ("time.sleep(100)", False),
        ("ctypes.CDLL(None).prctl(15, b'gloo_tcp_loop')\n    while True: time.sleep(0.1)", False),
    ],
    ids=["moves", "sleeps", "of a library"],
)
@pytest.mark.parametrize("where", ["thread", "child"])
def test_a_thread_or_child_that_wakes_again_and_again_is_seen(
    beside: str, threads_active: bool, where: str
) -> None:
    program = f"""
import ctypes, os, threading, time
def beside():
    {beside}
if {where == "child"} and os.fork() == 0:
    beside()
if {where == "thread"}:
    threading.Thread(target=beside, daemon=True).start()
print("begun", flush=True)
time.sleep(100)
"""
    now = 0.0
    reader = ActivityReader(lambda: now)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        reader._search((worker.pid,))
        assert not reader._sample(worker.pid, 0, threads=True).threads_active, "one look shows nothing"
        deadline = time.monotonic() + 60.0
        found = None
        while found != threads_active and time.monotonic() < deadline:  # it has begun to sleep a moment ago
            time.sleep(1.0)
            now += 1.0
            found = reader._sample(worker.pid, 0, threads=True).threads_active
        os.killpg(worker.pid, signal.SIGKILL)
    assert found == threads_active


def test_one_that_blocks_the_signal_is_given_up(file: StackFile) -> None:
    with running(file, f"signal.pthread_sigmask(signal.SIG_BLOCK, [{STACKS_SIGNAL}]); stand_here()") as [pid]:
        assert "may block" in asked(file, pid, 0.3).refused


def test_without_a_file_there_are_no_stacks_and_the_script_runs() -> None:
    script = BEGIN + f"print(signal.getsignal({STACKS_SIGNAL}) is signal.SIG_DFL)"
    ran = subprocess.run(
        [sys.executable, "-c", script, "/nowhere"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "True\n"


# ---------------------------------------------------------------- what is read

TEXT = """Thread 0x00007f80962376c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f80962376c1 [loader] (most recent call first):
  <no Python frame>

Current thread 0x00007f8096dccb80 [python] (most recent call first):
  File "/home/a\x1b[31m.py", line 9 in f
  File "/home/b.py", line ??? in <module>
"""


def test_what_faulthandler_writes_is_read() -> None:
    first, second, main = parse(TEXT, lambda file, line: f"{file}:{line}")
    assert first.name == "0x00007f80962376c0"
    assert (second.name, second.frames) == ("loader", ())
    assert main.frames == (
        Frame("/home/a.py", 9, "f", "/home/a.py:9"),
        Frame("/home/b.py", 0, "<module>"),
    )


@pytest.mark.parametrize("text", ["", "Thread", '  File "x", line 1 in f', "\0" * 100, TEXT[:150]])
def test_whatever_is_there_is_read(text: str) -> None:
    assert all(len(thread.frames) <= MOST_FRAMES for thread in parse(text))


def test_of_a_deep_stack_the_innermost_frames_are_kept() -> None:
    text = "Current thread 0x1 (most recent call first):\n" + '  File "x", line 1 in f\n' * 500
    assert len(parse(text)[0].frames) == MOST_FRAMES
