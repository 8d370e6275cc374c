"""The kernel's log, in the form in which it writes of GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_agent.agent.workers.failures import post_mortem
from elastic_agent.agent.workers.failures.post_mortem import (
    KMSG,
    KernelLog,
    address,
    parse,
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off.", "0000:3b:00"),
        ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.", "0000:44:00"),
        ("NVRM: Xid (PCI:0000:3B:00): 74, pid='<unknown>', name=<unknown>, NVLink", "0000:3b:00"),
        ("NVRM: Xid (PCI:0001:3b:00): 119, pid=77, name=python3, Timeout waiting for RPC", "0001:3b:00"),
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid=1, An uncorrectable double bit error (DBE)", "0000:3b:00"),
        ("NVRM: Xid (PCI:0000:3b:00): 94, pid=7, name=python, Contained: SM (0x1).", "0000:3b:00"),
        ("NVRM: Xid (PCI:0000:3b:00): 95, pid=7, Uncontained: LTC TAG", "0000:3b:00"),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault", None),
        ("NVRM: Xid (PCI:0000:3b:00): 13, pid=7, Graphics Exception", None),
        ("NVRM: Xid (PCI:0000:3b:00): 43, pid=7, Ch 00000010", None),
        ("NVRM: Xid (PCI:0000:3b:00): 63, Row Remapper: New row marked for remapping", None),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", None),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module", None),
        ("Memory cgroup out of memory: Killed process 12 (pt_main_thread) total-vm:1kB", None),
        ("eth0: link up", None),
    ],
)  # fmt: skip
def test_a_message_that_tells_of_trouble(message: str, expected: str | None) -> None:
    found = list(parse([message]))
    assert found == ([(expected, f"the kernel: {message}")] if expected else [])


def test_what_a_message_holds_is_cleaned_and_cut() -> None:
    [(_, text)] = parse(["NVRM: Xid (PCI:0000:3b:00): 79, \x1b[31m" + "x" * 5000])
    assert len(text) == len("the kernel: ") + 160
    assert text.isprintable()


def test_only_what_concerns_a_workers_gpus_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ("NVRM: Xid (PCI:0000:3b:00): 79, mine", "NVRM: Xid (PCI:0000:44:00): 79, another's")
    log = KernelLog(Path("/dev/null"))
    monkeypatch.setattr(log, "_fd", 0)
    monkeypatch.setattr(post_mortem, "_messages", lambda fd: said)
    assert log.events({"0000:3b:00"}) == (f"the kernel: {said[0]}",)


def test_an_address_has_one_form() -> None:
    assert address("00000000:3B:00.0") == address("0000:3b:00") == "0000:3b:00"


@pytest.mark.parametrize("kind", ["missing", "file", "console"])
def test_without_a_log_nothing_is_known(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kmsg"
    if kind == "file":
        path.write_text("6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, x\n")
    elif kind == "console":
        path.symlink_to("/dev/null")  # as some containers have it
    log = KernelLog(path)
    log.forget()
    assert log.events({"0000:3b:00"}) == ()


def test_only_the_kernels_own_records_count_and_those_that_are_lost_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [
        b"6,1,9,-;NVRM: Xid (PCI:0000:01:00): 79, x\n SUBSYSTEM=x\n",
        b"12,2,9,-;NVRM: Xid (PCI:0000:02:00): 79, a user wrote this\n",
        BrokenPipeError(),
        b"\xff\n",
        b"4,5,9,c;NVRM: Xid (PCI:0000:03:00): 79, x\n",
        BlockingIOError(),
    ]

    def read(fd: int, size: int) -> bytes:
        record = records.pop(0)
        if isinstance(record, OSError):
            raise record
        return record

    monkeypatch.setattr(post_mortem.os, "read", read)
    assert [device for device, _ in parse(post_mortem._messages(0))] == ["0000:01:00", "0000:03:00"]
    assert not records


def readable() -> bool:
    try:
        os.close(os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.mark.skipif(
    not readable() or os.geteuid() != 0, reason="needs a kernel's log that may be read and written"
)
def test_the_real_log_gives_nothing_of_before_and_nothing_that_a_user_wrote() -> None:
    log = KernelLog()
    KMSG.write_text("NVRM: Xid (PCI:0000:3b:00): 79, from a test")
    log.forget()
    KMSG.write_text("NVRM: Xid (PCI:0000:3b:00): 79, from a test")
    assert log.events({"0000:3b:00"}) == ()
