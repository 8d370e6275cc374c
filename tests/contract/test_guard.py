"""Guard and shim with real processes: after the agent's death nothing of its workers lives, and nothing else dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.workers.processes import guard as guard_module
from elastic_agent.agent.workers.processes import shim as shim_module
from elastic_agent.agent.workers.processes.guard import IGNORED, Guard
from elastic_agent.agent.workers.processes.helper import start_helper
from tests.consoles import full_pipe
from tests.system.harness import C_LIBRARY_SIGNALS
from tests.system.processes import alive
from tests.waiting import wait_for

PATIENCE_S = 20.0
ORPHANS_S = 5.0  # promise I9
SHIM = [sys.executable, "-I", "-S", shim_module.__file__]

# Starts one process for each way to get away from a parent-death signal; each writes its pid into a file.
WORKER = """
child() { echo 'echo $$ > '"$1"'.new; mv '"$1"'.new '"$1"'; exec sleep 600'; }
sh -c "$(child plain)" &
setsid sh -c "$(child own_session)" &
(setsid sh -c "$(child orphan_in_own_session)" &)
(env -i PATH="$PATH" sh -c "$(child orphan_with_scrubbed_environment)" &)
env -i PATH="$PATH" setsid sh -c "$(child scrubbed_in_own_session)" &
wait
"""
CHILDREN = {
    "plain",
    "own_session",
    "orphan_in_own_session",
    "orphan_with_scrubbed_environment",
    "scrubbed_in_own_session",
}

# Stands in for the agent: starts a guard and one worker, prints their pids, and waits to be killed.
AGENT = """
import os, subprocess, sys, time
from elastic_agent.agent.workers.processes.guard import Guard
incarnation, *command = sys.argv[1:]
guard = Guard()
guard.start(incarnation)
environment = {**os.environ, "ELASTIC_AGENT_INCARNATION": incarnation}
worker = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
guard.watch(worker.pid)
print(guard.pid, worker.pid, flush=True)
time.sleep(600)
"""

# The same with folders of its own; the guard is not told of the worker's session.
AGENT_WITH_FOLDERS = """
import os, subprocess, sys, time
from elastic_agent.agent.workers.processes.guard import Guard
guard = Guard()
guard.start(sys.argv[1], sys.argv[2:])
environment = {**os.environ, "ELASTIC_AGENT_INCARNATION": sys.argv[1]}
worker = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
print(guard.pid, worker.pid, flush=True)
time.sleep(600)
"""

# The same without a guard: the worker is started through the shim.
AGENT_WITHOUT_GUARD = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "", "--", "sleep", "600"])
print(worker.pid, flush=True)
time.sleep(600)
"""


def eventually(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    wait_for(condition, "the condition", within_s, every_s=0.005)


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Pids to be killed at the end, should the code under test not have done it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def sleeper(started: list[int], incarnation: str | None = None) -> int:
    """A session of its own with one sleeping process, marked if `incarnation` is given."""
    environment = {"PATH": os.environ["PATH"]}
    if incarnation is not None:
        environment["ELASTIC_AGENT_INCARNATION"] = incarnation
    process = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    started.append(process.pid)
    return process.pid


def children(directory: Path, started: list[int]) -> dict[str, int]:
    eventually(lambda: {path.name for path in directory.iterdir()} == CHILDREN)
    pids = {name: int((directory / name).read_text()) for name in CHILDREN}
    started += pids.values()
    return pids


def test_when_the_agent_is_killed_nothing_of_its_workers_lives_and_others_do(
    tmp_path: Path, started: list[int]
) -> None:
    incarnation = uuid.uuid4().hex
    others = [sleeper(started), sleeper(started, "another")]
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, incarnation, "sh", "-c", WORKER],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    guard_pid, worker_pid = map(int, agent.stdout.readline().split())
    started += [worker_pid, guard_pid, agent.pid]
    pids = children(tmp_path, started)
    assert all(map(alive, pids.values()))

    agent.kill()
    eventually(lambda: not any(map(alive, [worker_pid, guard_pid, *pids.values()])), within_s=ORPHANS_S)
    assert all(map(alive, others))
    _, printed = agent.communicate(timeout=PATIENCE_S)
    assert all(str(pid) in printed.split() for pid in pids.values()), printed


def test_closing_the_guard_kills_what_is_left_but_not_the_agent_and_its_other_children(
    started: list[int],
) -> None:
    incarnation = uuid.uuid4().hex
    guard = Guard()
    guard.start(incarnation)
    other, worker, ended = sleeper(started), sleeper(started, incarnation), sleeper(started)
    guard.watch(worker)
    guard.watch(ended)
    guard.forget(ended)
    guard.close()
    assert not alive(worker)
    assert not alive(guard.pid)
    assert alive(other)
    assert alive(ended), "a forgotten session's number may be another's"


def test_the_folders_are_removed_though_the_reader_of_stderr_stands_still(
    tmp_path: Path, started: list[int]
) -> None:
    incarnation, folder = uuid.uuid4().hex, tmp_path / "memory"
    folder.mkdir()
    (folder / "copy").touch()
    run = [sys.executable, "-c", AGENT_WITH_FOLDERS, incarnation, str(folder)]
    with full_pipe() as stuck:
        agent = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=stuck.write, text=True)
        assert agent.stdout is not None
        guard_pid, worker = map(int, agent.stdout.readline().split())
        started += [worker, guard_pid, agent.pid]
        agent.kill()
        eventually(lambda: not alive(guard_pid))
    agent.communicate(timeout=PATIENCE_S)
    assert not alive(worker)
    assert not folder.exists()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_a_guard_that_is_asked_to_stop_stays(started: list[int], number: signal.Signals) -> None:
    incarnation = uuid.uuid4().hex
    guard = Guard()
    guard.start(incarnation)

    def ignored() -> bool:
        [line] = [
            line
            for line in Path(f"/proc/{guard.pid}/status").read_text().splitlines()
            if line.startswith("SigIgn")
        ]
        return bool(int(line.split()[1], 16) >> (number - 1) & 1)

    eventually(ignored)
    os.kill(guard.pid, number)
    worker = sleeper(started, incarnation)
    guard.close()
    assert not alive(worker)


def test_the_guard_leads_its_own_session_so_that_a_terminal_does_not_reach_it() -> None:
    guard = Guard()
    guard.start(uuid.uuid4().hex)
    assert os.getsid(guard.pid) == guard.pid
    guard.close()


def test_a_guard_that_was_killed_is_replaced_and_the_new_one_knows_all_sessions(started: list[int]) -> None:
    guard = Guard()
    guard.start(uuid.uuid4().hex)
    first = guard.pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    worker = sleeper(started)
    guard.watch(worker)
    guard.check()
    assert guard.pid != first
    guard.close()
    assert not alive(worker)


def test_a_guard_that_does_not_read_is_replaced_before_it_misses_a_session(started: list[int]) -> None:
    guard = Guard()
    guard.start(uuid.uuid4().hex)
    os.kill(first := guard.pid, signal.SIGSTOP)
    worker = sleeper(started)
    guard.watch(worker)
    for number in range(10_000):  # until its pipe is full
        guard.forget(10_000_000 + number)
    eventually(lambda: not alive(first))  # it may be buried already: an ordinary user's pipe is small
    guard.check()
    assert guard.pid != first
    guard.close()
    assert not alive(worker)


@pytest.mark.parametrize("scarce", ["pipe", "Popen"])
def test_a_guard_that_cannot_be_replaced_at_once_is_replaced_later(
    started: list[int], monkeypatch: pytest.MonkeyPatch, scarce: str, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard()
    guard.start(uuid.uuid4().hex)
    worker = sleeper(started)
    guard.watch(worker)
    os.kill(dead := guard.pid, signal.SIGKILL)
    before = len(os.listdir("/proc/self/fd"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    def noticed() -> bool:
        guard.check()
        return "starting another" in caplog.text

    with monkeypatch.context() as patch:
        patch.setattr(os if scarce == "pipe" else subprocess, scarce, refuse)
        eventually(noticed)
        guard.check()
    assert caplog.text.count("starting another") == 1
    assert len(os.listdir("/proc/self/fd")) == before
    guard.check()
    assert guard.pid != dead
    assert len(os.listdir("/proc/self/fd")) == before
    guard.close()
    assert not alive(worker)


def test_guards_that_end_at_once_leave_no_descriptors(
    started: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard()
    guard.start(uuid.uuid4().hex)
    worker = sleeper(started)
    guard.watch(worker)
    os.kill(guard.pid, signal.SIGKILL)
    gc.collect()  # what earlier tests have left open is closed now, and not meanwhile
    before = len(os.listdir("/proc/self/fd"))
    popen = subprocess.Popen

    def ends_at_once(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        process = popen(["/bin/true"], **kwargs)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return process

    def noticed() -> bool:
        guard.check()
        return "starting another" in caplog.text

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", ends_at_once)
        eventually(noticed)
        for _ in range(5):
            guard.check()
        assert len(os.listdir("/proc/self/fd")) == before
    assert caplog.text.count("starting another") == 1
    guard.check()
    guard.close()
    assert not alive(worker)


def test_the_guard_starts_without_the_modules_that_make_it_slow() -> None:
    imports = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", "-c", guard_module.PROGRAM, "none"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stderr
    loaded = {line.rpartition("|")[2].strip() for line in imports.splitlines()}
    assert "signal" in loaded
    assert not loaded & {"subprocess", "logging", "pathlib", "dataclasses", "typing", "re", "torch"}


def test_a_worker_dies_with_its_agent_by_the_shim_alone(started: list[int]) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT_WITHOUT_GUARD, shim_module.__file__], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    worker = int(agent.stdout.readline())
    started += [worker, agent.pid]
    eventually(lambda: Path(f"/proc/{worker}/comm").read_text() == "sleep\n")
    agent.kill()
    eventually(lambda: not alive(worker), within_s=ORPHANS_S)
    agent.communicate(timeout=PATIENCE_S)


def run_shim(agent_pid: int, *command: str, cpus: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SHIM, str(agent_pid), cpus, "--", *command], capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_the_command_gets_its_arguments_and_its_exit_code_counts() -> None:
    ran = run_shim(os.getpid(), "sh", "-c", 'printf "%s|" "$@"; exit 7', "sh", "a b", "--", "")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "a b|--||", "")


def test_nothing_is_started_when_the_agent_is_already_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(PATIENCE_S)
    ran = run_shim(gone.pid, "touch", str(tmp_path / "started"))
    assert ran.returncode == 1
    assert f"agent {gone.pid} is gone" in ran.stderr
    assert not (tmp_path / "started").exists()


def test_a_command_that_cannot_run_is_named_and_gets_a_shells_exit_code(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    for command, code, reason in [
        ("no-such-command-anywhere", 127, "No such file or directory"),
        (str(tmp_path / "missing"), 127, "No such file or directory"),
        (str(tmp_path / "data"), 126, "Permission denied"),
    ]:
        ran = run_shim(os.getpid(), command)
        assert (ran.returncode, ran.stdout) == (code, "")
        assert ran.stderr == f"elastic-agent: cannot run {command!r}: {reason}\n"


def test_the_command_keeps_to_its_cpus() -> None:
    last = max(os.sched_getaffinity(0))
    ran = run_shim(os.getpid(), "grep", "Cpus_allowed_list", "/proc/self/status", cpus=str(last))
    assert ran.stdout.split() == ["Cpus_allowed_list:", str(last)]


def test_cpus_that_are_not_there_are_an_error_and_nothing_is_started(tmp_path: Path) -> None:
    ran = run_shim(os.getpid(), "touch", str(tmp_path / "started"), cpus="4090,4091")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "cannot run on the CPUs 4090,4091" in ran.stderr
    assert "--affinity none" in ran.stderr
    assert not (tmp_path / "started").exists()


def bit(number: int) -> int:
    return 1 << (number - 1)


def test_the_command_blocks_nothing_and_ignores_only_what_people_let_it_ignore() -> None:
    """nohup and a shell's `trap '' USR1` are meant for all that is started below them; SIGALRM is not."""
    ignored = signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
    try:
        ran = run_shim(os.getpid(), "grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
    masks = {
        name: int(mask, 16) & ~C_LIBRARY_SIGNALS
        for name, mask in (line.split() for line in ran.stdout.splitlines())
    }
    assert masks == {"SigBlk:": 0, "SigIgn:": bit(signal.SIGHUP) | bit(signal.SIGUSR1)}


def test_a_helper_ignores_no_other_signal_that_the_agent_was_started_with_blocked() -> None:
    script = (
        "import signal; print(signal.getsignal(signal.SIGCHLD), signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        helper = start_helper(
            [sys.executable, "-c", script], os.environ, subprocess.DEVNULL, stdout=subprocess.PIPE
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    output, _ = helper.communicate(timeout=PATIENCE_S)
    assert output.decode().split() == [str(int(signal.SIG_DFL)), "set()"]


@pytest.mark.parametrize("number", IGNORED)
def test_no_signal_ends_a_helper_at_any_moment_of_its_start(number: signal.Signals) -> None:
    """Slurm and service managers signal everything that they started, and workers in their grace still need it."""
    command = [sys.executable, "-c", "import signal, sys; sys.exit(signal.getsignal(int(sys.argv[1])) != 1)"]
    helper = start_helper([*command, str(int(number))], os.environ, subprocess.DEVNULL)
    signalled = 0
    while helper.poll() is None:
        os.kill(helper.pid, number)
        signalled += 1
    assert helper.returncode == 0
    assert signalled
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
