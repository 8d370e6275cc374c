"""What an agent tells its service manager: the test listens where systemd would."""

from __future__ import annotations

import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .harness import RECORDER, Job, planted
from .processes import port_for_a_store

WATCHDOG_S = 1.5


class Ear:
    """All that was said so far, and when the last beat came."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self.last_beat = -1.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6))}

    def listen(self) -> list[str]:
        while True:
            try:
                lines = self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return self.said
            self.said += lines
            if "WATCHDOG=1" in lines:
                self.last_beat = time.monotonic()

    def heard(self, text: str) -> Callable[[], bool]:
        return lambda: any(text in said for said in self.listen())

    def beats(self) -> int:
        return self.listen().count("WATCHDOG=1")

    def silent_s(self) -> float:
        self.listen()
        return time.monotonic() - self.last_beat

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    ear = Ear(tmp_path / "notify")
    yield ear
    ear.close()


@pytest.mark.long
def test_an_agent_is_ready_and_watched_while_it_looks_for_its_store(job: Job, ear: Ear) -> None:
    endpoint = f"192.0.2.200:{port_for_a_store()}"
    options = ("--nnodes=2", f"--rdzv-endpoint={endpoint}")
    agent = job.start("a", *options, environment=ear.environment)
    job.wait_for(ear.heard("READY=1"), "READY")
    job.wait_for(lambda: ear.beats() >= 4, "a wait longer than the watchdog's")
    assert "STATUS=looking for the rendezvous store" in ear.listen()
    assert not agent.says("generation")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    assert ear.listen()[-2:] == [
        "STOPPING=1",
        "STATUS=ended with exit code 143: stopped while looking for the rendezvous store "
        f"at {endpoint}, for up to 600 s",
    ]


def test_the_status_shows_what_trains_and_no_worker_can_send_for_the_agent(job: Job, ear: Ear) -> None:
    recorder = (RECORDER, "--report", "--exit-0-on-sigterm")
    agent = job.start("a", "--nproc-per-node=2", script=recorder, environment=ear.environment)
    environment = job.wait_for_training(world=2).starts[0]["env"]
    assert not set(ear.environment) & set(environment)
    job.wait_for(ear.heard("STATUS=running: generation 1, 1 node, world size 2, step 10"), "a step")
    assert ear.listen()[0] == "READY=1"
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    said = ear.listen()
    assert "STATUS=leaving the job, as SIGTERM asks" in said[said.index("STOPPING=1") :]
    assert said[-1] == "STATUS=ended with exit code 143: stopped by SIGTERM"


@pytest.mark.long
def test_an_agent_whose_main_loop_is_stuck_falls_silent_though_its_other_threads_live(
    job: Job, ear: Ear
) -> None:
    port = port_for_a_store()
    agent = job.start(
        "a",
        f"--http-address=127.0.0.1:{port}",
        "--lease-ttl=60",  # whose end would end the agent
        environment={**ear.environment, **planted(f"stands still {job.folder / 'now'}")},
    )
    job.wait_for(lambda: ear.beats() >= 4, "beats")
    (job.folder / "now").touch()
    job.wait_for(lambda: ear.silent_s() > 2 * WATCHDOG_S, "the beats to end")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        assert response.status == 200, "another thread answers"
    assert agent.process.poll() is None
