"""The kernel's log, in the form in which it writes of GPUs and of processes that it has killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.workers.failures import post_mortem
from elastic_agent.agent.workers.failures.error_report import ErrorReport
from elastic_agent.agent.workers.failures.post_mortem import (
    KMSG,
    KernelLog,
    MachineEvent,
    PostMortem,
    Trouble,
    address,
    parse,
    pids_are_the_kernels,
)

OOM, XID, ECC = Trouble.OUT_OF_MEMORY, Trouble.XID, Trouble.ECC


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off.", (XID, 1234, "0000:3b:00")),
        ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.", (XID, 0, "0000:44:00")),
        ("NVRM: Xid (PCI:0000:3B:00): 74, pid='<unknown>', name=<unknown>, NVLink", (XID, 0, "0000:3b:00")),
        ("NVRM: Xid (PCI:0001:3b:00): 119, pid=77, name=python3, Timeout waiting for RPC", (XID, 77, "0001:3b:00")),
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid=1, An uncorrectable double bit error (DBE)", (ECC, 1, "0000:3b:00")),
        ("NVRM: Xid (PCI:0000:3b:00): 94, pid=7, name=python, Contained: SM (0x1).", (ECC, 7, "0000:3b:00")),
        ("NVRM: Xid (PCI:0000:3b:00): 95, pid=7, Uncontained: LTC TAG", (ECC, 7, "0000:3b:00")),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault", None),
        ("NVRM: Xid (PCI:0000:3b:00): 13, pid=7, Graphics Exception", None),
        ("NVRM: Xid (PCI:0000:3b:00): 43, pid=7, Ch 00000010", None),
        ("NVRM: Xid (PCI:0000:3b:00): 63, Row Remapper: New row marked for remapping", None),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", None),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module", None),
        (
            "Out of memory: Killed process 4711 (python3) total-vm:9kB, anon-rss:8kB, file-rss:0kB, UID:0",
            (OOM, 4711, ""),
        ),
        ("Memory cgroup out of memory: Killed process 12 (pt_main_thread) total-vm:1kB", (OOM, 12, "")),
        ("Memory cgroup out of memory: Kill process 12 (python) score 900 or sacrifice child", (OOM, 12, "")),
        ("oom_reaper: reaped process 4711 (python3), now anon-rss:0kB", None),
        ("Memory failure: 0x12ab: Killing python3:815 due to hardware memory corruption", (ECC, 815, "")),
        ("Memory failure: 0x1: Sending SIGBUS to a:b:99 due to hardware memory corruption", (ECC, 99, "")),
        ("eth0: link up", None),
    ],
)  # fmt: skip
def test_a_message_that_tells_of_trouble(message: str, expected: tuple[Trouble, int, str] | None) -> None:
    found = list(parse([message]))
    assert [(event.trouble, event.pid, event.device) for event in found] == ([expected] if expected else [])
    assert all(event.text == message for event in found)


def test_a_gpu_that_fell_off_the_bus_in_several_lines() -> None:
    """As newer drivers write it."""
    lines = [
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    assert [(event.trouble, event.device) for event in parse(lines)] == [(XID, "0000:b3:00")]
    assert not list(parse(lines[1:])), "they do not say which GPU they are about"


def test_what_a_message_holds_is_cleaned_and_cut() -> None:
    [event] = parse(["NVRM: Xid (PCI:0000:3b:00): 79, \x1b[31m" + "x" * 5000])
    assert len(event.text) == 160
    assert event.text.isprintable()


EVENTS = (
    MachineEvent(XID, "mine", 0, "0000:3b:00"),
    MachineEvent(XID, "another's", 0, "0000:44:00"),
    MachineEvent(OOM, "killed", 17),
    MachineEvent(OOM, "a child", 18),
)


@pytest.mark.parametrize(
    ("pid", "exception", "texts"),
    [
        (17, "", ["mine", "killed"]),
        (18, "", ["mine", "a child"]),
        (19, "RuntimeError: DataLoader worker (pid 18) is killed by signal: Killed. ", ["mine", "a child"]),
        (0, "DataLoader worker (pid 18) is killed", ["mine"]),  # in a container pids are others
    ],
)
def test_only_what_concerns_a_worker_is_told_of_it(pid: int, exception: str, texts: list[str]) -> None:
    worker = PostMortem(
        *("a", 1, 0, 0, 1),
        ErrorReport(exception),
        kernel=EVENTS,
        pid=pid,
        devices=frozenset({"0000:3b:00"}),
    )
    assert [event.text for event in worker.kernel_events] == texts


def test_an_address_has_one_form() -> None:
    assert address("00000000:3B:00.0") == address("0000:3b:00") == "0000:3b:00"


@pytest.mark.parametrize("kind", ["missing", "file", "console"])
def test_without_a_log_nothing_is_known(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kmsg"
    if kind == "file":
        path.write_text("6,1,1,-;Out of memory: Killed process 1 (a)\n")
    elif kind == "console":
        path.symlink_to("/dev/null")  # as some containers have it
    log = KernelLog(path)
    log.forget()
    assert log.events() == ()


def test_only_the_kernels_own_records_count_and_those_that_are_lost_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [
        b"6,1,9,-;Out of memory: Killed process 1 (a)\n SUBSYSTEM=x\n",
        b"12,2,9,-;Out of memory: Killed process 2 (a user wrote this)\n",
        BrokenPipeError(),
        b"\xff\n",
        b"4,5,9,c;Memory cgroup out of memory: Killed process 3 (c) total-vm\n",
        BlockingIOError(),
    ]

    def read(fd: int, size: int) -> bytes:
        record = records.pop(0)
        if isinstance(record, OSError):
            raise record
        return record

    monkeypatch.setattr(post_mortem.os, "read", read)
    assert [event.pid for event in parse(post_mortem._messages(0))] == [1, 3]
    assert not records


def readable() -> bool:
    try:
        os.close(os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return pids_are_the_kernels()


@pytest.mark.skipif(
    not readable() or os.geteuid() != 0, reason="needs a kernel's log that may be read and written"
)
def test_the_real_log_gives_nothing_of_before_and_nothing_that_a_user_wrote() -> None:
    log = KernelLog()
    KMSG.write_text("Out of memory: Killed process 1 (from a test)")
    log.forget()
    KMSG.write_text("Out of memory: Killed process 1 (from a test)")
    assert log.events() == ()


def test_whose_pids_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    unshare = [sys.executable, "-c", "import os; print(os.readlink('/proc/self/ns/pid'))"]
    here = subprocess.run(unshare, capture_output=True, text=True, check=True).stdout.strip()
    assert pids_are_the_kernels() == (here == "pid:[4026531836]")
    monkeypatch.setattr(post_mortem, "pid_namespace", lambda: 4026531836)
    assert pids_are_the_kernels()
    monkeypatch.setattr(post_mortem, "pid_namespace", lambda: 0)  # the kernel does not show it
    assert not pids_are_the_kernels()
