"""The daemon's unit under a real systemd: `submit` finds it, its queue stays, and it waits for its store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

from .containers import REPOSITORY, Container, container
from .harness import PATIENCE_S

SHIPPED = REPOSITORY / "deploy" / "systemd"
USER = "elastic-agent"
UNIT = "elastic-agent-pool.service"
PROGRAM = "/opt/elastic-agent/bin/elastic-agent"
IMPATIENT = """
[Service]
WatchdogSec=2s
RestartSec=200ms
"""
SCRIPT = """
import json, os, sys, time
with open(os.path.join(os.environ["HOME"], sys.argv[1]), "w") as file:
    json.dump({"folder": os.getcwd(), "cgroup": open("/proc/self/cgroup").read().splitlines()[-1]}, file)
time.sleep(float(sys.argv[2]))
"""


class Pool:
    """The unit on a machine of its own."""

    state = Path("/var/lib/elastic-agent/pool")

    def __init__(self, machine: Container) -> None:
        self.machine = machine

    def configure(self, *lines: str) -> None:
        sample = (SHIPPED / "pool.toml").read_text()
        # A script that imports no torch shall not wait for it.
        text = "\n".join([sample.replace('"auto"', "1"), 'preload = "none"', *lines])
        self.machine.write("/etc/elastic-agent/pool.toml", text)
        self.machine.run("systemctl", "daemon-reload")

    def __getitem__(self, key: str) -> str:
        return self.machine.run("systemctl", "show", "--value", f"--property={key}", UNIT).stdout.strip()

    def command(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """As root, in the folder /srv/job."""
        return self.machine.run("env", "--chdir=/srv/job", PROGRAM, *words, check=check)

    def submit(self, *words: str) -> str:
        return self.command("submit", "--", "train.py", *words).stdout.splitlines()[-1]

    def states(self) -> dict[str, str]:
        jobs: list[dict[str, Any]] = json.loads(self.command("jobs", "--json").stdout)["jobs"]
        return {one["job"]: one["state"] for one in jobs}

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        journal = ("journalctl", "--no-pager", f"--unit={UNIT}")
        wait_for(condition, what, PATIENCE_S, seen=lambda: self.machine.run(*journal).stdout)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """With the unit, its configuration and a script, where docs/deploy.md puts them."""
    with container(tmp_path_factory.mktemp("machine")) as machine:
        machine.run("useradd", "--system", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", USER)
        machine.write(f"/etc/systemd/system/{UNIT}", (SHIPPED / UNIT).read_text())
        machine.write(f"/etc/systemd/system/{UNIT}.d/test.conf", IMPATIENT)
        machine.write("/srv/job/train.py", SCRIPT)
        yield machine


@pytest.fixture
def pool(machine: Container) -> Iterator[Pool]:
    pool = Pool(machine)
    yield pool
    machine.run("systemctl", "stop", UNIT)
    assert machine.processes(USER) == {}


@pytest.mark.long
def test_what_is_submitted_runs_and_a_killed_daemon_comes_back_with_its_queue(pool: Pool) -> None:
    pool.configure()
    pool.machine.run("systemctl", "start", UNIT)
    pool.wait_for(lambda: pool["StatusText"] == "idle: waiting for a job", "the pool")
    first = pool.submit("first", "0")
    assert pool.command("wait", first).returncode == 0
    seen = json.loads(pool.machine.path(f"{pool.state}/first").read_text())
    assert seen["folder"] == "/srv/job"
    assert f"/{UNIT}" in seen["cgroup"]
    printed = pool.machine.run("find", "/var/log/elastic-agent/pool", "-name", f"{first}.log").stdout
    assert printed

    running, waiting = pool.submit("running", "600"), pool.submit("waiting", "0")
    pool.wait_for(pool.machine.path(f"{pool.state}/running").exists, "the second job")
    old = pool.machine.processes(USER)
    [daemon] = [pid for pid in old if is_main(pid, pool["MainPID"])]
    os.kill(daemon, signal.SIGKILL)
    pool.wait_for(lambda: pool["NRestarts"] == "1", "systemd to start it again")
    pool.wait_for(lambda: pool.states() == {first: "succeeded", running: "running", waiting: "waiting"}, "it")
    assert not old.items() & pool.machine.processes(USER).items()
    assert pool.command("cancel", running).returncode == 0
    assert pool.command("wait", waiting).returncode == 0


@pytest.mark.long
def test_a_store_that_is_away_is_waited_for(pool: Pool) -> None:
    pool.configure('rdzv-endpoint = "etcd://127.0.0.1:9"')
    pool.machine.run("systemctl", "restart", UNIT)
    pool.wait_for(lambda: pool["StatusText"] == "looking for the pool's store", "the status")
    before, since = pool["NRestarts"], time.monotonic()
    pool.wait_for(lambda: time.monotonic() > since + 4.0, "twice the watchdog's time")
    assert (pool["ActiveState"], pool["NRestarts"]) == ("active", before)


def is_main(pid: int, inside: str) -> bool:
    """Is this the process that has this number in the machine?"""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:  # a helper that has ended meanwhile
        return False
    [numbers] = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
    return numbers[-1] == inside
