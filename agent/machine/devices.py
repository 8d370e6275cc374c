"""Devices and CPUs: how many workers this node runs, which CUDA devices each of them has, and on which CPUs it runs.

`probe` and `probe_cpus` read once what the node has; `resolve_workers`, `pin` and `share` then decide, as pure
functions over that, before anything starts. CUDA devices are found without torch and without a call into the driver
(which hangs on a sick GPU), and named as in CUDA_VISIBLE_DEVICES. The CPUs are set in the worker's own process, by
`shim`, before its command begins.

Words: *pinning* `index`: a worker sees all devices and LOCAL_RANK selects its own. `mask`: it sees only its own, from
cuda:0 on, with LOCAL_RANK 0 (torchrun's --virtual-local-rank). `none`: nothing is set, and workers may share devices.
*per_worker*: the number of devices of one worker (--devices-per-worker); its first is cuda:(LOCAL_RANK * per_worker).
A *core* is a physical one, with its hardware threads. *Next to* a device are the CPUs of its NUMA node. Affinity
`none`: nothing is set. `numa`: a worker keeps to the CPUs next to its device; without devices the workers are spread
over the NUMA nodes. `cores`: those who would share a set of cores so divide it, evenly and disjointly.

Invariants: under `index` and `mask`, on a node with devices, each worker has `per_worker` of them and no two have the
same one. An index in an outer CUDA_VISIBLE_DEVICES that does not exist is an error: CUDA would go on with the
entries before it, without an error. No worker gets a CPU that the agent itself may not use, and each gets at least one
whole core of what the agent has; only with more workers than cores do two of them share one under `cores`.

Which torch and which NCCL the workers will load is read from the metadata of what is installed: torch is not imported
here.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from ..common.variables import Variable
from ..configuration.config import ConfigError, DevicePinning, Problem
from ..configuration.parse import Affinity, WorkerCount
from ..workers.processes.helper import job_python
from ..workers.processes.proc import read

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_ADDRESS = "PCI_BUS_ID"
THREADS = "OMP_NUM_THREADS"

OTHER_DRIVERS = ("kfd", "dxg", "nvgpu", "nvhost-gpu")
"""Entries of /dev that show devices which are not counted here (AMD, WSL, Jetson), but obey the same variable."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Device:
    """One CUDA device: its `entry` in CUDA_VISIBLE_DEVICES and, if known, its `address` on the PCI bus."""

    entry: str
    address: str | None = None

    @property
    def nvml_name(self) -> str:
        """As NVML knows it."""
        return self.entry if self.entry.startswith("MIG-") else self.address or self.entry


@dataclass(frozen=True, slots=True)
class Inventory:
    """What this agent may use. `cuda` is in the order of cuda:0, 1, ..."""

    cuda: tuple[Device, ...]
    cpus: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one worker, and what its environment needs for it; `reason` is the sentence for --check-config."""

    reason: str
    devices: tuple[Device, ...] = ()
    """None where it chooses for itself, or there are none."""
    variables: tuple[Variable, ...] = ()
    cpus: tuple[int, ...] = ()
    """None: all that the agent has."""

    @property
    def first(self) -> Device | None:
        """Beside which the worker runs."""
        return self.devices[0] if self.devices else None


def probe(environ: Mapping[str, str], proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> Inventory:
    """The NVIDIA devices that an outer CUDA_VISIBLE_DEVICES leaves to us, and the CPUs of our affinity mask.

    Raises `ConfigError` for an entry that does not exist.
    """
    installed, cpus = _installed(proc, dev), len(os.sched_getaffinity(0))
    by_address = environ.get(ORDER, BY_ADDRESS) == BY_ADDRESS  # else only the driver knows the order
    addresses = [gpu.address if by_address else None for gpu in installed]
    indices = [Device(str(index), address) for index, address in enumerate(addresses)]
    listed = environ.get(VISIBLE)
    if listed is None or (not installed and any((dev / name).exists() for name in OTHER_DRIVERS)):
        return Inventory(tuple(indices), cpus)
    return Inventory(_visible(listed, installed, indices), cpus)


def resolve_workers(nproc: WorkerCount, per_worker: int, inventory: Inventory) -> int:
    """The number of workers that --nproc-per-node asks for, with `per_worker` devices: at least 1, or ConfigError."""
    if nproc == "gpu" and not inventory.cuda:
        raise _wrong(
            "--nproc-per-node",
            nproc,
            "a CUDA device, but this node has no CUDA device (no /dev/nvidia<N>, or CUDA_VISIBLE_DEVICES hides them)",
            "check `nvidia-smi -L`, or use --nproc-per-node auto, cpu or a number",
        )
    if nproc == "cpu" or (nproc == "auto" and not inventory.cuda):
        return inventory.cpus
    if isinstance(nproc, int):
        return nproc
    available = len(inventory.cuda)
    if available % per_worker:
        expected = f"a number that divides this node's CUDA devices: {_listed(inventory)}"
        advice = "choose one that does, or give --nproc-per-node a number"
        raise _wrong("--devices-per-worker", per_worker, expected, advice)
    return available // per_worker


def pin(
    pinning: DevicePinning, local_rank: int, workers: int, per_worker: int, inventory: Inventory
) -> Placement:
    """The `per_worker` devices of worker `local_rank` of `workers`; ConfigError where a node has some, but too few."""
    assert 0 <= local_rank < workers, (local_rank, workers)
    available = inventory.cuda
    if pinning == "none":
        return Placement("none: devices are left to the script, the environment is not touched")
    if not available:
        return Placement(f"{pinning}: this node has no CUDA device, worker {local_rank} runs on the CPU")
    if workers * per_worker > len(available):
        expected = f"at most as many workers, each with {per_worker}, as there are CUDA devices: {_listed(inventory)}"
        advice = "lower it or --devices-per-worker, or let workers share devices with --devices-per-worker 0"
        raise _wrong("--nproc-per-node", workers, expected, advice)
    first = local_rank * per_worker
    own = available[first : first + per_worker]
    if any(one.entry.startswith("MIG-") for one in own) and (
        per_worker > 1 or (pinning == "index" and workers > 1)
    ):
        raise _wrong(
            "--virtual-local-rank",
            pinning == "mask",
            "true, and one device for each worker where the devices are MIG devices: CUDA shows one process only the "
            "first MIG device of CUDA_VISIBLE_DEVICES",
            "write --virtual-local-rank without --devices-per-worker, or train on whole GPUs",
        )
    ordered = "the driver's order is by speed, not the one that nvidia-smi shows"
    order = Variable(ORDER, BY_ADDRESS, ordered, by="devices")
    if pinning == "index":
        selected = f"LOCAL_RANK selects {_cuda(first, per_worker)}"
        reason = f"index: worker {local_rank} sees {len(available)} CUDA devices and {selected}"
        return Placement(reason, own, (order,))
    entries = ",".join(device.entry for device in own)
    seen = f"CUDA {_devices(entries, per_worker)}, as {_cuda(0, per_worker)}"
    reason = f"mask: worker {local_rank} sees only {seen} with LOCAL_RANK 0"
    masked = (
        Variable(name, value, reason, yielding=False, by="devices")
        for name, value in ((VISIBLE, entries), ("LOCAL_RANK", "0"))
    )
    return Placement(reason, own, (order, *masked))


def _listed(inventory: Inventory) -> str:
    return f"{len(inventory.cuda)} ({','.join(device.entry for device in inventory.cuda)})"


def _devices(entries: str, count: int) -> str:
    return f"device {entries}" if count == 1 else f"devices {entries}"


def _cuda(first: int, per_worker: int) -> str:
    return f"cuda:{first}" if per_worker == 1 else f"cuda:{first} to cuda:{first + per_worker - 1}"


def _wrong(origin: str, value: object, expected: str, advice: str) -> ConfigError:
    return ConfigError([Problem(origin, str(value), expected, advice, here=True)])


# --- What is installed


@dataclass(frozen=True, slots=True)
class _Gpu:
    """As far as the driver's /proc tree shows it: nothing is asked of the driver."""

    address: str | None = None
    uuid: str = ""
    minor: int | None = None


def _installed(proc: Path, dev: Path) -> Sequence[_Gpu]:
    """The NVIDIA GPUs whose device node we were given, or that the driver shows if there is no node; by address.

    A container may see all of the host's GPUs in /proc, but in /dev only its own; and Slurm's device cgroup leaves
    nodes that no process may open, which CUDA does not count: so /dev comes first. On a host the nodes may be made at
    first use, which may be our workers': then only /proc knows. (So a container that was given none of its host's
    GPUs, yet sees /proc/driver/nvidia, needs CUDA_VISIBLE_DEVICES set to "".)
    """
    known = [_read_gpu(folder) for folder in (proc / "driver/nvidia/gpus").glob("*")]
    known.sort(key=lambda gpu: [int(part, 16) for part in re.findall("[0-9a-f]+", gpu.address or "")])
    found = ((re.fullmatch(r"nvidia([0-9]+)", node.name), node) for node in dev.glob("nvidia*"))
    nodes = {int(match[1]): node for match, node in found if match}
    if not nodes:
        return known
    minors = {minor for minor, node in nodes.items() if os.access(node, os.R_OK | os.W_OK)}
    ours = [gpu for gpu in known if gpu.minor in minors]
    return ours if len(ours) == len(minors) else [_Gpu()] * len(minors)


def _read_gpu(folder: Path) -> _Gpu:
    lines = (line.partition(":") for line in read(folder / "information").splitlines())
    found = {key.strip(): value.strip() for key, _, value in lines}
    minor = found.get("Device Minor", "")
    uuid = found.get("GPU UUID", "")  # of question marks, until the GPU is first used
    return _Gpu(folder.name.lower(), uuid, int(minor) if minor.isdecimal() else None)


# --- What is visible


def _visible(listed: str, installed: Sequence[_Gpu], indices: Sequence[Device]) -> tuple[Device, ...]:
    """CUDA_VISIBLE_DEVICES as CUDA reads it: GPU uuids, which may be abbreviated, MIG uuids, or indices.

    Empty and `NoDevFiles` hide everything, `-1` hides itself and what stands behind it; a comma at the end means
    nothing.
    """
    if listed.strip() in ("", "NoDevFiles"):
        return ()
    cuda: dict[str, Device] = {}
    for entry in listed.removesuffix(",").split(","):
        if entry.strip() == "-1":
            break
        device = _device(entry.strip(), installed, indices)
        if device is None or device.nvml_name in cuda:
            there = ", ".join(device.entry for device in indices) or "it has no CUDA device"
            raise _wrong(
                VISIBLE,
                listed,
                f"devices of this node, each once ({there}), but {entry!r} is not",
                "correct or unset it, or set it to nothing to train without CUDA devices; `nvidia-smi -L` lists them",
            )
        cuda[device.nvml_name] = device
    return tuple(cuda.values())


def _device(entry: str, installed: Sequence[_Gpu], indices: Sequence[Device]) -> Device | None:
    """None if there is no such device. Uuids are believed: only the driver knows those of MIG devices."""
    if entry.isdecimal():
        return indices[int(entry)] if int(entry) < len(indices) else None
    if entry.startswith("MIG-") and installed:
        return Device(entry, installed[0].address if len(installed) == 1 else None)
    if not entry.startswith("GPU-") or not installed:
        return None
    found = [gpu.address for gpu in installed if gpu.uuid.lower().startswith(entry.lower())]
    return Device(entry, found[0] if len(found) == 1 else None)


# --- Which CPUs


@dataclass(frozen=True, slots=True)
class Core:
    """The hardware threads of one core that the agent may use, and the core's NUMA node."""

    cpus: tuple[int, ...]
    numa: int = 0


@dataclass(frozen=True, slots=True)
class CpuLayout:
    """What the agent may use: its `cores` by NUMA node and number.

    `near` has the CPUs next to a device, by its address, as far as the machine shows it.
    """

    cores: tuple[Core, ...]
    near: Mapping[str, Collection[int]] = field(default_factory=dict)


def share(affinity: Affinity, devices: Sequence[Device | None], layout: CpuLayout) -> tuple[Placement, ...]:
    """On CPUs, for each worker, by local rank; `devices` has the one that it is pinned to."""
    workers, cores = len(devices), layout.cores
    if affinity == "none":
        # And torchrun's number of threads: one of our own would make results depend on a machine's cores.
        return (Placement("affinity none: all CPUs, and torchrun's number of threads"),) * workers
    homes = [_near(device, layout) or cores for device in devices]
    if affinity == "numa" and not any(devices):  # neighbours in rank are neighbours there
        nodes = sorted({core.numa for core in cores})
        spread = [_part(nodes, local_rank, workers) for local_rank in range(workers)]
        homes = [tuple(core for core in cores if core.numa in part) for part in spread]
    if affinity == "cores":
        sets = set(homes)
        if sum(map(len, sets)) > len(set().union(*sets)):  # they overlap: not every device's own are known
            homes = [cores] * workers
        homes = [_part(home, homes[:i].count(home), homes.count(home)) for i, home in enumerate(homes)]
    return tuple(
        _share(affinity, home, homes.count(home), device) for home, device in zip(homes, devices, strict=True)
    )


def _near(device: Device | None, layout: CpuLayout) -> tuple[Core, ...]:
    """Empty where the machine does not show it, or has left us none of them."""
    near = layout.near.get((device and device.address) or "", ())
    return tuple(core for core in layout.cores if not set(core.cpus).isdisjoint(near))


def _part(items: Sequence[T], taker: int, takers: int) -> tuple[T, ...]:
    """An even, contiguous part, disjoint from the others' where there are items enough; never an empty one."""
    first = taker * len(items) // takers
    return tuple(items[first : max(first + 1, (taker + 1) * len(items) // takers)])


def _share(affinity: Affinity, home: Sequence[Core], sharers: int, device: Device | None) -> Placement:
    cpus = tuple(sorted(cpu for core in home for cpu in core.cpus))
    shared = f", shared by {sharers} workers" if sharers > 1 else ""
    beside = f"; its device is {device.entry} ({device.address or 'at an unknown address'})" if device else ""
    why = f"{len(home)} cores{shared}"
    return Placement(
        f"affinity {affinity}: CPUs {cpu_list(cpus)}{shared}{beside}",
        variables=(Variable(THREADS, str(max(1, len(home) // sharers)), why, by="affinity"),),
        cpus=cpus,
    )


def probe_cpus(
    addresses: Sequence[str],
    sys: Path = Path("/sys"),
    allowed: Collection[int] = (),
) -> CpuLayout:
    """The layout of our own affinity mask (or of `allowed`), which leaves out what is offline or another cpuset's."""
    allowed = set(allowed or os.sched_getaffinity(0))
    numa = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in (sys / "devices/system/node").glob("node[0-9]*")
        for cpu in _read_list(folder / "cpulist")
    }
    cores: set[Core] = set()
    for cpu in allowed:
        siblings = _read_list(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or [cpu]
        cores.add(Core(tuple(sorted(allowed & {cpu, *siblings})), numa.get(cpu, 0)))
    near = {}
    for address in addresses:
        device = sys / "bus/pci/devices" / address
        if read(device / "numa_node") not in (
            "",
            "-1",
        ):  # the firmware does not know it, and then lists all CPUs
            near[address] = frozenset(allowed.intersection(_read_list(device / "local_cpulist")))
    return CpuLayout(tuple(sorted(cores, key=lambda core: (core.numa, core.cpus))), near)


def _read_list(file: Path) -> list[int]:
    """CPUs as the kernel writes them: 0-3,8-11."""
    found = re.findall(r"([0-9]+)(?:-([0-9]+))?", read(file))
    return [cpu for first, last in found for cpu in range(int(first), int(last or first) + 1)]


def cpu_list(cpus: Sequence[int]) -> str:
    """Sorted CPUs as the kernel writes them: 0-3,8-11."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


# --- Versions

_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_NAMES = ("torch", *_NCCL)


@dataclass(frozen=True, slots=True)
class Software:
    """Versions as installed; None where they are not known."""

    torch: str | None = None
    nccl: str | None = None

    @property
    def has_nccl(self) -> bool:
        """False for the builds of torch that cannot use a GPU."""
        return self.torch is None or not self.torch.endswith("+cpu")

    def __str__(self) -> str:
        versions = [f"{name} {found or 'of unknown version'}" for name, found in asdict(self).items()]
        return versions[0] if not self.has_nccl else ", ".join(versions)


CURRENT = Software()
"""Unknown."""


def find_software(environ: Mapping[str, str]) -> Software:
    """Of this interpreter, where it is the one that runs the workers; else nothing is known."""
    if job_python(environ) != sys.executable:
        return CURRENT
    found = {}
    for name in _NAMES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return Software(found.get("torch"), next((found[name] for name in _NCCL if name in found), None))
