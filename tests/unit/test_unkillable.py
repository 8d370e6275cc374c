"""What an earlier agent could not kill: who has to wait for it, who is warned, and what is nothing to fear."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import CannotStart, ExitCode
from elastic_agent.agent.workers.processes import guard
from elastic_agent.agent.workers.processes.proc import boot_id, living_since, pid_namespace
from elastic_agent.agent.workers.processes.unkillable import (
    LOOK_AGAIN_S,
    Survivor,
    Survivors,
    await_end,
    file_for,
    find,
    judge,
    still_living,
)

from .test_guard import add

ME = os.geteuid()
ASLEEP = "process 7 (python) is in uninterruptible sleep (D), in the kernel's nfs_wait"
SEVEN, EIGHT = Survivor(7, "4711", 3), Survivor(8, "4712", None)
FILES = {job: Path(f"/tmp/elastic-agent-{job}.remains") for job in ("ours", "theirs")}


def left_of(
    *jobs: str, boot: str = "boot", processes: tuple[Survivor, ...] = (SEVEN, EIGHT)
) -> dict[Path, Survivors]:
    return {FILES[job]: Survivors(job, "b", boot, 1, processes) for job in jobs}


@pytest.mark.parametrize(
    ("found", "living", "refused", "warned", "over"),
    [
        ((), (), False, 0, 0),
        (("ours",), (), False, 0, 1),
        (("ours",), (SEVEN,), True, 0, 0),
        (("ours",), (SEVEN, EIGHT), True, 0, 0),
        (("theirs",), (EIGHT,), False, 1, 0),
        (("theirs",), (), False, 0, 1),
        (("ours", "theirs"), (SEVEN,), True, 1, 0),
    ],
)
def test_only_what_lives_of_the_same_job_is_waited_for(
    found: tuple[str, ...], living: tuple[Survivor, ...], refused: bool, warned: int, over: int
) -> None:
    verdict = judge(left_of(*found), "ours", dict.fromkeys(living, ASLEEP))
    assert (bool(verdict.refusal), len(verdict.warnings), len(verdict.over)) == (refused, warned, over)


def test_a_refusal_says_who_it_is_where_it_stands_and_what_to_do() -> None:
    refusal = judge(left_of("ours"), "ours", {SEVEN: ASLEEP}).refusal
    assert f"rank 3 of node b: {ASLEEP}" in refusal
    assert f"remove {FILES['ours']}" in refusal
    (warning,) = judge(left_of("theirs"), "ours", {EIGHT: "process 8"}).warnings
    assert "job theirs" in warning
    assert "node b: process 8" in warning
    assert "rank" not in warning


def test_a_process_is_known_by_its_start_and_by_the_life_of_the_machine(tmp_path: Path) -> None:
    proc = tmp_path
    add(proc, 7, state="D", start=4718)
    same, another = Survivor(7, "4718", 0), Survivor(7, "4717", 0)

    def living(one: Survivor, boot: str = "boot") -> list[Survivor]:
        found = left_of("ours", boot=boot, processes=(one,)).values()
        return list(still_living(found, "boot", proc))

    assert living(same) == [same]
    assert living(another) == []
    assert living(same, boot="the one before") == []
    assert living(Survivor(9, "4720", 0)) == []
    (proc / "7" / "stat").write_text((proc / "7" / "stat").read_text().replace(" D ", " Z "))
    assert living(same) == []


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
    write(file, [{"pid": sleeper.pid, "start": living_since(sleeper.pid), "rank": 1}])
    return file


def write(file: Path, processes: object, boot: str = boot_id(), pids: int | None = None) -> None:
    file.touch(0o600)
    held = {"job": "ours", "node": "b", "boot": boot, "processes": processes}
    file.write_text(json.dumps({"v": 2, "pid_namespace": pids or pid_namespace(), **held}))


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
    with pytest.raises(CannotStart, match=r"rank 1 of node b: process \d+ \(sleep\)") as refused:
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


def test_another_job_starts_with_a_warning(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await_end([tmp_path], ME, "theirs", 60.0, sleep=lambda _: pytest.fail("it waits"))
    assert "may hold its GPUs" in caplog.text
    assert file.exists()


def test_of_an_earlier_life_of_the_machine_nothing_is_left(
    tmp_path: Path, file: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    process = {"pid": sleeper.pid, "start": living_since(sleeper.pid), "rank": 1}
    write(file, [process], boot="0123")
    await_end([tmp_path], ME, "ours", 60.0, sleep=lambda _: pytest.fail("it waits"))
    assert not file.exists()


@pytest.mark.parametrize("lives", [True, False])
def test_what_another_pid_namespace_has_left_is_neither_believed_nor_removed(
    tmp_path: Path, file: Path, sleeper: subprocess.Popen[bytes], lives: bool
) -> None:
    start = living_since(sleeper.pid) if lives else "1"
    write(file, [{"pid": sleeper.pid, "start": start, "rank": 1}], pids=pid_namespace() + 1)
    await_end([tmp_path], ME, "ours", 60.0, sleep=lambda _: pytest.fail("it waits"))
    assert file.exists()


def test_a_file_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over, clock = file_for(tmp_path / "elastic-agent-def"), Clock()
    write(over, [])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CannotStart):
        await_end([tmp_path], ME, "ours", 60.0, clock, clock.sleep)
    assert caplog.text.count(f"{over} cannot be removed: Operation not permitted") == 1


def test_a_file_is_seen_only_when_it_is_whole(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, begun = file_for(tmp_path / "elastic-agent-abc"), []
    whole = os.write

    def half(fd: int, text: bytes) -> int:
        begun.append((file.exists(), find([tmp_path], ME)))
        return whole(fd, text)

    monkeypatch.setattr(os, "write", half)
    guard.write_unkillable(str(file), "ours", "b", [sleeper.pid], {})
    assert begun == [(False, {})]
    (left,) = find([tmp_path], ME).values()
    assert left.processes == (Survivor(sleeper.pid, living_since(sleeper.pid), None),)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "processes",
    [None, 7, [7], [{"pid": 1, "start": "1", "rank": 0}], [{"pid": 7, "start": 1, "rank": 0}], [{"pid": 7}]],
)
def test_what_says_nothing_is_left_alone(tmp_path: Path, processes: object) -> None:
    file = file_for(tmp_path / "elastic-agent-abc")
    write(file, processes)
    assert find([tmp_path], ME) == {}
    assert file.exists()


def test_what_another_could_have_put_there_is_left_alone(tmp_path: Path, file: Path) -> None:
    assert len(find([tmp_path, tmp_path / "none"], ME)) == 1
    assert find([tmp_path], ME + 1) == {}
    file.chmod(0o622)
    assert find([tmp_path], ME) == {}
    file.chmod(0o600)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert find([tmp_path], ME) == {}
