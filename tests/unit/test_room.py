"""How much memory is left, by the files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.worker.room import Room, room

MIB = 2**20
MEMINFO = "MemTotal:       1024000 kB\nMemFree:  100 kB\nMemAvailable:    512000 kB\nHugePages_Total: 0\n"


def machine(folder: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(MEMINFO)
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "proc", folder / "cgroup"


def limit(folder: str, most: str, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{most}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 7\ninactive_file {inactive}\n",
    }


ALL = Room(512000 * 1024, 1024000 * 1024)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, ALL),
        ("0::/a/b\n", limit("a/b", "max", 5), ALL),
        ("0::/a/b\n", limit("a/b", str(100 * MIB), 60 * MIB, 10 * MIB), Room(50 * MIB, 100 * MIB)),
        ("0::/a/b\n", limit("a", str(100 * MIB), 60 * MIB), Room(40 * MIB, 100 * MIB)),
        ("0::/a\n", limit("a", str(10 * MIB), 60 * MIB), Room(0, 10 * MIB)),
        ("0::/\n", limit(".", str(100 * MIB), 60 * MIB), Room(40 * MIB, 100 * MIB)),
        (
            "4:cpu,memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{100 * MIB}",
                "memory/x/memory.usage_in_bytes": f"{90 * MIB}",
                "memory/x/memory.stat": f"total_inactive_file {MIB}",
            },
            Room(11 * MIB, 100 * MIB),
        ),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": f"{2**63 - 4096}"}, ALL),
    ],
    ids=["none", "no limit", "own", "parent", "over", "container", "version 1", "version 1 without"],
)
def test_the_narrowest_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: Room) -> None:
    assert room(*machine(tmp_path, cgroup, files)) == expected


def test_a_machine_that_does_not_tell_is_not_asked_again(tmp_path: Path) -> None:
    assert room(tmp_path, tmp_path) is None


def test_this_machine_tells() -> None:
    found = room()
    assert found is not None
    assert 0 < found.left <= found.total
