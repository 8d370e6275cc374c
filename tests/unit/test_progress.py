"""What happens between two steps: the page is written, listeners hear in their order, a pending change is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.worker.steps import progress
from elastic_agent.worker.steps.progress import Stage
from elastic_agent.worker.wire import shared_progress
from elastic_agent.worker.wire.environment import NAMES
from elastic_agent.worker.wire.shared_progress import SharedProgress


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedProgress]:
    """The page of this process, as its agent would see it."""
    for name, value in {
        "_words": None,
        "_listeners": (),
        "_refused": False,
        "on_pending": progress.on_pending,
    }.items():
        monkeypatch.setattr(progress, name, value)
    with closing(SharedProgress.make(generation=7)) as made:
        for name, text in environment(made).items():
            monkeypatch.setenv(name, text)
        yield made


def environment(of: SharedProgress) -> dict[str, str]:
    return {NAMES["page"]: of.path, "ELASTIC_AGENT_GENERATION": "7"}


def run(program: str, of: SharedProgress, *args: str) -> None:
    command = [sys.executable, "-c", f"from elastic_agent.worker import step\n{program}", *args]
    subprocess.run(command, env={**os.environ, **environment(of)}, check=True)


def test_every_step_is_seen_with_its_instant(ours: SharedProgress) -> None:
    before = time.monotonic()
    progress.step(11)
    between = time.monotonic()
    progress.step(12)
    reading = ours.read()
    assert (reading.first_step, reading.step) == (11, 12)
    assert reading.first_at is not None
    assert reading.stepped_at is not None
    assert before <= reading.first_at <= between <= reading.stepped_at <= time.monotonic()
    assert ours.words[shared_progress.ATTACHED] == os.getpid()


def test_the_last_step_before_a_kill_is_there(ours: SharedProgress) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", "import os\nfrom elastic_agent.worker import step\n"
         "for number in range(1, 1001): step(number)\nos.kill(os.getpid(), 9)"],
        env={**os.environ, **environment(ours)},
    )  # fmt: skip
    assert killed.returncode == -9
    assert (ours.read().first_step, ours.read().step) == (1, 1000)


def test_a_load_is_seen_from_its_begin_to_its_end(ours: SharedProgress) -> None:
    progress.loading()
    begun = ours.read()
    assert begun.load_at is not None
    assert begun.loaded_at is None
    progress.checkpoint_load(4, "corrupt", 0.1)
    assert ours.read() == begun, "the next older one is tried"
    progress.checkpoint_load(3, "ok", 0.2)
    loaded = ours.read()
    assert (loaded.loaded_at or 0) >= begun.load_at
    assert loaded.loaded_step == 3
    progress.loading()
    assert ours.read().load_at == begun.load_at, "the first one tells how long the script took to get there"


class Counts:
    """What can be used as an integer, as numpy's and torch's can."""

    def __index__(self) -> int:
        return 5


@pytest.mark.parametrize("step", [5, Counts()], ids=["int", "__index__"])
def test_whatever_is_a_number_is_a_step(ours: SharedProgress, step: int) -> None:
    progress.step(step)
    assert ours.read().step == 5


@pytest.mark.parametrize("wrong", ["12", 1.5, None, -1, 2**63], ids=repr)
def test_what_is_no_step_is_said_once_and_ends_nothing(
    ours: SharedProgress, caplog: pytest.LogCaptureFixture, wrong: object
) -> None:
    for _ in range(3):
        progress.step(wrong)  # type: ignore[arg-type]
    assert ours.read().step is None
    assert len(caplog.records) == 1
    progress.step(13)
    assert ours.read().step == 13


def test_a_child_of_the_worker_does_not_speak_for_it(ours: SharedProgress, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os\n"
        "from elastic_agent.worker import step\n"
        "def children(first):\n"
        "    for number, method in enumerate(('fork', 'spawn', 'forkserver'), start=first):\n"
        "        child = multiprocessing.get_context(method).Process(target=step, args=(number,))\n"
        "        child.start(); child.join(); assert child.exitcode == 0\n"
        "if __name__ == '__main__':\n"
        "    children(100)\n"
        "    step(2)\n"
        "    children(200)\n"
        "    if (forked := os.fork()) == 0: step(300); os._exit(0)\n"
        "    os.waitpid(forked, 0)\n"
        "    import subprocess, sys\n"
        "    subprocess.run([sys.executable, '-c', 'from elastic_agent.worker import step; step(400)'], check=True)\n"
    )
    subprocess.run([sys.executable, script], env={**os.environ, **environment(ours)}, check=True)
    assert (ours.read().first_step, ours.read().step) == (2, 2)


def test_of_two_programs_one_after_the_other_both_speak(ours: SharedProgress) -> None:
    run("step(1)", ours)
    run("step(2)", ours)
    assert ours.read().step == 2


def test_without_an_agent_everything_goes_on(ours: SharedProgress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAMES["page"])
    heard: list[int] = []
    progress.on_step(heard.append)
    progress.step(3)
    assert heard == [3]
    assert ours.read().step is None


@pytest.mark.parametrize(
    "change",
    [
        {NAMES["page"]: "/nowhere"},
        {NAMES["page"]: "/dev/null"},
        {"ELASTIC_AGENT_GENERATION": "x"},
        {"ELASTIC_AGENT_GENERATION": "6"},
    ],
    ids=str,
)
def test_a_page_that_cannot_be_used_is_named_and_done_without(
    ours: SharedProgress,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, str],
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    progress.step(1)
    progress.step(2)
    assert ours.read().step is None
    [record] = caplog.records
    assert "cannot see this worker's steps" in record.message


def test_listeners_are_called_in_their_order(ours: SharedProgress) -> None:
    heard: list[tuple[str, int]] = []

    def listen(name: str, every: int, stage: Stage) -> None:
        progress.on_step(lambda step: heard.append((name, step)), every=every, stage=stage)

    listen("copy", 2, Stage.STATE)
    listen("second copy", 1, Stage.STATE)
    listen("position", 1, Stage.POSITION)
    progress.on_pending = lambda step: heard.append(("pending", step))
    progress.step(1)
    ours.words[shared_progress.PENDING] = 1
    progress.step(2)
    assert heard == [
        ("position", 1), ("second copy", 1),
        ("position", 2), ("copy", 2), ("second copy", 2), ("pending", 2),
    ]  # fmt: skip


def test_a_listener_hears_no_more_once_it_is_ended(ours: SharedProgress) -> None:
    heard: list[int] = []
    end = progress.on_step(heard.append)
    stays = progress.on_step(heard.append)
    progress.step(1)
    end()
    end()
    progress.step(2)
    assert heard == [1, 1, 2]
    stays()


LEFT_TO_AGENT = """
import os, signal, subprocess, sys
from elastic_agent.worker.steps.torch_workarounds import script_handles_sigterm
step(1)
signal.raise_signal(signal.SIGTERM)
assert not script_handles_sigterm()
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
itself = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"]
assert subprocess.run(itself).returncode == -signal.SIGTERM
"""
OWN_HANDLER = """
import signal
from elastic_agent.worker.steps.torch_workarounds import script_handles_sigterm
called = []
signal.signal(signal.SIGTERM, lambda *_: called.append(1))
step(1)
signal.raise_signal(signal.SIGTERM)
assert called
assert script_handles_sigterm()
"""


@pytest.mark.parametrize(("program", "left"), [(LEFT_TO_AGENT, 1), (OWN_HANDLER, 0)])
def test_a_sigterm_to_all_processes_is_left_to_the_agent_but_by_children_and_own_handlers(
    program: str, left: int, ours: SharedProgress
) -> None:
    ours.words[shared_progress.ALL_SIGNALLED] = 1
    run(program, ours)
    assert ours.words[shared_progress.LEAVES_SIGTERM] == left


def test_elsewhere_a_sigterm_ends_a_worker_at_once(ours: SharedProgress) -> None:
    with pytest.raises(subprocess.CalledProcessError) as ended:
        run("import signal\nstep(1)\nsignal.raise_signal(signal.SIGTERM)", ours)
    assert ended.value.returncode == -15
    assert not ours.words[shared_progress.LEAVES_SIGTERM]
