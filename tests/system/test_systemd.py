"""The shipped unit under a real systemd: started, stuck, killed, stopped; and nothing of it is left each time."""

from __future__ import annotations

import json
import os
import re
import signal
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

IMPATIENT = """
[Service]
WatchdogSec=2s
RestartSec=200ms
"""

# Each worker leaves an escapee behind (forked twice, in a session and an environment of its own), has a helper that
# tells when systemd asks it to stop, tells what it sees, steps, and saves for a while when asked itself. All in its
# working folder: it may not write elsewhere.
SCRIPT = """
import json, os, signal, subprocess, sys, time

def save(_number, _frame):
    time.sleep(0.5)
    open(f"saved-{os.environ['RANK']}", "w").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
subprocess.run(["sh", "-c", "(env -i setsid /bin/sh -c '(env -i setsid /bin/sleep 600 &)' &)"])
subprocess.Popen(["sh", "-c", "trap 'touch helper-was-asked; exit' TERM; while :; do sleep 0.05; done"])
try:
    open("/srv/job/written", "w")
    elsewhere = "written"
except OSError as error:
    elsewhere = error.strerror
with open(os.path.join(os.environ["ELASTIC_AGENT_MEMORY"], "tried"), "w") as file:
    file.write("written")
seen = {
    "memory": open(file.name).read(),
    "cgroup": open("/proc/self/cgroup").read().splitlines()[-1],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "elsewhere": elsewhere,
}
with open(f"seen.new-{os.environ['RANK']}", "w") as file:
    json.dump(seen, file)
os.replace(file.name, "seen")
print("stepping", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """With the unit and the sample job, where docs/deploy.md puts them."""
    with container(tmp_path_factory.mktemp("machine")) as machine:
        machine.run("useradd", "--system", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", USER)
        unit = "elastic-agent@.service"
        machine.write(f"/etc/systemd/system/{unit}", (SHIPPED / unit).read_text())
        machine.write("/srv/job/train.py", SCRIPT)
        yield machine


class Service:
    """One job's unit on that machine."""

    def __init__(self, machine: Container, job: str) -> None:
        self.machine = machine
        self.job = job
        self.unit = f"elastic-agent@{job}.service"
        self.state = Path(f"/var/lib/elastic-agent/{job}")

    def configure(self, *lines: str, drop_in: str = IMPATIENT) -> None:
        sample = (
            (SHIPPED / "job.toml").read_text().replace("/elastic-agent/job", f"/elastic-agent/{self.job}")
        )
        self.machine.write(f"/etc/elastic-agent/{self.job}.toml", "\n".join([sample, *lines]))
        self.machine.write(
            f"/etc/elastic-agent/{self.job}.env", (SHIPPED / "job.env").read_text() + "LOGLEVEL=INFO\n"
        )
        self.machine.write(f"/etc/systemd/system/{self.unit}.d/test.conf", drop_in)
        self.machine.run("systemctl", "daemon-reload")

    def start(self) -> int:
        return self.machine.run("systemctl", "start", self.unit, check=False).returncode

    def stop(self) -> None:
        self.machine.run("systemctl", "stop", self.unit)

    def __getitem__(self, key: str) -> str:
        return self.machine.run("systemctl", "show", "--value", f"--property={key}", self.unit).stdout.strip()

    @property
    def main_pid(self) -> int:
        """As seen from here."""
        inside = self["MainPID"]
        for pid in self.processes():
            numbers = re.search(r"NSpid:(.*)", Path(f"/proc/{pid}/status").read_text())
            if numbers is not None and numbers[1].split()[-1] == inside:
                return pid
        raise AssertionError(f"no main process {inside}")

    def processes(self) -> dict[int, str]:
        return self.machine.processes(USER)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, PATIENCE_S, seen=lambda: f"the status: {self['StatusText']}\n{self.log()}")

    def train(self) -> None:
        """Until its workers have written what they see."""
        seen = self.machine.path(f"{self.state}/seen")
        seen.unlink(missing_ok=True)
        self.wait_for(lambda: self["StatusText"].startswith("running: generation 1, 1 node,"), "generation 1")
        self.wait_for(seen.exists, "the workers")

    def seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads(self.machine.path(f"{self.state}/seen").read_text())
        return seen

    def log(self) -> str:
        return self.machine.run("journalctl", "--no-pager", f"--unit={self.unit}").stdout


@pytest.fixture
def service(machine: Container, request: pytest.FixtureRequest) -> Iterator[Service]:
    """One whose name is the test's. At the end nothing of it may live."""
    service = Service(machine, re.sub(r"\W+|_", "-", request.node.name.removeprefix("test_"))[:40].strip("-"))
    yield service
    service.stop()
    print(service.log())
    assert service.processes() == {}


def test_a_start_is_done_when_the_agent_is_up_and_a_stop_lets_the_workers_save(service: Service) -> None:
    service.configure(drop_in="")
    assert service.start() == 0
    assert service["ActiveState"] == "active"
    service.train()
    seen = service.seen()
    environment = seen["environment"]
    assert re.fullmatch(rf".*/{service.unit}", seen["cgroup"])
    assert seen["folder"] == environment["HOME"] == str(service.state)
    assert seen["elsewhere"] == "Read-only file system"
    assert environment["LOGLEVEL"] == "INFO", "the environment file is read"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(environment)
    logs = service.machine.path(f"/var/log/elastic-agent/{service.job}")
    service.wait_for(lambda: "stepping" in "".join(p.read_text() for p in logs.rglob("*.log")), "the logs")
    assert len(service.processes()) > 2 * int(environment["LOCAL_WORLD_SIZE"])
    warm = rf"generation 1: {environment['WORLD_SIZE']} workers? from spares"
    assert re.search(warm, service.log()), "the unit's confinement lets a fork become a worker"
    memory = environment["ELASTIC_AGENT_MEMORY"]
    assert memory.startswith("/dev/shm/")
    assert service.machine.run("test", "-e", memory, check=False).returncode == 0
    assert seen["memory"] == "written", "the unit's confinement leaves the workers their copies in memory"
    shown = json.loads(service.machine.run("/opt/elastic-agent/bin/elastic-agent", "status", "--json").stdout)
    assert [(job["state"], job["generation"]) for job in shown["jobs"]] == [("running", 1)]

    service.stop()
    # systemd forgets a stopped instance, but not its log.
    assert re.search(
        r"ended with exit code 143: stopped by SIGTERM[\s\S]*Deactivated successfully", service.log()
    )
    for rank in range(int(environment["WORLD_SIZE"])):
        assert service.machine.path(f"{service.state}/saved-{rank}").exists(), (
            "it was asked, and had its time"
        )
    assert not service.machine.path(f"{service.state}/helper-was-asked").exists(), (
        "helpers live while workers save"
    )
    assert service.processes() == {}
    assert service.machine.run("test", "-e", memory, check=False).returncode == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "said"),
    [
        # Of some thread: Python may crash while it writes the stacks of those that still run.
        (signal.SIGSTOP, r"Watchdog timeout[\s\S]*[Tt]hread 0x.*most recent call first"),
        (signal.SIGKILL, "status=9/KILL"),
    ],
    ids=["stuck", "killed"],
)
def test_an_agent_that_is(service: Service, number: signal.Signals, said: str) -> None:
    service.configure()
    assert service.start() == 0
    service.train()
    old = service.processes()
    os.kill(service.main_pid, number)
    service.wait_for(lambda: service["NRestarts"] == "1", "systemd to start it again")
    service.train()
    left = old.items() & service.processes().items()
    assert not left, "neither a worker nor an escapee of the first life lives"
    assert re.search(said, service.log())


def test_a_bad_configuration_fails_the_start_at_once_and_is_not_tried_again(service: Service) -> None:
    service.configure('check = "nonsense"')
    assert service.start() != 0
    assert service["ActiveState"] == "failed"
    assert (service["ExecMainStatus"], service["NRestarts"]) == ("78", "0")
    assert "expected fail, warn or off" in service.log()
    service.machine.run("systemctl", "reset-failed", service.unit)


@pytest.mark.long
def test_credentials_are_lent_by_systemd_and_a_store_that_is_away_kills_no_start(service: Service) -> None:
    machine = service.machine
    password = "kept-by-root"
    lines = (SHIPPED / "etcd-credentials.conf").read_text().splitlines()
    for_a_password = "\n".join(line for line in lines if "key" not in line.lower())
    service.configure(
        'rdzv-endpoint = "etcd://127.0.0.1:9"', 'etcd-user = "job"', drop_in=f"{IMPATIENT}{for_a_password}\n"
    )
    machine.write(f"/etc/elastic-agent/{service.job}.etcd-password", password, mode=0o600)
    assert service.start() == 0
    service.wait_for(lambda: service["StatusText"] == "looking for the rendezvous store", "the status")
    since = time.monotonic()
    service.wait_for(lambda: time.monotonic() > since + 4.0, "twice the watchdog's time")
    assert (service["ActiveState"], service["NRestarts"]) == ("active", "0")
    environment = Path(f"/proc/{service.main_pid}/environ").read_text()
    assert password not in environment
    assert "ELASTIC_AGENT_ETCD_PASSWORD_FILE=/run/credentials/" in environment
