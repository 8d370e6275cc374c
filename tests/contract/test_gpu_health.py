"""NVML asked after a failure: the real reader process, over a library of NVML that says what a test wants."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.machine.nvml import GpuHealth, NvmlReader
from tests.io_threads import started_io
from tests.nvml_library import FakeLibrary

GPUS = ("0000:3b:00.0", "0000:40:00.0")
PATIENCE_S = 20.0


class Bench:
    def __init__(self, environment: dict[str, str], gpus: tuple[str, ...] = GPUS) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        environment = {**os.environ, **environment}
        self.reader = NvmlReader(gpus, environment, started_io(), self.events.put)
        self.gpus = GpuHealth(self.reader)

    def start(self) -> None:
        self.reader.start()
        self.gpus.start()

    def answer(self) -> bool:
        """Handle the next message of the reader. Whether there is a new reading."""
        event = self.events.get(timeout=PATIENCE_S)
        assert callable(event)
        before = self.gpus._reading
        event()
        return self.gpus._reading is not before

    def fail(self) -> None:
        """A worker does, and NVML answers in time."""
        self.gpus.worker_failed()
        assert self.gpus.waiting
        assert self.answer()
        assert not self.gpus.waiting

    @property
    def faults(self) -> list[str]:
        return [fault.gpu for fault in self.gpus.faults]


@pytest.fixture
def library(tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(tmp_path)


@pytest.fixture
def bench(library: FakeLibrary) -> Iterator[Bench]:
    made = Bench(library.environment)
    yield made
    made.reader.close()


@pytest.fixture
def ready(bench: Bench) -> Bench:
    """The baseline is known: all is well."""
    bench.start()
    assert not bench.gpus.waiting, "nobody waits for the baseline"
    assert bench.answer()
    bench.gpus.generation_begins()
    return bench


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("ecc 2", list(GPUS)),
        ("ecc_other 2", [GPUS[1]]),
        ("failed 1", list(GPUS)),
        ("pending 1", []),
        ("ask 15", list(GPUS)),
        ("ask 16", list(GPUS)),
        ("find 15", list(GPUS)),
        ("find 6", list(GPUS)),
        ("find 4", []),
        ("ask 999", []),
    ],
)
def test_what_breaks_is_found(ready: Bench, library: FakeLibrary, says: str, expected: list[str]) -> None:
    library.says(says)
    ready.fail()
    assert ready.faults == expected


def test_what_was_told_of_one_generation_is_no_fault_in_the_next(ready: Bench, library: FakeLibrary) -> None:
    library.says("ecc 2")
    ready.fail()
    ready.gpus.reported(GPUS[:1])
    ready.fail()
    assert len(ready.faults) == 2, "it is one for another worker of the same generation, too"
    ready.gpus.generation_begins()
    ready.fail()
    assert ready.faults == [GPUS[1]], "no worker of the other one has failed"
    ready.gpus.reported(GPUS)
    ready.gpus.generation_begins()
    ready.fail()
    assert not ready.faults
    library.says("ecc 3")
    ready.fail()
    assert len(ready.faults) == 2


def test_nvml_that_hangs_is_waited_for_once_and_its_late_answer_counts_at_the_next_failure(
    ready: Bench, library: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    library.says("ask_hangs 1")
    ready.gpus.worker_failed()
    assert ready.gpus.waiting
    ready.gpus.overdue()
    assert not ready.gpus.waiting
    ready.gpus.reported(GPUS)
    ready.gpus.generation_begins()
    ready.gpus.worker_failed()
    assert not ready.gpus.waiting, "the first question has no answer yet"
    ready.gpus.overdue()
    assert caplog.text.count("NVML does not answer in time") == 1
    library.says("ecc 2")
    assert ready.answer()
    ready.gpus.generation_begins()
    ready.fail()
    assert len(ready.faults) == 2, "no failure has told of it"


def test_nvml_that_hangs_from_the_start_is_never_waited_for(
    bench: Bench, library: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    library.says("hang 1")
    bench.start()
    for _ in range(2):
        bench.gpus.worker_failed()
        assert not bench.gpus.waiting
        bench.gpus.overdue()
    assert not bench.gpus.faults
    assert caplog.text.count("NVML has not answered since this agent started") == 1


@pytest.mark.parametrize("by_nvml", [False, True])
def test_a_reader_that_dies_ends_the_wait_and_is_said_once(
    ready: Bench, library: FakeLibrary, by_nvml: bool, caplog: pytest.LogCaptureFixture
) -> None:
    library.says("ask_crashes 1" if by_nvml else "ask_hangs 1")
    ready.gpus.worker_failed()
    if not by_nvml:
        os.kill(ready.reader.pids[0], signal.SIGKILL)
    assert not ready.answer()
    assert not ready.gpus.waiting
    ready.gpus.worker_failed()
    assert not ready.gpus.waiting
    assert not ready.gpus.faults
    assert caplog.text.count("the process that asks NVML has ended") == 1


def test_a_machine_without_the_drivers_library_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Bench({"LD_LIBRARY_PATH": str(tmp_path)})
    made.start()
    made.answer()
    made.gpus.worker_failed()
    assert not made.gpus.waiting
    made.reader.close()
    assert "in time" not in caplog.text
