"""When workers may start again on their GPUs: the real reader process over a scripted NVML, and how it can fail."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.machine.nvml import FIRST_S, GpuMemory, NvmlReader
from tests.io_threads import started_io
from tests.nvml_library import FakeLibrary

PATIENCE_S = 20.0
ONE, OTHER = "0000:3b:00.0", "GPU-aa"


class Bench:
    """A `GpuMemory` with a clock that only the test moves; `nvml` sets what NVML answers from now on."""

    def __init__(self, folder: Path, wait_s: float, *devices: str) -> None:
        self.now = 100.0
        self.library = FakeLibrary(folder)
        self.nvml = self.library.says
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        environment = {**os.environ, **self.library.environment}
        self.reader = NvmlReader(devices, environment, started_io(), self._events.put)
        self.memory = GpuMemory(self.reader, wait_s, lambda: self.now)

    def start(self) -> None:
        self.reader.start()
        self.memory.start()

    def answer(self) -> None:
        """Handle the next message of the reader."""
        event = self._events.get(timeout=PATIENCE_S)
        assert callable(event)
        event()

    def unheard(self) -> bool:
        return self._events.empty()

    def go(self, seconds: float) -> None:
        self.now += seconds
        self.memory.turn(self.now)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches = []

    def make(*devices: str, wait_s: float = 30.0) -> Bench:
        benches.append(Bench(tmp_path, wait_s, *(devices or (ONE,))))
        return benches[-1]

    yield make
    for each in benches:
        each.reader.close()


@pytest.fixture
def ready(bench: Callable[..., Bench]) -> Bench:
    """The baseline is 600 MiB."""
    made = bench()
    made.nvml("used 600")
    made.start()
    made.answer()
    return made


def test_free_memory_costs_one_question(ready: Bench) -> None:
    assert not ready.memory.waiting
    ready.memory.workers_gone(ready.now)
    assert ready.memory.waiting
    ready.answer()
    assert not ready.memory.waiting


def test_the_wait_lasts_until_the_memory_is_back(ready: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ready.nvml("used 70600")
    ready.memory.workers_gone(ready.now)
    ready.answer()
    for used in (40_000, 1_200):
        ready.nvml(f"used {used}")
        ready.go(0.75)
        ready.answer()
        assert ready.memory.waiting
    ready.nvml("used 1100")  # as good as free
    ready.go(0.75)
    ready.answer()
    assert not ready.memory.waiting
    assert caplog.messages == [f"GPU memory: 70000 MiB were given back within {3 * 0.75:.1f} s"]


def test_the_bound_ends_the_wait_and_what_stays_is_the_new_normal(
    ready: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    ready.nvml("used 5000")
    ready.memory.workers_gone(ready.now)
    ready.answer()
    ready.go(29.9)
    ready.answer()
    assert ready.memory.waiting
    ready.go(0.2)
    assert not ready.memory.waiting
    assert "4400 MiB more in use than before, 30.0 s after the workers ended" in caplog.text
    ready.memory.workers_gone(ready.now)
    ready.answer()
    assert not ready.memory.waiting


def test_memory_of_another_living_process_is_not_waited_for_but_that_of_the_dead(ready: Bench) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait(PATIENCE_S)
    ready.nvml("used 20600", f"pid {os.getpid()}", "pid_mib 20000", f"unknown_pid {os.getppid()}")
    ready.memory.workers_gone(ready.now)
    ready.answer()
    assert not ready.memory.waiting
    ready.nvml("used 20600", f"pid {dead.pid}", "pid_mib 20000")
    ready.memory.workers_gone(ready.now)
    ready.answer()
    assert ready.memory.waiting


def test_every_device_must_be_free_under_each_of_its_names(bench: Callable[..., Bench]) -> None:
    made = bench(ONE, OTHER, "3")
    made.nvml("no_processes 1")  # a driver that tells of no process
    made.start()
    made.answer()
    for busy in ("used", "used_other", "used_third"):
        made.nvml("no_processes 1", f"{busy} 9000")
        made.memory.workers_gone(made.now)
        made.answer()
        assert made.memory.waiting


@pytest.mark.parametrize(
    ("says", "logged"),
    [("used_error 9", "Driver Not Loaded"), ("find 6", "Not Found")],
)
def test_an_error_of_nvml_ends_all_waiting(
    ready: Bench, says: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    ready.nvml(says)
    ready.memory.workers_gone(ready.now)
    ready.answer()
    assert not ready.memory.waiting
    assert logged in caplog.text
    ready.memory.workers_gone(ready.now)
    assert not ready.memory.waiting


def test_a_reader_with_a_bug_ends_all_waiting(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    made = bench("GPU-\udcff")  # a name that it cannot pass to NVML
    made.start()
    made.answer()
    assert not made.memory.waiting
    assert "the process that asks NVML has ended" in caplog.text


def test_a_reader_that_was_killed_ends_all_waiting(ready: Bench, caplog: pytest.LogCaptureFixture) -> None:
    os.kill(ready.reader.pids[0], signal.SIGKILL)
    ready.answer()
    ready.memory.workers_gone(ready.now)
    assert not ready.memory.waiting
    assert "the process that asks NVML has ended" in caplog.text


def test_a_driver_that_hangs_is_asked_only_once(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.nvml("hang 1")
    made.start()
    made.go(FIRST_S - 0.1)
    assert made.memory.waiting, "workers start after the first reading"
    made.go(0.2)
    assert not made.memory.waiting
    made.memory.workers_gone(made.now)
    assert not made.memory.waiting, "there is no answer yet"


def test_without_devices_no_process_is_started_and_nothing_waits(tmp_path: Path) -> None:
    idle = Bench(tmp_path, 30.0)
    idle.start()
    idle.memory.workers_gone(idle.now)
    assert not idle.memory.waiting
    assert idle.memory.turn(idle.now) is None
    assert idle.unheard()


def test_the_reader_dies_with_the_agent(tmp_path: Path) -> None:
    library = FakeLibrary(tmp_path)
    library.says("hang 1")
    code = f"""
import os, time
from elastic_agent.agent.common.events import IoThread
from elastic_agent.agent.machine.nvml import NvmlReader
reader = NvmlReader([{ONE!r}], os.environ, IoThread(), print)
reader.start()
print(reader.pids[0], flush=True)
time.sleep(600)
"""
    environment = {**os.environ, **library.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    agent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    reader = Path("/proc") / agent.stdout.readline().strip()
    deadline = time.monotonic() + PATIENCE_S
    while (reader / "cmdline").read_text().split("\0")[1:2] != ["-I"]:
        # not there yet: the shim, or no command line at all while the kernel changes it
        assert time.monotonic() < deadline
        time.sleep(0.02)
    agent.kill()
    agent.communicate(timeout=PATIENCE_S)
    while (reader / "cmdline").exists() and (reader / "cmdline").read_bytes():
        assert time.monotonic() < deadline, "the reader lives on"
        time.sleep(0.02)
