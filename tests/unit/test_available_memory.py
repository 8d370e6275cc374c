"""How much memory is left, by the files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.worker.storage.memory.available_memory import MIB, Memory, own_cgroup, read_memory

MEMINFO = "MemTotal:       1024000 kB\nMemFree:  100 kB\nMemAvailable:    512000 kB\nHugePages_Total: 0\n"
ALL = Memory(512000 * 1024, 1024000 * 1024)
MOST = 100 * MIB


def machine(folder: Path, listed: str, files: dict[str, str]) -> Path:
    """Its /proc: version 2 is mounted at .../cgroup, and the memory controller of version 1 below it."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(MEMINFO)
    (folder / "proc/self/cgroup").write_text(listed)
    (folder / "proc/self/mountinfo").write_text(
        f"34 25 0:29 / {folder}/cgroup rw - cgroup2 cgroup2 rw\n"
        f"35 25 0:30 / {folder}/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n"
    )
    for name, content in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "proc"


def limit(folder: str, most: object, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{most}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 7\ninactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("listed", "files", "expected"),
    [
        ("0::/\n", {}, []),
        ("0::/a/b\n", limit("a/b", "max", 5), []),
        ("0::/a/b\n", limit("a/b", MOST, 60 * MIB, 10 * MIB), [("a/b", 50 * MIB)]),
        ("0::/a/b\n", limit("a", MOST, 60 * MIB), [("a", 40 * MIB)]),
        ("0::/a/b\n", limit("a/b", MOST, MIB) | limit("a", MOST, MIB), [("a/b", 99 * MIB), ("a", 99 * MIB)]),
        ("0::/a\n", limit("a", MOST, 160 * MIB), [("a", 0)]),
        ("0::/\n", limit(".", MOST, 60 * MIB), [(".", 40 * MIB)]),
        ("0::/../other\n", limit(".", MOST, 60 * MIB), []),
        (
            "4:cpu,memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{MOST}",
                "memory/x/memory.usage_in_bytes": f"{90 * MIB}",
                "memory/x/memory.stat": f"total_inactive_file {MIB}",
            },
            [("memory/x", 11 * MIB)],
        ),
        (
            "4:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": f"{2**63 - 4096}",
                "memory/x/memory.usage_in_bytes": "7",
            },
            [],
        ),
    ],
    ids=[
        "none",
        "no limit",
        "own",
        "parent",
        "both",
        "over",
        "container",
        "out of sight",
        "version 1",
        "version 1 without",
    ],
)
def test_the_machine_and_each_limited_cgroup_are_read(
    tmp_path: Path, listed: str, files: dict[str, str], expected: list[tuple[str, int]]
) -> None:
    cgroups = [Memory(left, MOST, of=f"the cgroup {tmp_path / 'cgroup' / name}") for name, left in expected]
    assert read_memory(machine(tmp_path, listed, files)) == (ALL, *cgroups)


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == ()
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert read_memory(tmp_path) == (ALL,)


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
