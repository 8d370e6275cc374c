"""Where an agent stands in the tree of cgroups, whether its part of it is its own, and what lives in one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from elastic_agent.agent.machine import cgroups
from elastic_agent.agent.machine.cgroups import claim_cgroup, is_delegated
from elastic_agent.agent.workers.processes.proc import cgroup_members, empty_cgroup, remove_cgroup
from elastic_agent.worker.storage.memory.available_memory import own_cgroup

V2 = "34 25 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 25 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
ROOT = "24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "expected"),
    [
        ("0::/system.slice/a.service", [ROOT, V2], "/sys/fs/cgroup/system.slice/a.service"),
        ("9:name=systemd:/x\n0::/a", [ROOT, V1, V2.replace("cgroup ", "cgroup/unified ")], "/sys/fs/cgroup/unified/a"),
        ("0::/", [V2], "/sys/fs/cgroup"),
        ("0::/pod/job", [V2.replace(" / ", " /pod ")], "/sys/fs/cgroup/job"),
        ("0::/pod", [V2.replace(" / ", " /pod ")], "/sys/fs/cgroup"),
        ("0::/podder", [V2.replace(" / ", " /pod ")], None),
        ("0::/podder", [V2.replace(" / ", " /pod "), V2], "/sys/fs/cgroup/podder"),
        ("0::/a", [V2.replace("/sys/fs/cgroup", r"/my\040own")], "/my own/a"),
        ("0::/a", [ROOT, V1], None),
        ("5:memory:/a", [ROOT, V1, V2], None),
        ("0::/..", [V2], None),
        ("0::/../other", [V2], None),
    ],
)  # fmt: skip
def test_the_agents_own_place(tmp_path: Path, cgroup: str, mounts: list[str], expected: str | None) -> None:
    (tmp_path / "cgroup").write_text(f"{cgroup}\n")
    (tmp_path / "mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    assert own_cgroup("", tmp_path) == (Path(expected) if expected is not None else None)


def test_without_proc_there_is_no_place(tmp_path: Path) -> None:
    assert own_cgroup("", tmp_path) is None


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({}, False),
        ({"user.delegate": b"1"}, True),
        ({"trusted.delegate": b"1"}, True),
        ({"user.delegate": b"0"}, False),
    ],
)
def test_root_needs_systemds_mark_and_may_read_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: dict[str, bytes], expected: bool
) -> None:
    def getxattr(_path: Path, name: str) -> bytes:
        if name not in marks:
            raise OSError(errno.ENODATA, "no such attribute")
        return marks[name]

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert is_delegated(tmp_path, 0) is expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
def test_others_than_root_own_what_was_handed_to_them_and_not_what_lies_within(tmp_path: Path) -> None:
    slice_, service, inner = tmp_path, tmp_path / "a.service", tmp_path / "a.service" / "inner"
    inner.mkdir(parents=True)
    os.chown(service, 4711, 4711)
    os.chown(inner, 4711, 4711)
    assert [is_delegated(folder, 4711) for folder in (slice_, service, inner)] == [False, True, False]
    assert not is_delegated(service, 4712)
    assert not is_delegated(service, 0)


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    """Files as the kernel would show them, and one below it."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "cgroup.procs").write_text("30\n0\n10\n")
    (tmp_path / "inner" / "cgroup.procs").write_text("20\n")
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    return tmp_path


def test_a_cgroup_whose_processes_may_not_be_moved_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No worker could enter one below it, and so none would start."""
    monkeypatch.setattr(cgroups, "own_cgroup", lambda controller="": tmp_path)
    monkeypatch.setattr(cgroups, "is_delegated", lambda cgroup, uid: True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "cgroup.procs")
    assert claim_cgroup("3f2a") is None
    assert not list(tmp_path.iterdir())
    assert "may not be moved" in caplog.text


def test_members_are_those_of_all_levels_that_have_a_number_here(cgroup: Path) -> None:
    assert cgroup_members(cgroup) == (10, 20, 30)


def test_what_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert cgroup_members(tmp_path / "none") == ()
    assert empty_cgroup(tmp_path / "none")
    remove_cgroup(tmp_path / "none")


def test_a_cgroup_is_killed_as_a_whole_and_empty_only_when_the_kernel_says_so(cgroup: Path) -> None:
    assert not empty_cgroup(cgroup)
    assert (cgroup / "cgroup.kill").read_text() == "1"
    (cgroup / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    (cgroup / "cgroup.kill").write_text("")
    assert empty_cgroup(cgroup)
    assert (cgroup / "cgroup.kill").read_text() == "", "nothing was left to kill"


def test_a_kernel_without_cgroup_kill_gets_a_signal_for_each_member(cgroup: Path) -> None:
    (cgroup / "cgroup.kill").mkdir()  # cannot be written
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    (cgroup / "cgroup.procs").write_text(f"{sleepers[0].pid}\n")
    (cgroup / "inner" / "cgroup.procs").write_text(f"{sleepers[1].pid}\n")
    assert not empty_cgroup(cgroup)
    assert [sleeper.wait(20) for sleeper in sleepers] == [-signal.SIGKILL] * 2
