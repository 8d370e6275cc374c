"""What a node's devices are, and who gets which: tables over fake /proc and /dev trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.config import ConfigError, DevicePinning, WorkerCount
from elastic_agent.agent.devices import Inventory, pin, probe, resolve_workers
from elastic_agent.agent.variables import compose

CPU_ONLY = Inventory(cuda=(), cpus=6)
FOUR_GPUS = Inventory(cuda=("0", "1", "2", "3"), cpus=64)
UUIDS = Inventory(cuda=("GPU-aa", "GPU-bb"), cpus=64)
MIGS = Inventory(cuda=("MIG-aa", "MIG-bb"), cpus=64)
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def node(root: Path, *, nodes: tuple[str, ...] = (), driver: int = 0) -> dict[str, Path]:
    """A node with these entries in /dev, and so many GPUs in the driver's /proc tree."""
    (root / "dev").mkdir()
    for name in nodes:
        (root / "dev" / name).touch()
    for bus in range(driver):
        (root / f"proc/driver/nvidia/gpus/0000:{bus:02x}:00.0").mkdir(parents=True)
    return {"proc": root / "proc", "dev": root / "dev"}


@pytest.mark.parametrize(
    ("nodes", "driver", "cuda"),
    [
        ((), 0, ()),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"), 2, ("0", "1")),
        (("nvidiactl", "nvidia-uvm"), 0, ()),  # the driver's control nodes are not devices
        (("nvidia3",), 8, ("0",)),  # a container: one of the host's eight, and CUDA counts from 0
        ((), 2, ("0", "1")),  # a host before the first use of its devices
        (("nvidia0",), 0, ("0",)),
    ],
)
def test_devices_are_counted_without_the_driver(
    tmp_path: Path, nodes: tuple[str, ...], driver: int, cuda: tuple[str, ...]
) -> None:
    assert probe({}, **node(tmp_path, nodes=nodes, driver=driver)).cuda == cuda


@pytest.mark.parametrize(
    ("listed", "cuda"),
    [
        ("0,1,2,3", ("0", "1", "2", "3")),
        ("3,1", ("3", "1")),
        (" 2 , 0", ("2", "0")),
        ("1x", ("1",)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,-1,2", ("0",)),
        ("0,,2", ("0",)),
        ("0,9,1", ("0",)),  # only 4 are installed
        ("4", ()),
        ("1,1", ()),
        ("1,01", ()),
        ("0,-1,0", ("0",)),  # what stands behind the cut is not read
        ("GPU-aa,GPU-bb", ("GPU-aa", "GPU-bb")),
        ("GPU-aa,GPU-aa", ()),
        ("GPU-aa,1", ("GPU-aa",)),
        ("0,GPU-aa", ("0",)),
        ("MIG-aa,MIG-bb,GPU-aa", ("MIG-aa", "MIG-bb")),
        ("MIG-GPU-aa/1/0", ("MIG-GPU-aa/1/0",)),
    ],
)
def test_an_outer_list_is_read_as_cuda_reads_it(tmp_path: Path, listed: str, cuda: tuple[str, ...]) -> None:
    nodes = ("nvidia0", "nvidia1", "nvidia2", "nvidia3")
    assert probe({"CUDA_VISIBLE_DEVICES": listed}, **node(tmp_path, nodes=nodes)).cuda == cuda


@pytest.mark.parametrize("listed", ["0", "GPU-aa", "MIG-aa"])
def test_a_list_makes_no_device_where_there_is_none(tmp_path: Path, listed: str) -> None:
    assert probe({"CUDA_VISIBLE_DEVICES": listed}, **node(tmp_path)).cuda == ()


def test_only_the_cpus_of_our_affinity_count() -> None:
    one = min(os.sched_getaffinity(0))
    code = "from elastic_agent.agent.devices import probe; print(probe({}).cpus)"
    pinned = f"import os; os.sched_setaffinity(0, {{{one}}}); {code}"
    answers = [subprocess.check_output([sys.executable, "-c", text], text=True) for text in (code, pinned)]
    assert answers == [f"{len(os.sched_getaffinity(0))}\n", "1\n"]


@pytest.mark.parametrize(
    ("nproc", "inventory", "workers"),
    [
        ("auto", FOUR_GPUS, 4),
        ("auto", CPU_ONLY, 6),
        ("gpu", FOUR_GPUS, 4),
        ("cpu", FOUR_GPUS, 64),
        ("cpu", CPU_ONLY, 6),
        (3, FOUR_GPUS, 3),
        (9, CPU_ONLY, 9),
    ],
)
def test_number_of_workers(nproc: WorkerCount, inventory: Inventory, workers: int) -> None:
    assert resolve_workers(nproc, inventory) == workers


def test_one_worker_per_gpu_without_any_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_workers("gpu", CPU_ONLY)
    told = ["--nproc-per-node 'gpu'", "no CUDA device", "--nproc-per-node auto"]
    assert all(text in str(caught.value) for text in told)


def masked(entry: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": entry, "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("pinning", "local_rank", "workers", "inventory", "overrides", "defaults", "reason"),
    [
        ("index", 2, 4, FOUR_GPUS, {}, DEVICE_ORDER, "selects cuda:2"),
        ("index", 0, 1, FOUR_GPUS, {}, DEVICE_ORDER, "sees 4 CUDA devices"),
        ("index", 0, 1, MIGS, {}, DEVICE_ORDER, "selects cuda:0"),
        ("index", 7, 8, CPU_ONLY, {}, {}, "worker 7 runs on the CPU"),
        ("mask", 2, 4, FOUR_GPUS, masked("2"), DEVICE_ORDER, "sees only CUDA device 2"),
        ("mask", 1, 2, UUIDS, masked("GPU-bb"), DEVICE_ORDER, "sees only CUDA device GPU-bb"),
        ("mask", 1, 2, MIGS, masked("MIG-bb"), DEVICE_ORDER, "as cuda:0 with LOCAL_RANK 0"),
        ("mask", 7, 8, CPU_ONLY, {}, {}, "the same as index"),
        ("none", 8, 9, FOUR_GPUS, {}, {}, "left to the script"),
        ("none", 8, 9, CPU_ONLY, {}, {}, "left to the script"),
    ],
)
def test_pinning(
    pinning: DevicePinning,
    local_rank: int,
    workers: int,
    inventory: Inventory,
    overrides: dict[str, str],
    defaults: dict[str, str],
    reason: str,
) -> None:
    pinned = pin(pinning, local_rank, workers, inventory)
    assert compose({}, pinned.variables) == {**overrides, **defaults}
    assert {each.name for each in pinned.variables if each.yielding} == defaults.keys()
    assert reason in pinned.reason


@pytest.mark.parametrize(
    ("pinning", "workers", "inventory", "told"),
    [
        ("index", 5, FOUR_GPUS, ["'5'", "CUDA devices: 4", "0,1,2,3", "pinning none", "per-node to 4"]),
        ("mask", 3, UUIDS, ["'3'", "CUDA devices: 2", "GPU-aa,GPU-bb", "pinning none"]),
        ("index", 2, MIGS, ["2 workers", "only the first MIG", "--device-pinning mask"]),
    ],
)
def test_more_workers_than_devices_is_refused_for_every_worker(
    pinning: DevicePinning, workers: int, inventory: Inventory, told: list[str]
) -> None:
    for local_rank in range(workers):
        with pytest.raises(ConfigError) as caught:
            pin(pinning, local_rank, workers, inventory)
        assert all(text in str(caught.value) for text in told)


def test_what_the_user_set_beats_the_defaults_but_not_the_mask() -> None:
    users = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "LOCAL_RANK": "3"}
    assert compose(users, pin("mask", 3, 4, FOUR_GPUS).variables) == {
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "CUDA_VISIBLE_DEVICES": "3",
        "LOCAL_RANK": "0",
    }
    own = {"LOCAL_RANK": "3"}
    assert compose(own, pin("index", 3, 4, FOUR_GPUS).variables) == {**own, **DEVICE_ORDER}


def test_no_two_masked_workers_share_a_device() -> None:
    seen = [
        compose({}, pin("mask", rank, 4, FOUR_GPUS).variables)["CUDA_VISIBLE_DEVICES"] for rank in range(4)
    ]
    assert sorted(seen) == ["0", "1", "2", "3"]
