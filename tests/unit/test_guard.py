"""Which processes belong to the agent's workers, by a made-up /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.workers.processes import guard
from elastic_agent.agent.workers.processes.guard import IGNORED
from elastic_agent.agent.workers.processes.proc import find_processes, orphans_with
from elastic_agent.agent.workers.processes.shim import STAY_IGNORED

OURS = "ELASTIC_AGENT_INCARNATION=abc"


def add(
    proc: Path,
    pid: int,
    *environ: str,
    parent: int = 1,
    session: int = 1,
    name: str = "sh",
    state: str = "S",
    start: int = 4711,
) -> None:
    entry = proc / str(pid)
    entry.mkdir()
    after = [state, parent, pid, session, *[0] * 15, start, 0]
    (entry / "stat").write_text(f"{pid} ({name}) " + " ".join(map(str, after)) + "\n")
    (entry / "environ").write_text("".join(f"{variable}\0" for variable in environ))


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Pid 1, one of another agent (10), a worker (20), and what is no process at all."""
    add(tmp_path, 1)
    add(tmp_path, 10, "PATH=/bin", "X" + OURS, OURS + "d", session=10)
    add(tmp_path, 20, "PATH=/bin", OURS, "ELASTIC_AGENT_GENERATION=7", session=20)
    (tmp_path / "meminfo").write_text("")
    (tmp_path / "30").mkdir()  # ended between the listing and the look
    return tmp_path


def pids(sessions: Collection[int], **others: Any) -> tuple[int, ...]:
    return tuple(sorted(find_processes(sessions, **others)))


def test_a_marked_environment_is_found_and_a_similar_one_is_not(proc: Path) -> None:
    assert list(orphans_with(OURS, "0", proc)) == [20]
    assert list(orphans_with(OURS[:-1], "0", proc)) == []


def test_a_process_in_a_workers_session_belongs_whatever_its_environment(proc: Path) -> None:
    add(proc, 21, session=20)
    assert pids({20}, proc=proc) == (20, 21)


def test_descendants_belong_whatever_their_session_and_environment(proc: Path) -> None:
    add(proc, 40, parent=20, session=40)
    add(proc, 9, parent=40, session=9)
    add(proc, 11, parent=10, session=10)
    assert pids((), others=(20,), proc=proc) == (9, 20, 40)


@pytest.mark.parametrize("state", ["Z", "X"])
def test_the_dead_are_not_found(proc: Path, state: str) -> None:
    add(proc, 60, OURS, session=20, parent=20, state=state)
    assert pids({20}, proc=proc) == (20,)


def test_a_name_that_looks_like_other_fields_changes_nothing(proc: Path) -> None:
    add(proc, 70, session=20, name="x) Z 1 (y")
    add(proc, 71, name=") R 20 20 20", session=71)
    assert pids({20}, proc=proc) == (20, 70)


def test_the_caller_and_pid_1_are_spared(proc: Path) -> None:
    add(proc, os.getpid(), OURS, session=20)
    assert pids({1, 20}, proc=proc) == (20,)


def test_those_that_hang_in_the_kernel_are_asked_last(proc: Path) -> None:
    """Who asks may be held there."""
    add(proc, 5, OURS, state="D")
    assert list(orphans_with(OURS, "0", proc)) == [20, 5]


def test_no_environment_is_read_but_of_what_may_be_an_orphan_of_the_agent(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read of another may not come back: its memory may be locked in the kernel."""
    add(proc, 80, parent=1, start=5000)
    add(proc, os.getpid(), parent=80, start=6000)  # a guard that has replaced another
    add(proc, 81, OURS, parent=80, session=81, start=5500)
    add(proc, 82, OURS, parent=os.getpid(), session=82, start=5500)
    add(proc, 83, OURS, parent=99, session=83, start=5500)  # ended between the look at 83 and its own
    add(proc, 90, parent=10, start=5500)  # another's child
    monkeypatch.setattr("builtins.open", spy := Spy())
    assert sorted(orphans_with(OURS, "5500", proc)) == [81, 82, 83]
    read = {int(Path(path).parent.name) for path in spy.opened if path.endswith("/environ")}
    assert read == {81, 82, 83, os.getpid()}


class Spy:
    def __init__(self) -> None:
        self.opened: list[str] = []
        self._open = open

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        self.opened.append(os.fspath(path))
        return self._open(path, *args, **kwargs)


def test_a_search_that_cannot_be_made_has_not_found_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the most processes that a user may have: what is left is killed by its session all the same."""

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with monkeypatch.context() as patch:
        patch.setattr(guard._thread, "start_new_thread", refuse)
        patch.setattr(guard, "COMPLETE_WITHIN_S", 0.2)
        begun = time.monotonic()
        report = guard._sweep("abc", {sleeper.pid}, 0, "0")
    assert 0.2 <= time.monotonic() - begun < guard.SWEEP_S
    assert sleeper.wait() == -signal.SIGKILL
    assert report.endswith(f"killed what its workers left: {sleeper.pid}")


def test_an_environment_that_hangs_in_the_kernel_keeps_the_guard_from_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)

    def hang(*_: object) -> Iterator[int]:
        yield sleeper.pid
        time.sleep(1.0)

    with monkeypatch.context() as patch:
        patch.setattr(guard, "orphans_with", hang)
        patch.setattr(guard, "MARKED_WITHIN_S", 0.02)
        patch.setattr(guard, "COMPLETE_WITHIN_S", 0.1)
        report = guard._sweep("abc", set(), 0, "0")
    assert sleeper.wait() == -signal.SIGKILL
    assert report.endswith(f"killed what its workers left: {sleeper.pid}")


def test_scripts_that_import_nothing_of_ours_ignore_the_same_signals() -> None:
    agent = Path(__file__).parents[2] / "agent"
    written = ", ".join(f"signal.{number.name}" for number in IGNORED)
    texts = {str(file.relative_to(agent)): file.read_text() for file in agent.rglob("*.py")}
    scripts = {name for name, text in texts.items() if "\nIGNORED = " in text}
    assert scripts == {
        "workers/processes/guard.py",
        "workers/processes/shim.py",
    }
    for name in scripts:
        assert f"\nIGNORED = ({written})\n" in texts[name], name
        assert "in IGNORED:" in texts[name], name
    assert set(STAY_IGNORED) < set(IGNORED), "what people let a worker ignore, the others ignore anyhow"
