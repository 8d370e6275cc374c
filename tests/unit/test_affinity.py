"""Who runs on which CPUs: tables over fake sysfs trees of the machines that training runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import pytest

from elastic_agent.agent.common.variables import compose
from elastic_agent.agent.configuration.parse import Affinity
from elastic_agent.agent.machine.devices import CpuLayout, Device, cpu_list, probe_cpus, share

GPUS = {"0000:1b:00.0": 0, "0000:3b:00.0": 0, "0000:c1:00.0": 1, "0000:d1:00.0": 1}
FOUR = tuple(Device(str(index), address) for index, address in enumerate(GPUS))
ALL = range(16)


def machine(
    root: Path,
    *,
    sockets: int = 2,
    cores: int = 4,
    threads: int = 2,
    offline: Sequence[int] = (),
    gpus: Mapping[str, int] = GPUS,
) -> Path:
    """A sysfs tree. As Linux numbers them: first one thread of every core, by socket, then the second of each.

    With the defaults socket 0 has the CPUs 0-3 and their siblings 8-11, socket 1 has 4-7 and 12-15. `gpus` has the
    NUMA node of each, which is its socket, or -1 for a firmware that does not say.
    """
    physical = sockets * cores
    online = [cpu for cpu in range(physical * threads) if cpu not in offline]
    for cpu in online:
        siblings = [other for other in online if other % physical == cpu % physical]
        write(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", cpu_list(siblings))
    of_socket = {
        socket: cpu_list([cpu for cpu in online if cpu % physical // cores == socket])
        for socket in range(sockets)
    }
    for socket, cpus in of_socket.items():
        write(root / f"devices/system/node/node{socket}/cpulist", cpus)
    for address, socket in gpus.items():
        write(root / f"bus/pci/devices/{address}/numa_node", str(socket))
        write(root / f"bus/pci/devices/{address}/local_cpulist", of_socket.get(socket, cpu_list(online)))
    return root


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def layout(root: Path, allowed: Sequence[int] = ALL) -> CpuLayout:
    return probe_cpus(list(GPUS), sys=root, allowed=allowed)


def placed(affinity: Affinity, devices: Sequence[Device | None], found: CpuLayout) -> list[tuple[str, str]]:
    """Each worker's CPUs and number of threads."""
    return [
        (cpu_list(each.cpus), compose({}, each.variables)["OMP_NUM_THREADS"])
        for each in share(affinity, devices, found)
    ]


CPU_ONLY = (None,)


@pytest.mark.parametrize(
    ("affinity", "devices", "expected"),
    [
        ("numa", FOUR, [("0-3,8-11", "2"), ("0-3,8-11", "2"), ("4-7,12-15", "2"), ("4-7,12-15", "2")]),
        ("cores", FOUR, [("0-1,8-9", "2"), ("2-3,10-11", "2"), ("4-5,12-13", "2"), ("6-7,14-15", "2")]),
        # Three workers, two of them on socket 0.
        ("cores", FOUR[:3], [("0-1,8-9", "2"), ("2-3,10-11", "2"), ("4-7,12-15", "4")]),
        # By device, not by rank.
        ("numa", FOUR[::-2], [("4-7,12-15", "4"), ("0-3,8-11", "4")]),
        ("numa", CPU_ONLY * 1, [("0-15", "8")]),
        ("numa", CPU_ONLY * 2, [("0-3,8-11", "4"), ("4-7,12-15", "4")]),
        ("numa", CPU_ONLY * 3, [("0-3,8-11", "2"), ("0-3,8-11", "2"), ("4-7,12-15", "4")]),
        ("cores", CPU_ONLY * 1, [("0-15", "8")]),
        ("cores", CPU_ONLY * 4, [("0-1,8-9", "2"), ("2-3,10-11", "2"), ("4-5,12-13", "2"), ("6-7,14-15", "2")]),
        ("cores", CPU_ONLY * 3, [("0-1,8-9", "2"), ("2-4,10-12", "3"), ("5-7,13-15", "3")]),
        # More workers than cores: two neighbours share each.
        ("cores", CPU_ONLY * 16, [(f"{core},{core + 8}", "1") for core in range(8) for _ in "ab"]),
    ],
)  # fmt: skip
def test_two_sockets(
    tmp_path: Path, affinity: Affinity, devices: Sequence[Device | None], expected: list[tuple[str, str]]
) -> None:
    assert placed(affinity, devices, layout(machine(tmp_path))) == expected


@pytest.mark.parametrize("workers", range(1, 9))
def test_parts_are_disjoint_whole_cores_and_nothing_is_left_over(tmp_path: Path, workers: int) -> None:
    shares = share("cores", CPU_ONLY * workers, layout(machine(tmp_path)))
    assert all(not set(one.cpus) & set(other.cpus) for one, other in combinations(shares, 2))
    assert sorted(cpu for each in shares for cpu in each.cpus) == list(ALL)
    assert all((cpu + 8) % 16 in each.cpus for each in shares for cpu in each.cpus), "siblings stay together"
    sizes = [len(each.cpus) for each in shares]
    assert max(sizes) - min(sizes) <= 2, "at most by one core of two threads"


def test_only_cpus_that_the_agent_may_use(tmp_path: Path) -> None:
    """As under taskset, a cpuset or a pod's CPU manager: here core 1, one thread of core 2, and cores 5 to 7."""
    found = layout(machine(tmp_path), allowed=[1, 9, 2, 5, 6, 7, 13, 14, 15])
    assert placed("numa", FOUR[::2], found) == [("1-2,9", "2"), ("5-7,13-15", "3")]
    assert placed("cores", FOUR, found) == [("1,9", "1"), ("2", "1"), ("5,13", "1"), ("6-7,14-15", "2")]


def test_offline_cpus_are_not_shared_out(tmp_path: Path) -> None:
    """Core 3 is off, and core 0 has lost a thread: the kernel leaves what is offline out of our mask."""
    found = layout(
        machine(tmp_path, offline=[3, 11, 8]), allowed=[cpu for cpu in ALL if cpu not in (3, 11, 8)]
    )
    assert placed("cores", FOUR[:2], found) == [("0", "1"), ("1-2,9-10", "2")]


@pytest.mark.parametrize("affinity", ["numa", "cores"])
def test_a_firmware_that_does_not_say_leaves_all_cpus(tmp_path: Path, affinity: Affinity) -> None:
    found = layout(machine(tmp_path, gpus=dict.fromkeys(GPUS, -1)))
    shares = share(affinity, FOUR[:2], found)
    assert [cpu_list(each.cpus) for each in shares] == {
        "numa": ["0-15", "0-15"],
        "cores": ["0-3,8-11", "4-7,12-15"],
    }[affinity]


def test_sets_that_overlap_in_part_are_thrown_together(tmp_path: Path) -> None:
    """The second device's neighbours are not known, so that its share could be any worker's."""
    found = layout(machine(tmp_path, gpus={**GPUS, "0000:3b:00.0": -1}))
    assert placed("cores", FOUR[:2], found) == [("0-3,8-11", "4"), ("4-7,12-15", "4")]
    assert placed("numa", FOUR[:2], found) == [("0-3,8-11", "4"), ("0-15", "8")]


def test_a_device_whose_cpus_are_all_anothers_is_like_one_whose_cpus_are_unknown(tmp_path: Path) -> None:
    found = layout(machine(tmp_path), allowed=[4, 5, 12, 13])
    (only,) = share("numa", FOUR[:1], found)
    assert only.cpus == (4, 5, 12, 13)


@pytest.mark.parametrize("affinity", ["numa", "cores"])
def test_a_container_with_one_core_and_without_sysfs(tmp_path: Path, affinity: Affinity) -> None:
    found = layout(tmp_path / "nothing", allowed=[5])
    assert placed(affinity, CPU_ONLY * 3, found) == [("5", "1")] * 3
    assert "shared by 3 workers" in share(affinity, CPU_ONLY * 3, found)[0].reason


def test_without_affinity_nothing_is_set(tmp_path: Path) -> None:
    for each in share("none", FOUR, layout(machine(tmp_path))):
        assert (each.cpus, each.variables) == ((), ())


def test_the_users_number_of_threads_is_kept(tmp_path: Path) -> None:
    affinities: tuple[Affinity, ...] = ("numa", "cores")
    for affinity in affinities:
        shares = share(affinity, FOUR, layout(machine(tmp_path / affinity)))
        assert compose({"OMP_NUM_THREADS": "7"}, shares[0].variables) == {"OMP_NUM_THREADS": "7"}
