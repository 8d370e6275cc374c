"""What facts about one node mean for a job: a table for each rule."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_agent.health.checks.finding import NEEDS, Finding, NodeNeeds, Outcome
from elastic_agent.health.checks.gpus import (
    GPU_CHECKS,
    GpuFacts,
    NvmlFacts,
    Xid,
    XidFacts,
    judge_nvml,
    judge_xids,
    xids_of,
)
from elastic_agent.health.checks.machine import (
    DirectoryFacts,
    LimitFacts,
    SharedMemoryFacts,
    judge_directory,
    judge_limits,
    judge_shared_memory,
)
from elastic_agent.health.checks.network import (
    InterfaceFacts,
    NameFacts,
    PortFacts,
    judge_interface,
    judge_names,
    judge_ports,
)
from elastic_agent.health.checks.runner import CheckAnswer, findings_of
from elastic_agent.health.checks.table import BY_NAME, NODE_CHECKS, checks_for

MIB, GIB = 2**20, 2**30
OK, WARN, FAIL, UNKNOWN = Outcome.OK, Outcome.WARN, Outcome.FAIL, Outcome.UNKNOWN


def _expect(finding: Finding, outcome: Outcome, *said: str) -> None:
    assert finding.outcome is outcome, finding
    for words in said:
        assert words in f"{finding.summary} -> {finding.advice}"
    assert bool(finding.advice) or outcome in (OK, UNKNOWN), "what is not ok needs advice"


@pytest.mark.parametrize(
    ("facts", "outcome", "said"),
    [
        ({}, OK, "/c (ext4): 100 GiB free, fsync in 3 ms"),
        ({"exists": False, "tried": "/"}, OK, "/c, which can be made in / (ext4)"),
        ({"problem": "Permission denied"}, FAIL, "/c: Permission denied -> let this user write there"),
        ({"problem": "Read-only", "exists": False, "tried": "/"}, FAIL, "/c cannot be made in /: Read-only"),
        ({"free_inodes": 0}, FAIL, "all inodes are taken"),
        ({"free_bytes": 5 * MIB}, FAIL, "5 MiB free -> make room"),
        ({"fsync_s": 0.4}, WARN, "fsync takes 400 ms -> each save waits"),
        ({"free_bytes": 500 * MIB}, WARN, "500 MiB free"),
        ({"free_inodes": 12}, WARN, "12 more files fit"),
        ({"free_inodes": None, "fsync_s": None}, OK, "100 GiB free"),
    ],
)
def test_a_directory(facts: dict[str, Any], outcome: Outcome, said: str) -> None:
    well = {"tried": "/c", "exists": True, "file_system": "ext4", "free_bytes": 100 * GIB}
    well |= {"free_inodes": 10**6, "fsync_s": 0.003}
    found = judge_directory("checkpoint-directory", "/c", "--dir", DirectoryFacts(**{**well, **facts}))
    _expect(found, outcome, said)


@pytest.mark.parametrize(
    ("facts", "copies", "outcome", "said"),
    [
        ({}, 4 * GIB, OK, "/dev/shm: 7 GiB free of 8 GiB"),
        ({"problem": "No such file or directory"}, 0, FAIL, "No such file or directory -> mount a tmpfs"),
        ({"file_system": "overlay"}, 0, FAIL, "of type overlay, and not memory"),
        ({"free_bytes": 2 * MIB}, 0, FAIL, "only 2 MiB free of 8 GiB"),
        ({"file_system": "devtmpfs"}, 0, OK, "7 GiB free"),
        (
            {"file_system": "ramfs", "total_bytes": 0, "free_bytes": 0},
            4 * GIB,
            OK,
            "/dev/shm: ramfs without a limit",
        ),
        ({"total_bytes": 64 * MIB, "free_bytes": 64 * MIB}, 0, WARN, "Bus error"),
        ({"free_bytes": GIB}, 4 * GIB, WARN, "copies of the state may take 4 GiB"),
    ],
)
def test_shared_memory(facts: dict[str, Any], copies: int, outcome: Outcome, said: str) -> None:
    well = {"file_system": "tmpfs", "total_bytes": 8 * GIB, "free_bytes": 7 * GIB}
    _expect(
        judge_shared_memory(SharedMemoryFacts(**{**well, **facts}), NodeNeeds(copies_bytes=copies)),
        outcome,
        said,
    )


@pytest.mark.parametrize(
    ("facts", "needs", "check", "outcome", "said"),
    [
        ({}, {}, "open-files", OK, "1024 descriptors"),
        ({"open_files": (None, None)}, {"ranks": 10**6}, "open-files", OK, "no limit"),
        (
            {"open_files": (1024, 4096)},
            {"ranks": 2048},
            "open-files",
            FAIL,
            "ulimit -n 2176 before the agent",
        ),
        ({"open_files": (1024, 1024)}, {"ranks": 2048}, "open-files", FAIL, "LimitNOFILE=2176"),
        ({}, {}, "locked-memory", OK, "not needed without RDMA"),
        ({}, {"rdma": True}, "locked-memory", FAIL, "8 MiB of locked memory"),
        ({"locked_bytes": (None, None)}, {"rdma": True}, "locked-memory", OK, "no limit"),
        ({"locks_freely": True}, {"rdma": True}, "locked-memory", OK, "8 MiB of locked memory"),
        ({}, {}, "connection-queue", OK, "4096"),
        ({"somaxconn": 128}, {"ranks": 256}, "connection-queue", WARN, "sysctl -w net.core.somaxconn=4096"),
        ({"somaxconn": None}, {}, "connection-queue", UNKNOWN, "cannot be read"),
    ],
)
def test_limits(
    facts: dict[str, Any], needs: dict[str, Any], check: str, outcome: Outcome, said: str
) -> None:
    well = {"open_files": (1024, 4096), "locked_bytes": (8 * MIB, 8 * MIB), "somaxconn": 4096}
    found = {
        finding.check: finding
        for finding in judge_limits(LimitFacts(**{**well, **facts}), NodeNeeds(**needs))
    }
    _expect(found[check], outcome, said)


@pytest.mark.parametrize(
    ("facts", "outcome", "said"),
    [
        ({}, OK, "n1 is 10.0.0.1; 10.0.0.1 is n1.lan"),
        ({"back": ""}, OK, "10.0.0.1 has no name"),
        ({"own": ()}, WARN, "n1 is 10.0.0.1, which is no address of this machine"),
        (
            {"addresses": (), "own": (), "problem": "Name not known"},
            WARN,
            "does not resolve (Name not known)",
        ),
        ({"forward_s": 5.0}, WARN, "looking up n1 took 5.0 s"),
        ({"back_s": 10.0}, WARN, "looking up 10.0.0.1 took 10.0 s"),
    ],
)
def test_names(facts: dict[str, Any], outcome: Outcome, said: str) -> None:
    well = {"host": "n1", "addresses": ("10.0.0.1",), "own": ("10.0.0.1",), "back": "n1.lan"}
    _expect(judge_names(NameFacts(**{**well, **facts}), NodeNeeds(address="10.0.0.1")), outcome, said)


@pytest.mark.parametrize(
    ("facts", "outcome", "said"),
    [
        ({}, OK, "eth0 is up, 10000 Mbit/s"),
        ({"state": "unknown", "speed_mbps": None}, OK, "eth0 is there, speed unknown"),
        ({"exists": False}, FAIL, "there is no interface eth0"),
        ({"state": "lowerlayerdown"}, FAIL, "eth0 is lowerlayerdown"),
        ({"speed_mbps": 100}, WARN, "100 Mbit/s -> the slowest link sets the pace"),
    ],
)
def test_the_interface(facts: dict[str, Any], outcome: Outcome, said: str) -> None:
    well = {"exists": True, "state": "up", "speed_mbps": 10000, "mtu": 1500}
    _expect(judge_interface(InterfaceFacts(**{**well, **facts}), NodeNeeds(interface="eth0")), outcome, said)


@pytest.mark.parametrize(
    ("free", "refused", "outcome", "said"),
    [
        (100, "", OK, "100 of 101 ports of 29500-29600 at 10.0.0.1 are free"),
        (3, "", WARN, "stop what holds the others (ss -ltnp), or widen --port-range"),
        (0, "", FAIL, "0 of 101 ports"),
        (0, "Permission denied", FAIL, "Permission denied"),
    ],
)
def test_ports(free: int, refused: str, outcome: Outcome, said: str) -> None:
    needs = NodeNeeds(address="10.0.0.1", ports=(29500, 29600))
    _expect(judge_ports(PortFacts(free=free, tried=101, refused=refused), needs), outcome, said)


# --- GPUs

GPUS = ("0000:3b:00.0", "0000:5e:00.0")
WELL = {
    "uncorrected": 0,
    "remapped": 0,
    "remap_pending": False,
    "remap_failed": False,
    "throttled": 1,
    "persistent": True,
}


@pytest.mark.parametrize(
    ("second", "check", "outcome", "said"),
    [
        *(({}, check, OK, "") for check in GPU_CHECKS),
        ({"problem": "GPU is lost"}, "gpu-visible", FAIL, "1 of 2 GPUs answer: 0000:5e:00.0: GPU is lost"),
        ({"uncorrected": 3}, "gpu-ecc", FAIL, "uncorrected memory errors: 0000:5e:00.0: 3"),
        ({"remap_pending": True}, "gpu-remapped-rows", WARN, "waits for a reset on 0000:5e:00.0"),
        ({"remap_failed": True}, "gpu-remapped-rows", FAIL, "remapping failed on 0000:5e:00.0"),
        ({"throttled": 0x40 | 0x01}, "gpu-throttling", WARN, "0000:5e:00.0: hardware thermal slowdown"),
        (
            {"throttled": 0x80 | 0x08},
            "gpu-throttling",
            WARN,
            "hardware slowdown (heat or power), external power brake",
        ),
        ({"throttled": 0x01 | 0x02 | 0x04}, "gpu-throttling", OK, ""),
        ({"persistent": False}, "gpu-persistence", WARN, "persistence mode is off: 0000:5e:00.0"),
    ],
)
def test_gpus(second: dict[str, Any], check: str, outcome: Outcome, said: str) -> None:
    gpus = (GpuFacts(name=GPUS[0], **WELL), GpuFacts(name=GPUS[1], **{**WELL, **second}))
    found = judge_nvml(NvmlFacts(driver="580.1", gpus=gpus), NodeNeeds(gpus=GPUS))
    assert [finding.check for finding in found] == list(GPU_CHECKS)
    _expect({finding.check: finding for finding in found}[check], outcome, said)


def test_what_a_gpu_does_not_say_is_unknown() -> None:
    found = judge_nvml(NvmlFacts(gpus=(GpuFacts(name=GPUS[0]),)), NodeNeeds(gpus=GPUS[:1]))
    assert [finding.outcome for finding in found] == [OK, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]


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


XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."


def test_xids_are_read_from_the_kernels_messages() -> None:
    messages = [(10.0, "usb 1-1: new device"), (20.0, XID_79), (30.0, "NVRM: Xid (0000:5e:00): 31, pid=1")]
    assert xids_of(messages, up_s=100.0) == [
        Xid(gpu="0000:3b:00", number=79, age_s=80.0),
        Xid(gpu="0000:5e:00", number=31, age_s=70.0),
    ]


@pytest.mark.parametrize(
    ("facts", "outcome", "said"),
    [
        (XidFacts(readable=False), UNKNOWN, "may not read the kernel's log -> run as root"),
        (XidFacts(readable=True), OK, ""),
        (XidFacts(readable=True, xids=(Xid(gpu="3b", number=31, age_s=5.0),)), OK, ""),
        (XidFacts(readable=True, xids=(Xid(gpu="3b", number=79, age_s=90000.0),)), OK, ""),
        (
            XidFacts(readable=True, xids=(Xid(gpu="3b", number=79, age_s=600.0),)),
            WARN,
            "Xid 79 of 3b, 10 min ago",
        ),
    ],
)
def test_xids(facts: XidFacts, outcome: Outcome, said: str) -> None:
    _expect(judge_xids(facts, NodeNeeds(gpus=GPUS)), outcome, said)


# --- The table


def test_a_job_without_gpus_directories_and_ports_has_fewer_checks() -> None:
    assert [check.name for check in checks_for(NodeNeeds(), at_join=False)] == [
        "shared-memory",
        "open-files",
        "name-resolution",
    ]


def test_an_agent_does_not_try_its_own_ports_before_a_join() -> None:
    everything = NodeNeeds(
        checkpoint_directory="/c", log_directory="/l", interface="eth0", ports=(1, 2), gpus=("0",)
    )
    assert checks_for(everything, at_join=False) == NODE_CHECKS
    assert set(NODE_CHECKS) - set(checks_for(everything, at_join=True)) == {BY_NAME["port-range"]}


def test_no_two_checks_have_findings_of_one_name() -> None:
    names = [name for check in NODE_CHECKS for name in check.names]
    assert len(names) == len(set(names))


def test_a_probe_that_does_not_answer_is_a_finding_with_its_subject() -> None:
    problem = "has not answered within 5 s (state D, waits in nfs_wait)"
    silent = CheckAnswer("checkpoint-directory", 5.0, problem=problem)
    assert findings_of(BY_NAME[silent.check], NodeNeeds(checkpoint_directory="/nfs/c"), silent) == (
        Finding(
            "checkpoint-directory",
            FAIL,
            "/nfs/c: the probe has not answered within 5 s (state D, waits in nfs_wait)",
            "its disk or file server does not answer: look at dmesg, unmount it, or name another one with"
            " --check-directory",
            {},
            5.0,
        ),
    )


def test_needs_travel() -> None:
    needs = NodeNeeds(workers=8, ranks=64, interface="eth0", ports=(1, 2), gpus=("0", "1"), rdma=True)
    assert NEEDS.decode(NEEDS.encode(needs)) == needs
