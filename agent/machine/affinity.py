"""Affinity: on which CPUs each worker of this node runs, and with how many threads it computes.

`probe_cpus` reads once from sysfs what the agent itself may use; `share` then decides, as a pure function over that
`CpuLayout`. The CPUs are set in the worker's own process, by `shim`, before its command begins.

Words: a *core* is a physical one, with its hardware threads. *Next to* a device are the CPUs of its NUMA node.
Affinity `none`: nothing is set. `numa`: a worker keeps to the CPUs next to its device; without devices the workers are
spread over the NUMA nodes. `cores`: those who would share a set of cores so divide it, evenly and disjointly.

Invariants: no worker gets a CPU that the agent itself may not use, and each gets at least one whole core of what the
agent has. Only with more workers than cores do two of them share one under `cores`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..common.variables import Variable
from ..configuration.values import Affinity
from ..workers.processes.proc import read
from .devices import Device

T = TypeVar("T")

THREADS = "OMP_NUM_THREADS"


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


@dataclass(frozen=True, slots=True)
class CpuShare:
    """The CPUs of one worker, none for all that the agent has; `reason` is the sentence for --check-config."""

    reason: str
    cpus: tuple[int, ...] = ()
    variables: tuple[Variable, ...] = ()


@dataclass(frozen=True, slots=True)
class _Home:
    """Cores where a worker may run, before they are divided; `which` describes them."""

    cores: tuple[Core, ...]
    which: str


def share(affinity: Affinity, devices: Sequence[Device | None], layout: CpuLayout) -> tuple[CpuShare, ...]:
    """For each worker, by local rank; `devices` has the one that it is pinned to."""
    workers = len(devices)
    if affinity == "none":
        # And torchrun's number of threads: one of our own would make results depend on a machine's cores.
        return (CpuShare("affinity none: all CPUs, and torchrun's number of threads"),) * workers
    homes = [_near(device, layout) for device in devices]
    if affinity == "cores":
        homes = _divided(homes, layout.cores)
    elif not any(devices):
        homes = _spread(workers, layout.cores)
    sharers = Counter(home.cores for home in homes)
    return tuple(_share(affinity, home, sharers[home.cores]) for home in homes)


def _near(device: Device | None, layout: CpuLayout) -> _Home:
    if device is None:
        return _Home(layout.cores, "of all")
    near = layout.near.get(device.address or "", ())
    cores = tuple(core for core in layout.cores if not set(core.cpus).isdisjoint(near))
    if not cores:
        return _Home(layout.cores, f"of all: none of them is known to be next to CUDA device {device.entry}")
    return _Home(cores, f"of those next to CUDA device {device.entry} ({device.address})")


def _spread(workers: int, cores: Sequence[Core]) -> list[_Home]:
    """Over the NUMA nodes, in order: neighbours in rank are neighbours there."""
    nodes = sorted({core.numa for core in cores})
    homes = []
    for local_rank in range(workers):
        part = _part(nodes, local_rank, workers)
        which = f"of NUMA node {', '.join(map(str, part))}"
        homes.append(_Home(tuple(core for core in cores if core.numa in part), which))
    return homes


def _divided(homes: Sequence[_Home], cores: tuple[Core, ...]) -> list[_Home]:
    """Each set of cores among those who would share it; all cores among all where the sets overlap in part."""
    sets = {home.cores for home in homes}
    if sum(map(len, sets)) > len(set().union(*sets)):
        homes = [_Home(cores, "of all: not every device is known to have CPUs of its own next to it")] * len(
            homes
        )
    parts = []
    for local_rank, home in enumerate(homes):
        sharers = [other for other, theirs in enumerate(homes) if theirs.cores == home.cores]
        part = _part(home.cores, sharers.index(local_rank), len(sharers))
        parts.append(_Home(tuple(part), home.which))
    return parts


def _part(items: Sequence[T], taker: int, takers: int) -> Sequence[T]:
    """An even, contiguous part, disjoint from the others' where there are items enough; never an empty one."""
    first = taker * len(items) // takers
    return items[first : max(first + 1, (taker + 1) * len(items) // takers)]


def _share(affinity: Affinity, home: _Home, sharers: int) -> CpuShare:
    cpus = tuple(sorted(cpu for core in home.cores for cpu in core.cpus))
    threads, why = len(home.cores) // sharers, "one for each core that the worker has"
    if sharers > 1:
        why = f"its part of {len(home.cores)} cores that {sharers} workers share"
    with_others = f", shared by {sharers} workers" if sharers > 1 else ""
    return CpuShare(
        f"affinity {affinity}: CPUs {cpu_list(cpus)}{with_others}, {home.which}",
        cpus,
        (Variable(THREADS, str(max(1, threads)), why, by="affinity"),),
    )


# --- What the machine shows


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
        ):  # -1: not known to the firmware, which then lists all CPUs
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
