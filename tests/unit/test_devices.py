"""What a node's devices are, and who gets which: tables over fake /proc and /dev trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.common.variables import compose
from elastic_agent.agent.configuration.config import ConfigError, DevicePinning
from elastic_agent.agent.configuration.parse import WorkerCount
from elastic_agent.agent.machine.devices import Device, Inventory, pin, probe, resolve_workers

CPU_ONLY = Inventory(cuda=(), cpus=6)
FOUR_GPUS = Inventory(cuda=tuple(map(Device, "0123")), cpus=64)
UUIDS = Inventory(cuda=(Device("GPU-aa"), Device("GPU-bb")), cpus=64)
GPU_AND_MIG = Inventory(cuda=(Device("GPU-aa"), Device("MIG-bb")), cpus=64)
MIGS = Inventory(cuda=(Device("MIG-aa"), Device("MIG-bb")), cpus=64)
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def node(root: Path, *, nodes: tuple[str, ...] = (), driver: int = 0) -> dict[str, Path]:
    """A node with these entries in /dev, and so many GPUs in the driver's /proc tree."""
    (root / "dev").mkdir()
    for name in nodes:
        (root / "dev" / name).touch()
    for bus in range(driver):
        (root / f"proc/driver/nvidia/gpus/0000:{bus:02x}:00.0").mkdir(parents=True)
    return {"proc": root / "proc", "dev": root / "dev"}


def informed(root: Path, gpus: dict[str, tuple[int, str]], *, minors: tuple[int, ...]) -> dict[str, Path]:
    """A node whose driver tells of each GPU, by address, its minor number and uuid; /dev has these minors."""
    trees = node(root, nodes=tuple(f"nvidia{minor}" for minor in minors))
    for address, (minor, uuid) in gpus.items():
        folder = root / f"proc/driver/nvidia/gpus/{address}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        )
    return trees


THREE = {"0000:c1:00.0": (0, "GPU-ca11"), "0000:1b:00.0": (1, "GPU-1bff"), "0001:02:00.0": (2, "GPU-02ee")}
BY_ADDRESS = ("0000:1b:00.0", "0000:c1:00.0", "0001:02:00.0")


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
    assert entries(probe({}, **node(tmp_path, nodes=nodes, driver=driver))) == cuda


def entries(inventory: Inventory) -> tuple[str, ...]:
    return tuple(device.entry for device in inventory.cuda)


def addresses(inventory: Inventory) -> tuple[str | None, ...]:
    return tuple(device.address for device in inventory.cuda)


def test_devices_are_in_the_order_of_their_addresses(tmp_path: Path) -> None:
    inventory = probe({}, **informed(tmp_path, THREE, minors=(0, 1, 2)))
    assert (entries(inventory), addresses(inventory)) == (("0", "1", "2"), BY_ADDRESS)


def test_a_container_has_only_the_devices_of_its_nodes(tmp_path: Path) -> None:
    inventory = probe({}, **informed(tmp_path, THREE, minors=(2, 0)))
    assert (entries(inventory), addresses(inventory)) == (("0", "1"), BY_ADDRESS[1:])


@pytest.mark.parametrize(("opened", "found"), [((1, 2), (BY_ADDRESS[0], BY_ADDRESS[2])), ((), ())])
def test_a_node_that_a_device_cgroup_keeps_from_us_is_not_counted(
    tmp_path: Path, opened: tuple[int, ...], found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = {tmp_path / f"dev/nvidia{minor}" for minor in opened}
    monkeypatch.setattr(os, "access", lambda node, mode: node in may_open)
    assert addresses(probe({}, **informed(tmp_path, THREE, minors=(0, 1, 2)))) == found


def test_no_address_is_guessed_when_the_driver_orders_by_speed(tmp_path: Path) -> None:
    trees = informed(tmp_path, THREE, minors=(0, 1, 2))
    assert addresses(probe({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, **trees)) == (None,) * 3


@pytest.mark.parametrize(
    ("listed", "cuda"),
    [
        ("0,1,2", ("0", "1", "2")),
        ("2,1", ("2", "1")),
        (" 2 , 0", ("2", "0")),
        ("01", ("1",)),
        ("0,", ("0",)),
        ("", ()),
        (" ", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,-1,2", ("0",)),
        ("0,-1,9", ("0",)),  # what stands behind is not read
        ("GPU-02ee,GPU-1bff", ("GPU-02ee", "GPU-1bff")),
        ("GPU-02,GPU-CA", ("GPU-02", "GPU-CA")),
        ("MIG-aa,MIG-bb", ("MIG-aa", "MIG-bb")),
        ("MIG-GPU-aa/1/0", ("MIG-GPU-aa/1/0",)),
    ],
)
def test_an_outer_list_is_read_as_cuda_reads_it(tmp_path: Path, listed: str, cuda: tuple[str, ...]) -> None:
    trees = informed(tmp_path, THREE, minors=(0, 1, 2))
    assert entries(probe({"CUDA_VISIBLE_DEVICES": listed}, **trees)) == cuda


@pytest.mark.parametrize(
    ("listed", "wrong"),
    [
        ("3", "'3'"),
        ("0,9,1", "'9'"),
        ("0,,2", "''"),
        ("1x", "'1x'"),
        ("0;1", "'0;1'"),
        ("9" * 20, "'" + "9" * 20 + "'"),
    ],
)
def test_an_entry_that_does_not_exist_is_refused(tmp_path: Path, listed: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        probe({"CUDA_VISIBLE_DEVICES": listed}, **informed(tmp_path, THREE, minors=(0, 1, 2)))
    has = "0, 1, 2"
    expected = [f"CUDA_VISIBLE_DEVICES {listed!r}", has, f"but {wrong} is not", "correct or unset it"]
    assert all(text in str(caught.value) for text in expected), caught.value


@pytest.mark.parametrize("listed", ["1,1", "1,01", "GPU-ca11,GPU-ca", "MIG-aa,MIG-aa"])
def test_a_device_named_twice_is_refused_because_cuda_would_show_none(tmp_path: Path, listed: str) -> None:
    with pytest.raises(ConfigError, match="each once"):
        probe({"CUDA_VISIBLE_DEVICES": listed}, **informed(tmp_path, THREE, minors=(0, 1, 2)))


@pytest.mark.parametrize("listed", ["0", "GPU-aa", "MIG-aa"])
def test_a_list_on_a_node_without_any_device_is_refused(tmp_path: Path, listed: str) -> None:
    with pytest.raises(ConfigError, match="it has no CUDA device"):
        probe({"CUDA_VISIBLE_DEVICES": listed}, **node(tmp_path))


def test_a_list_for_devices_of_another_make_is_not_ours_to_judge(tmp_path: Path) -> None:
    inventory = probe({"CUDA_VISIBLE_DEVICES": "0,1"}, **node(tmp_path, nodes=("kfd",)))
    assert inventory.cuda == ()


def test_what_only_the_driver_could_verify_is_believed(tmp_path: Path) -> None:
    gpus = {**THREE, "0000:1b:00.0": (1, "GPU-????????-????-????-????-????????????")}
    trees = informed(tmp_path, gpus, minors=(0, 1, 2))
    migs = probe({"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}, **trees)
    assert [device.entry for device in migs.cuda] == ["MIG-aa", "MIG-bb"]
    assert addresses(migs) == (None, None)
    uuids = probe({"CUDA_VISIBLE_DEVICES": "GPU-new"}, **trees)
    assert addresses(uuids) == (None,)


def test_entries_lead_to_addresses(tmp_path: Path) -> None:
    trees = informed(tmp_path, THREE, minors=(0, 1, 2))
    for listed in ("2,0", "GPU-02ee,GPU-1b"):
        inventory = probe({"CUDA_VISIBLE_DEVICES": listed}, **trees)
        assert addresses(inventory) == (BY_ADDRESS[2], BY_ADDRESS[0])


def test_only_the_cpus_of_our_affinity_count() -> None:
    one = min(os.sched_getaffinity(0))
    code = "from elastic_agent.agent.machine.devices import probe; print(probe({}).cpus)"
    pinned = f"import os; os.sched_setaffinity(0, {{{one}}}); {code}"
    answers = [subprocess.check_output([sys.executable, "-c", text], text=True) for text in (code, pinned)]
    assert answers == [f"{len(os.sched_getaffinity(0))}\n", "1\n"]


@pytest.mark.parametrize(
    ("nproc", "each", "inventory", "workers"),
    [
        ("auto", 1, FOUR_GPUS, 4),
        ("auto", 1, CPU_ONLY, 6),
        ("gpu", 1, FOUR_GPUS, 4),
        ("cpu", 1, FOUR_GPUS, 64),
        ("cpu", 1, CPU_ONLY, 6),
        (3, 1, FOUR_GPUS, 3),
        (9, 1, CPU_ONLY, 9),
        ("auto", 2, FOUR_GPUS, 2),
        ("gpu", 2, FOUR_GPUS, 2),
        ("gpu", 4, FOUR_GPUS, 1),
        ("gpu", 2, UUIDS, 1),
        ("auto", 2, CPU_ONLY, 6),
        ("cpu", 2, FOUR_GPUS, 64),
        (1, 3, FOUR_GPUS, 1),
    ],
)
def test_number_of_workers(nproc: WorkerCount, each: int, inventory: Inventory, workers: int) -> None:
    assert resolve_workers(nproc, each, inventory) == workers


@pytest.mark.parametrize("each", [3, 5, 8])
@pytest.mark.parametrize("nproc", ["gpu", "auto"])
def test_devices_that_would_be_left_over_are_an_error(nproc: WorkerCount, each: int) -> None:
    with pytest.raises(ConfigError, match=r"divides this node's CUDA devices: 4 \(0,1,2,3\)") as caught:
        resolve_workers(nproc, each, FOUR_GPUS)
    (problem,) = caught.value.problems
    assert (problem.origin, problem.value) == ("--devices-per-worker", str(each))
    assert caught.value.code == ExitCode.NOT_HERE


def test_one_worker_per_gpu_without_any_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_workers("gpu", 1, CPU_ONLY)
    expected = ["--nproc-per-node 'gpu'", "no CUDA device", "--nproc-per-node auto"]
    assert all(text in str(caught.value) for text in expected)


def masked(entry: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": entry, "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("pinning", "local_rank", "workers", "each", "inventory", "overrides", "defaults", "reason"),
    [
        ("index", 2, 4, 1, FOUR_GPUS, {}, DEVICE_ORDER, "selects cuda:2"),
        ("index", 0, 1, 1, FOUR_GPUS, {}, DEVICE_ORDER, "sees 4 CUDA devices"),
        ("index", 0, 1, 1, MIGS, {}, DEVICE_ORDER, "selects cuda:0"),
        ("index", 7, 8, 1, CPU_ONLY, {}, {}, "worker 7 runs on the CPU"),
        ("mask", 2, 4, 1, FOUR_GPUS, masked("2"), DEVICE_ORDER, "sees only CUDA device 2"),
        ("mask", 1, 2, 1, UUIDS, masked("GPU-bb"), DEVICE_ORDER, "sees only CUDA device GPU-bb"),
        ("mask", 1, 2, 1, MIGS, masked("MIG-bb"), DEVICE_ORDER, "as cuda:0 with LOCAL_RANK 0"),
        ("mask", 7, 8, 1, CPU_ONLY, {}, {}, "runs on the CPU"),
        (
            "index",
            1,
            2,
            2,
            FOUR_GPUS,
            {},
            DEVICE_ORDER,
            "sees 4 CUDA devices and LOCAL_RANK selects cuda:2 to cuda:3",
        ),
        ("index", 0, 1, 3, FOUR_GPUS, {}, DEVICE_ORDER, "LOCAL_RANK selects cuda:0 to cuda:2"),
        (
            "mask",
            1,
            2,
            2,
            FOUR_GPUS,
            masked("2,3"),
            DEVICE_ORDER,
            "only CUDA devices 2,3, as cuda:0 to cuda:1 with",
        ),
        (
            "mask",
            0,
            1,
            2,
            UUIDS,
            masked("GPU-aa,GPU-bb"),
            DEVICE_ORDER,
            "sees only CUDA devices GPU-aa,GPU-bb",
        ),
        ("index", 7, 8, 2, CPU_ONLY, {}, {}, "worker 7 runs on the CPU"),
        ("mask", 7, 8, 2, CPU_ONLY, {}, {}, "runs on the CPU"),
        ("none", 8, 9, 2, FOUR_GPUS, {}, {}, "left to the script"),
        ("none", 8, 9, 1, FOUR_GPUS, {}, {}, "left to the script"),
        ("none", 8, 9, 1, CPU_ONLY, {}, {}, "left to the script"),
    ],
)
def test_pinning(
    pinning: DevicePinning,
    local_rank: int,
    workers: int,
    each: int,
    inventory: Inventory,
    overrides: dict[str, str],
    defaults: dict[str, str],
    reason: str,
) -> None:
    pinned = pin(pinning, local_rank, workers, each, inventory)
    assert compose({}, pinned.variables) == {**overrides, **defaults}
    assert {each.name for each in pinned.variables if each.yielding} == defaults.keys()
    assert reason in pinned.reason


@pytest.mark.parametrize(
    ("pinning", "workers", "each", "inventory", "expected"),
    [
        ("index", 5, 1, FOUR_GPUS, ["'5'", "CUDA devices: 4", "0,1,2,3", "per-worker 0"]),
        ("mask", 3, 1, UUIDS, ["'3'", "CUDA devices: 2", "GPU-aa,GPU-bb", "per-worker 0"]),
        ("index", 2, 1, MIGS, ["only the first MIG", "--virtual-local-rank"]),
        ("index", 3, 2, FOUR_GPUS, ["-node '3'", "each with 2", "devices: 4"]),
        ("mask", 1, 5, FOUR_GPUS, ["-node '1'", "each with 5", "CUDA devices: 4 (0,1,2,3)"]),
        ("mask", 1, 2, MIGS, ["MIG devices", "only the first", "without --devices-per-worker"]),
        ("index", 1, 2, MIGS, ["MIG devices", "only the first", "without --devices-per-worker"]),
        ("mask", 1, 2, GPU_AND_MIG, ["MIG devices", "only the first", "without --devices-per-worker"]),
    ],
)
def test_more_workers_than_devices_is_refused_for_every_worker(
    pinning: DevicePinning, workers: int, each: int, inventory: Inventory, expected: list[str]
) -> None:
    for local_rank in range(workers):
        with pytest.raises(ConfigError) as caught:
            pin(pinning, local_rank, workers, each, inventory)
        assert all(text in str(caught.value) for text in expected)


def test_what_the_user_set_beats_the_defaults_but_not_the_mask() -> None:
    users = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "LOCAL_RANK": "3"}
    assert compose(users, pin("mask", 3, 4, 1, FOUR_GPUS).variables) == {
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "CUDA_VISIBLE_DEVICES": "3",
        "LOCAL_RANK": "0",
    }
    own = {"LOCAL_RANK": "3"}
    assert compose(own, pin("index", 3, 4, 1, FOUR_GPUS).variables) == {**own, **DEVICE_ORDER}


def test_all_devices_of_the_workers_are_theirs_alone() -> None:
    pinned = [pin("index", rank, 2, 2, FOUR_GPUS) for rank in range(2)]
    assert [[device.entry for device in worker.devices] for worker in pinned] == [["0", "1"], ["2", "3"]]
    assert [worker.first for worker in pinned] == [FOUR_GPUS.cuda[0], FOUR_GPUS.cuda[2]]
    assert pin("none", 0, 2, 2, FOUR_GPUS).first is None
