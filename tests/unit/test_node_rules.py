"""What facts about one node mean for a job: a table for each rule."""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.health.checks import machine
from elastic_agent.health.checks.finding import Finding, NodeNeeds, Outcome
from elastic_agent.health.checks.gpus import GPU_CHECKS, GpuFacts, NvmlFacts, check_xids, judge_nvml
from elastic_agent.health.checks.machine import (
    check_locked_memory,
    check_log_directory,
    check_names,
    check_open_files,
    check_shared_memory,
)
from elastic_agent.health.checks.runner import BY_NAME, CheckAnswer, checks_for, findings_of

MIB, GIB = 2**20, 2**30
OK, WARN, FAIL, UNKNOWN = Outcome.OK, Outcome.WARN, Outcome.FAIL, Outcome.UNKNOWN


def _expect(finding: Finding, outcome: Outcome, *said: str) -> None:
    assert finding.outcome is outcome, finding
    for words in said:
        assert words in f"{finding.summary} -> {finding.advice}"
    assert bool(finding.advice) or outcome in (OK, UNKNOWN), "what is not ok needs advice"


def a_file_system(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    """What the kernel says of each one."""
    room = SimpleNamespace(f_frsize=1, f_blocks=total, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda path: room)


@pytest.mark.parametrize(
    ("total", "free", "outcome", "said"),
    [
        (1000 * GIB, 100 * GIB, OK, "/job: 100 GiB free"),
        (1000 * GIB, 5 * MIB, FAIL, "5 MiB free -> make room"),
        (1000 * GIB, 500 * MIB, WARN, "500 MiB free"),
        (0, 0, OK, "/job: "),
    ],
)
def test_a_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total: int, free: int, outcome: Outcome, said: str
) -> None:
    a_file_system(monkeypatch, total, free)
    _expect(check_log_directory(NodeNeeds(log_directory=f"{tmp_path}/job")), outcome, said)


@pytest.mark.parametrize(
    ("total", "free", "copies", "outcome", "said"),
    [
        (8 * GIB, 7 * GIB, 4 * GIB, OK, ": 7 GiB free of 8 GiB"),
        (8 * GIB, 2 * MIB, 0, FAIL, "only 2 MiB free of 8 GiB"),
        (0, 0, 4 * GIB, OK, ": without a limit"),
        (64 * MIB, 64 * MIB, 0, WARN, "Bus error"),
        (8 * GIB, GIB, 4 * GIB, WARN, "copies of the state may take 4 GiB"),
    ],
)
def test_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    total: int,
    free: int,
    copies: int,
    outcome: Outcome,
    said: str,
) -> None:
    a_file_system(monkeypatch, total, free)
    _expect(check_shared_memory(NodeNeeds(copies_bytes=copies), str(tmp_path)), outcome, said)


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    found = check_shared_memory(NodeNeeds(), f"{tmp_path}/none")
    _expect(found, FAIL, "No such file or directory -> mount a tmpfs")


NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "ranks", "outcome", "said"),
    [
        (1024, 8, OK, "1024 descriptors"),
        (NO_LIMIT, 10**6, OK, "descriptors"),
        (1024, 2048, FAIL, "ulimit -n 2176 before the agent"),
    ],
)
def test_open_files(
    monkeypatch: pytest.MonkeyPatch, soft: int, ranks: int, outcome: Outcome, said: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (soft, soft))
    _expect(check_open_files(NodeNeeds(ranks=ranks)), outcome, said)


@pytest.mark.parametrize(
    ("soft", "freely", "outcome", "said"),
    [
        (8 * MIB, False, FAIL, "8 MiB for each process"),
        (8 * MIB, True, OK, "may be locked"),
        (NO_LIMIT, False, OK, "may be locked"),
    ],
)
def test_locked_memory(
    monkeypatch: pytest.MonkeyPatch, soft: int, freely: bool, outcome: Outcome, said: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (soft, soft))
    monkeypatch.setattr(machine, "locks_freely", lambda: freely)
    _expect(check_locked_memory(NodeNeeds(rdma=True)), outcome, said)


@pytest.mark.parametrize(
    ("address", "name", "forward_s", "back_s", "outcome", "said"),
    [
        ("127.0.0.1", "n1.lan", 0.0, 0.0, OK, "n1 is 127.0.0.1"),
        ("127.0.0.1", "", 0.0, 0.0, OK, "n1 is 127.0.0.1"),
        ("", "n1.lan", 0.0, 0.0, WARN, "does not resolve (Name not known)"),
        ("127.0.0.1", "n1.lan", 5.0, 0.0, WARN, "looking up n1 and 127.0.0.1 took 5.0 s"),
        ("127.0.0.1", "n1.lan", 0.0, 10.0, WARN, "looking up n1 and 127.0.0.1 took 10.0 s"),
    ],
)
def test_names(
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    name: str,
    forward_s: float,
    back_s: float,
    outcome: Outcome,
    said: str,
) -> None:
    now, real = [0.0], socket.getaddrinfo

    def resolved(host: str, *rest: Any, **more: Any) -> Any:
        if host != "n1":
            return real(host, *rest, **more)
        now[0] += forward_s
        if not address:
            raise socket.gaierror(-2, "Name not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    def named(place: tuple[str, int], flags: int) -> tuple[str, str]:
        now[0] += back_s
        if not name:
            raise socket.gaierror(-2, "Name not known")
        return name, "0"

    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(socket, "getnameinfo", named)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    _expect(check_names(NodeNeeds(address="127.0.0.1")), outcome, said)


# --- GPUs

GPUS = ("0000:3b:00.0", "0000:5e:00.0")
WELL = {"uncorrected": 0, "remap_pending": False, "remap_failed": False, "throttled": 1}


@pytest.mark.parametrize(
    ("second", "check", "outcome", "said"),
    [
        *(({}, check, OK, "") for check in GPU_CHECKS),
        ({"problem": "GPU is lost"}, "gpu-visible", FAIL, "1 of 2 GPUs answer: 0000:5e:00.0: GPU is lost"),
        ({"uncorrected": 3}, "gpu-ecc", FAIL, "0000:5e:00.0: 3 uncorrected memory errors"),
        ({"remap_pending": True}, "gpu-remapped-rows", WARN, "0000:5e:00.0: a remapping waits for a reset"),
        ({"remap_failed": True}, "gpu-remapped-rows", FAIL, "0000:5e:00.0: a remapping has failed"),
        ({"throttled": 0x40 | 0x01}, "gpu-throttling", WARN, "0000:5e:00.0: hardware thermal slowdown"),
        (
            {"throttled": 0x80 | 0x08},
            "gpu-throttling",
            WARN,
            "hardware slowdown (heat or power), 0000:5e:00.0: external power brake",
        ),
        ({"throttled": 0x01 | 0x02 | 0x04}, "gpu-throttling", OK, ""),
    ],
)
def test_gpus(second: dict[str, Any], check: str, outcome: Outcome, said: str) -> None:
    gpus = (GpuFacts(name=GPUS[0], **WELL), GpuFacts(name=GPUS[1], **{**WELL, **second}))
    found = judge_nvml(NvmlFacts(driver="580.1", gpus=gpus), NodeNeeds(gpus=GPUS))
    assert [finding.check for finding in found] == list(GPU_CHECKS)
    _expect({finding.check: finding for finding in found}[check], outcome, said)


def test_what_a_gpu_does_not_say_is_unknown() -> None:
    found = judge_nvml(NvmlFacts(gpus=(GpuFacts(name=GPUS[0]),)), NodeNeeds(gpus=GPUS[:1]))
    assert [finding.outcome for finding in found] == [OK, UNKNOWN, UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("facts", "outcome", "said"),
    [
        (NvmlFacts(absent=True), UNKNOWN, "libnvidia-ml.so.1 is not here"),
        (
            NvmlFacts(problem="Driver/library version mismatch"),
            FAIL,
            "NVML does not start: Driver/library version",
        ),
        (NvmlFacts(gpus=(GpuFacts(name=GPUS[0], problem="Not Found"),)), FAIL, "0 of 1 GPUs answer"),
    ],
)
def test_without_nvml_there_is_one_finding(facts: NvmlFacts, outcome: Outcome, said: str) -> None:
    (found,) = judge_nvml(facts, NodeNeeds(gpus=GPUS[:1]))
    assert found.check == "gpu-visible"
    _expect(found, outcome, said)


@pytest.mark.parametrize(
    ("age_s", "message", "outcome", "said"),
    [
        (600.0, "usb 1-1: new device", OK, ""),
        (5.0, "NVRM: Xid (0000:5e:00): 31, pid=1", OK, ""),
        (90000.0, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", OK, ""),
        (
            600.0,
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
            WARN,
            "Xid 79 of 0000:3b:00, 10 min ago",
        ),
    ],
)
def test_xids(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, age_s: float, message: str, outcome: Outcome, said: str
) -> None:
    log, up_s = tmp_path / "kmsg", 1e6
    monkeypatch.setattr(time, "clock_gettime", lambda clock: up_s)
    log.write_text(f"4,1207,{int((up_s - age_s) * 1e6)},-;{message}\n")
    _expect(check_xids(NodeNeeds(gpus=GPUS), str(log)), outcome, said)


# --- The table


def test_a_job_without_gpus_and_directories_has_fewer_checks() -> None:
    assert [check.name for check in checks_for(NodeNeeds())] == [
        "shared-memory",
        "open-files",
        "name-resolution",
    ]


def test_a_probe_that_does_not_answer_is_a_finding() -> None:
    silent = CheckAnswer("log-directory", problem="has not answered within 5 s")
    (found,) = findings_of(BY_NAME[silent.check], silent)
    _expect(found, FAIL, "the probe has not answered within 5 s", "its disk or file server does not answer")
