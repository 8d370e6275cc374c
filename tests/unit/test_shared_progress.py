"""The page that worker and agent share: what each writes the other reads, and what is no page is said to be none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from elastic_agent.agent.checkpoints import handover
from elastic_agent.agent.main import assembly as agent_parts
from elastic_agent.agent.main import run
from elastic_agent.agent.torchrun import membership
from elastic_agent.pool import daemon as assembly
from elastic_agent.worker.storage.disk import commit_permission
from elastic_agent.worker.wire import shared_progress
from elastic_agent.worker.wire.shared_progress import (
    CHOSEN_STEP,
    FIRST_AT,
    FIRST_STEP,
    GENERATION,
    KEPT_TIMES,
    LOAD_AT,
    LOADED_AT,
    LOADED_STEP,
    OWN_COUNT,
    OWN_TIMES,
    PENDING,
    POLLED_AT,
    SAVING,
    SCRIPT_AT,
    SIZE,
    STEP,
    STEPPED_AT,
    VERSION,
    Reading,
    SharedProgress,
    SharedProgressError,
)


@pytest.fixture
def ours() -> Iterator[SharedProgress]:
    with closing(SharedProgress.make(generation=7)) as made:
        yield made


@pytest.mark.parametrize("user", [assembly, commit_permission, handover, membership, agent_parts, run])
def test_leases_are_judged_by_a_clock_that_goes_on_while_the_machine_sleeps(user: ModuleType) -> None:
    """And what they are compared with, too. `time.monotonic` stands still: a lease would seem to last."""
    assert user.clock is shared_progress.clock
    assert shared_progress.clock.args == shared_progress.clock_ns.args == (time.CLOCK_BOOTTIME,)


def test_a_new_page_tells_of_nothing(ours: SharedProgress) -> None:
    assert ours.read() == Reading()
    assert (ours.words[GENERATION], ours.words[PENDING]) == (7, 0)


def test_what_one_process_writes_the_other_reads(ours: SharedProgress) -> None:
    program = (
        "import sys; from elastic_agent.worker.wire import shared_progress\n"
        "words = shared_progress.SharedProgress.attach(sys.argv[1], 7).words\n"
        "assert words[shared_progress.PENDING] == 1\n"
        "words[shared_progress.STEPPED_AT], words[shared_progress.STEP] = 2_500_000_000, 2**62\n"
    )
    ours.words[PENDING] = 1
    subprocess.run([sys.executable, "-c", program, ours.path], check=True)
    reading = ours.read()
    assert (reading.step, reading.stepped_at) == (2**62, 2.5)


def test_each_word_is_read_as_what_it_is(ours: SharedProgress) -> None:
    for number, word in enumerate(
        (STEP, STEPPED_AT, FIRST_STEP, FIRST_AT, SCRIPT_AT, LOAD_AT, LOADED_AT,
         LOADED_STEP, CHOSEN_STEP, POLLED_AT, SAVING),
        start=1,
    ):  # fmt: skip
        ours.words[word] = number * 10**9
    assert ours.read() == Reading(
        step=10**9, stepped_at=2.0, first_step=3 * 10**9, first_at=4.0, script_at=5.0, load_at=6.0, loaded_at=7.0,
        loaded_step=8 * 10**9, chosen_step=9 * 10**9, polled_at=10.0, saving=True,
    )  # fmt: skip


def test_own_times_are_those_after_the_ones_that_were_read(ours: SharedProgress) -> None:
    assert ours.own_times(0) == (0, [])
    for number in range(100):
        ours.words[OWN_TIMES + number % KEPT_TIMES] = number
        ours.words[OWN_COUNT] = number + 1
        assert ours.own_times(number) == (number + 1, [number])
    # The oldest word may be overwritten at this moment: it is left out.
    assert ours.own_times(60) == (100, list(range(100 - KEPT_TIMES + 1, 100)))
    assert ours.own_times(90) == (100, list(range(90, 100)))
    assert ours.own_times(100) == (100, [])


def test_a_file_that_is_too_small_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(bytes(SIZE - 1))
    with pytest.raises(SharedProgressError, match=f"{SIZE - 1} bytes, a page has {SIZE}"):
        SharedProgress.attach(str(tmp_path / "cut"), 7)


@pytest.mark.parametrize("version", [1, VERSION + 1])
def test_a_page_of_another_version_is_refused(ours: SharedProgress, version: int) -> None:
    """With version 1 came other names of the variables, so that its worker and this agent have no common fence."""
    ours.words[0] += (version - VERSION) << 48
    with pytest.raises(SharedProgressError, match="same elastic-agent"):
        SharedProgress.attach(ours.path, 7)


def test_a_page_of_another_generation_is_refused(ours: SharedProgress) -> None:
    with pytest.raises(SharedProgressError, match="generation 7, this process of 6"):
        SharedProgress.attach(ours.path, 6)


def test_nobody_can_cut_it_short_under_the_agent(ours: SharedProgress) -> None:
    with pytest.raises(PermissionError):
        os.truncate(ours.path, 0)
