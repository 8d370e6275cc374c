"""When is memory scarce: tables, and made-up files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.machine.scarce_memory import MIB, Memory, MemoryPolicy, pressure, read_memory

POLICY = MemoryPolicy(least_share=0.05, least_bytes=1024 * MIB, most_stalled=20.0, relief=1.5)
GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("memory", "before", "scarce"),
    [
        (Memory(600 * MIB, 10 * GIB), False, False),
        (Memory(500 * MIB, 10 * GIB), False, True),
        (Memory(600 * MIB, 10 * GIB), True, True),  # it is over with half as much more
        (Memory(800 * MIB, 10 * GIB), True, False),
        (Memory(1100 * MIB, 500 * GIB), False, False),  # a twentieth of a large machine is much
        (Memory(1000 * MIB, 500 * GIB), False, True),
        (Memory(9 * GIB, 10 * GIB, stalled=19.0), False, False),
        (Memory(9 * GIB, 10 * GIB, stalled=21.0), False, True),
        (Memory(9 * GIB, 10 * GIB, stalled=19.0), True, True),
        (Memory(9 * GIB, 10 * GIB, stalled=13.0), True, False),
    ],
)
def test_scarce_or_not(memory: Memory, before: bool, scarce: bool) -> None:
    assert bool(pressure(POLICY, memory, before=before)) == scarce


def test_the_reason_tells_what_was_seen() -> None:
    assert (
        pressure(POLICY, Memory(100 * MIB, 8 * GIB), before=False)
        == "this machine has 100 MiB left of 8192 MiB"
    )
    stalled = Memory(8 * GIB, 8 * GIB, 44.4, of="the cgroup /x")
    assert (
        pressure(POLICY, stalled, before=False) == "tasks of the cgroup /x wait for memory 44 % of the time"
    )


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 300 kB\nHugePages: 0\n"
    )
    (tmp_path / "pressure/memory").write_text(
        "some avg10=3.50 avg60=0.00 avg300=0.00 total=7\nfull avg10=9 x\n"
    )
    return tmp_path


def test_the_machine_and_each_limited_cgroup_above_are_read(proc: Path, tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "slice" / "pod"
    inner.mkdir(parents=True)
    for folder, limit in ((inner, "max"), (inner.parent, "5000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("4000\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 1500\n")
        (folder / "memory.pressure").write_text("some avg10=1.25 avg60=0.00 avg300=0.00 total=7\n")
    assert read_memory(inner, proc) == (
        Memory(300 * 1024, 1000 * 1024, 3.5),
        Memory(2500, 5000, 1.25, f"the cgroup {inner.parent}"),
    )


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read_memory(tmp_path / "cgroup", tmp_path) == ()
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 300 kB\n")
    assert read_memory(None, tmp_path) == (Memory(300 * 1024, 1000 * 1024, 0.0),)
