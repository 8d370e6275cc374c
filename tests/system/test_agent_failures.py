"""Agents that fail themselves: each thread dies once, the main loop stands still, and workers that nothing ends."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import fnmatch
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from tests.etcd_servers import EtcdCluster

from .harness import RECORDER, Job, planted

THREADS = (
    "console",
    "hang-activity",
    "health-http",
    "heartbeat",
    "io",
    "log-files",
    "store-lease",
    "store-requests",
    "store-watch",
    "worker-logs",
)
"""All that every agent has; those of stores die in tests/unit/test_threads.py."""

SOME = ("last-saves", "log-folders", "node-checks", "notices")
"""Those of agents at the end of a job, with --log-dir, with --check, and with a source of notices."""

ELSEWHERE = (
    "check-server",  # of `check --nodes`
    "commits",
    "directory-locks",
    "drain-look",
    "worker-answer",
    "peer",
    "doing.replace(' ', '-')",
    "error-file",
    "evidence",
    "handover",  # tests/contract/test_handover.py
    "handover-disk",
    "job-agent",  # of a daemon: test_daemon.py
    "job-folders",  # of a daemon
    "master-port",
    "memory-key",  # where other nodes can join; it ends the agent as any other
    "name",
    "orders",
    "push-*",  # of the memory server, with which it ends
    "rendezvous",
    "store-command",  # of `exclude` and `drain`: tests/unit/test_exclude_command.py
)
"""Those of the backlogs (`console`, `log-files`) and `IoThread` (`io`, `worker-logs`); where a lock was
lent, for one question, for a step of the start or the end (tests/unit/test_threads.py, test_error_file.py), of the
process that writes checkpoints, which ends with it, and of torchrun's agent."""


def started_in_agents() -> set[str]:
    """The name of each thread that a call in agent/ starts, with * for what the call puts in."""
    names = set()
    for file in (Path(__file__).parents[2] / "agent").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Thread":
                names.add(shown(node.args[1]))
    return names


def shown(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        return "".join(map(shown, name.values))
    if isinstance(name, ast.FormattedValue):
        return "*"
    return str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)


def test_every_thread_of_an_agent_dies_in_some_test() -> None:
    rows = (*THREADS, *SOME, *ELSEWHERE)
    assert [name for name in started_in_agents() if not fnmatch.filter(rows, name)] == [], (
        "add a row, and let it die"
    )


def test_a_running_agent_has_no_more_threads_than_it_needs(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)
    listed = job.folder / "threads"
    job.join("a", "--nproc-per-node=2", "--preload=json", environment=planted(f"lists {listed}"))
    job.wait_for_training(world=2)
    standing = ("http-answer",) * 2  # for probes
    expected = sorted((*THREADS, *standing, "MainThread", "etcd-watch", "memory-key"))

    def threads() -> list[str]:
        """In order, without those of gRPC itself."""
        return [name for name in listed.read_text().split("\n") if not name.startswith("Thread-")]

    with contextlib.suppress(AssertionError):
        job.wait_for(lambda: threads() == expected, "no thread of the start", within_s=30)
    assert threads() == expected


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_an_agent_without_a_thread_that_only_some_have_ends_with_its_own_code(job: Job, name: str) -> None:
    agent = job.start(
        "a",
        f"--log-dir={job.folder / 'logs'}",
        f"--notice=file:{job.folder / 'leave'}",
        "--check=warn",
        *(("--no-python",) if name == "last-saves" else ()),
        script=("true",) if name == "last-saves" else (RECORDER,),
        environment=planted(f"dies {name}"),
    )
    assert agent.exit_code() == ExitCode.AGENT_FAILED
    assert agent.says(f"ended with exit code 70: the thread {name} has failed")
    assert not job.workers()


def test_an_agent_without_one_of_its_threads_ends_with_its_own_code(job: Job) -> None:
    agents = {name: job.start(name, environment=planted(f"dies {name}")) for name in THREADS}
    for name, agent in agents.items():
        assert agent.exit_code() == ExitCode.AGENT_FAILED, name
        assert name == "console" or agent.says(f"ended with exit code 70: the thread {name} has failed"), name
    assert not job.workers()


@pytest.mark.long
@pytest.mark.parametrize("name", ["io", "store-watch"])
def test_an_agent_whose_thread_cannot_be_started_for_long_says_what_is_lacking(job: Job, name: str) -> None:
    agent = job.start("a", environment=planted(f"cannot start {name}"))
    assert agent.exit_code() == ExitCode.NOT_HERE
    assert agent.says(f"{name}.*no thread could be started within")
    assert not job.workers()


def test_a_main_loop_that_stands_still_ends_its_agent_and_the_others_go_on(job: Job) -> None:
    options = ("--nnodes=1:2", "--last-call=2", "--lease-ttl=4")
    job.join("a", *options)
    error = job.folder / "error.json"
    surroundings = {"TORCHELASTIC_ERROR_FILE": str(error), **planted(f"stuck {job.folder / 'now'}")}
    stuck = job.join("b", *options, environment=surroundings)
    both = job.wait_for_training(world=2)
    (job.folder / "now").touch()
    assert stuck.exit_code() == ExitCode.LOOP_STUCK
    alone = job.wait_for_training(world=1, after=both.number)
    assert alone.nodes == ["a"]
    assert stuck.says("the main loop has not turned for .* process .* is sleeping")
    assert stuck.says("turn_or_stand_still")
    told = json.loads(error.read_text())["message"]
    assert told["errorCode"] == ExitCode.LOOP_STUCK
    assert "the main loop has not turned" in told["message"]


class DeadDisk:
    """A file system in which nothing is ever answered: who looks at it sleeps where no signal reaches."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        self._device = os.open("/dev/fuse", os.O_RDWR)
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"dead", os.fsencode(place), b"fuse", 0, options):
            os.close(self._device)
            pytest.skip(f"cannot mount FUSE here: {os.strerror(ctypes.get_errno())}")
        self._libc = libc
        self._closed = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Answers that it is there, and takes all other questions."""
        try:
            unique = os.read(self._device, 65536 * 4)[8:16]
            answer = (7).to_bytes(4, "little") + (31).to_bytes(4, "little") + bytes(56)
            os.write(self._device, (16 + len(answer)).to_bytes(4, "little") + bytes(4) + unique + answer)
            while True:
                os.read(self._device, 65536 * 4)
        except OSError:
            return

    def close(self) -> None:
        """Whoever sleeps here wakes, and dies."""
        if self._closed:
            return
        self._closed = True
        force, detach = 1, 2
        self._libc.umount2(os.fsencode(self.place), force | detach)
        os.close(self._device)


@pytest.fixture
def dead_disk(tmp_path: Path) -> Iterator[DeadDisk]:
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    disk = DeadDisk(tmp_path / "dead")
    yield disk
    disk.close()


@pytest.mark.long
def test_a_node_whose_worker_hangs_in_the_kernel_gives_up_its_place(job: Job, dead_disk: DeadDisk) -> None:
    options = ("--nnodes=1:2", "--last-call=30", "--lease-ttl=60")
    first = job.join("a", *options, script=(RECORDER, "--fault=1:0:150:1"))
    job.wait_for_text(first, "waiting: last call")  # it has rank 0, which fails
    soon = planted("constants kill_timeout_s=1")
    child = f"--child=sleep 0.3; stat {dead_disk.place}"
    stuck = job.join("b", *options, script=(RECORDER, child), environment=soon)
    both = job.wait_for_training(world=2)
    assert stuck.exit_code() == ExitCode.UNKILLABLE
    asleep = r"process \d+ \(stat\) is in uninterruptible sleep \(D\)"
    assert stuck.says(asleep)
    alone = job.wait_for_training(world=1, after=both.number)
    assert alone.nodes == ["a"], "it did not wait for the lease"
