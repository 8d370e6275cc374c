"""What an earlier agent could not kill: who has to wait for it, and what is nothing to fear."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import CannotStart, ExitCode
from elastic_agent.agent.workers.processes import guard
from elastic_agent.agent.workers.processes.proc import life_of_pids, living_since
from elastic_agent.agent.workers.processes.unkillable import LOOK_AGAIN_S, await_end, file_for, living_of

ME = os.geteuid()

# --- Files


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def file(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> Path:
    """As a guard leaves it."""
    file = file_for(tmp_path / "elastic-agent-abc")
    write(file, f"{sleeper.pid} {living_since(sleeper.pid)}\n")
    return file


def write(file: Path, processes: str, life: str = life_of_pids()) -> None:
    file.touch(0o600)
    file.write_text(f"ours\n{life}\n{processes}")


class Clock:
    """An hour in a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_what_does_not_end_in_time_keeps_the_agent_from_starting(tmp_path: Path, file: Path) -> None:
    clock = Clock()
    with pytest.raises(CannotStart, match=r"process \d+ \(sleep\).* remove .*remains") as refused:
        await_end([tmp_path], ME, "ours", 60.0, clock, clock.sleep)
    assert refused.value.code is ExitCode.UNKILLABLE
    assert 60.0 <= clock.now <= 60.0 + LOOK_AGAIN_S
    assert file.exists()


def test_what_ends_late_is_waited_for_and_forgotten(
    tmp_path: Path, file: Path, sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now > 10.0:
            sleeper.send_signal(signal.SIGKILL)
            sleeper.wait()

    await_end([tmp_path], ME, "ours", 60.0, clock, sleep)
    assert 10.0 < clock.now < 11.0
    assert not file.exists()
    assert [record.getMessage()[:34] for record in caplog.records] == ["waiting up to 60 s (--kill-timeout"]


def test_another_job_does_not_wait(tmp_path: Path, file: Path) -> None:
    await_end([tmp_path], ME, "theirs", 60.0, sleep=lambda _: pytest.fail("it waits"))
    assert file.exists()


@pytest.mark.parametrize("lives", [True, False])
def test_what_pids_of_another_life_name_is_neither_believed_nor_removed(
    tmp_path: Path, file: Path, sleeper: subprocess.Popen[bytes], lives: bool
) -> None:
    """The machine has started anew, or a container with the same /tmp has its own."""
    start = living_since(sleeper.pid) if lives else "1"
    write(file, f"{sleeper.pid} {start}\n", life="another one")
    await_end([tmp_path], ME, "ours", 60.0, sleep=lambda _: pytest.fail("it waits"))
    assert file.exists()


def test_a_process_that_has_only_the_number_is_another(
    tmp_path: Path, file: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    write(file, f"{sleeper.pid} 1\n")
    await_end([tmp_path], ME, "ours", 60.0, sleep=lambda _: pytest.fail("it waits"))
    assert not file.exists()


def test_a_file_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over, clock = file_for(tmp_path / "elastic-agent-def"), Clock()
    write(over, "")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CannotStart):
        await_end([tmp_path], ME, "ours", 0.1, clock, clock.sleep)
    assert f"{over} cannot be removed: Operation not permitted" in caplog.text


def test_a_file_is_seen_only_when_it_is_whole(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, begun = file_for(tmp_path / "elastic-agent-abc"), []
    whole = os.write

    def half(fd: int, text: bytes) -> int:
        begun.append((file.exists(), living_of("ours", [tmp_path], ME)))
        return whole(fd, text)

    monkeypatch.setattr(os, "write", half)
    guard.write_unkillable(str(file), "ours", [sleeper.pid])
    assert begun == [(False, {})]
    assert living_of("ours", [tmp_path], ME) == {file: [sleeper.pid]}
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_file_that_a_full_disk_takes_in_part_is_none(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, text: write(fd, text[:-3]))
    guard.write_unkillable(str(file_for(tmp_path / "elastic-agent-abc")), "ours", [sleeper.pid])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("processes", ["7", "x y", "7 1 2", "\n"])
def test_what_says_nothing_keeps_nobody_from_starting(tmp_path: Path, processes: str) -> None:
    write(file_for(tmp_path / "elastic-agent-abc"), processes)
    assert living_of("ours", [tmp_path], ME) == {}


def test_what_another_could_have_put_there_is_left_alone(tmp_path: Path, file: Path) -> None:
    assert len(living_of("ours", [tmp_path, tmp_path / "none"], ME)) == 1
    assert living_of("ours", [tmp_path], ME + 1) == {}
    file.chmod(0o622)
    assert living_of("ours", [tmp_path], ME) == {}
    file.chmod(0o600)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert living_of("ours", [tmp_path], ME) == {}
