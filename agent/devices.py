"""Devices: how many workers this node runs, and which CUDA device each of them sees.

`probe` reads once what the node has; `resolve_workers` and `pin` then decide, as pure functions over that
`Inventory`, before anything starts. CUDA devices are counted without torch and without a call into the driver
(which hangs on a sick GPU), and named as in CUDA_VISIBLE_DEVICES.

Words: *pinning* `index`: a worker sees all devices and LOCAL_RANK selects one. `mask`: it sees only its own, as
cuda:0, with LOCAL_RANK 0 (torchrun's --virtual-local-rank). `none`: nothing is set and nothing is checked.

Invariant: under `index` and `mask`, on a node with devices, each worker has one and no two have the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .config import ConfigError, DevicePinning, Problem, WorkerCount
from .variables import Variable


@dataclass(frozen=True, slots=True)
class Inventory:
    """What this agent may use. `cuda`: one CUDA_VISIBLE_DEVICES entry per device, in the order of cuda:0, 1, ..."""

    cuda: tuple[str, ...]
    cpus: int


@dataclass(frozen=True, slots=True)
class PinnedDevice:
    """What one worker's environment needs for its device; `reason` is the sentence for --check-config."""

    reason: str
    variables: tuple[Variable, ...] = ()


def probe(environ: Mapping[str, str], proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> Inventory:
    """The NVIDIA devices that an outer CUDA_VISIBLE_DEVICES leaves to us, and the CPUs of our affinity mask."""
    listed, installed = environ.get("CUDA_VISIBLE_DEVICES"), _installed(proc, dev)
    cuda = tuple(map(str, range(installed))) if listed is None else _visible(listed, installed)
    return Inventory(cuda, len(os.sched_getaffinity(0)))


def resolve_workers(nproc: WorkerCount, inventory: Inventory) -> int:
    """The number of workers that --nproc-per-node asks for: at least 1, or ConfigError."""
    if nproc == "gpu" and not inventory.cuda:
        raise _wrong(
            "--nproc-per-node",
            nproc,
            "a CUDA device, but this node has no CUDA device (no /dev/nvidia<N>, or CUDA_VISIBLE_DEVICES hides them)",
            "check `nvidia-smi -L`, or use --nproc-per-node auto, cpu or a number",
        )
    if nproc == "auto":
        return len(inventory.cuda) or inventory.cpus
    if nproc == "gpu":
        return len(inventory.cuda)
    if nproc == "cpu":
        return inventory.cpus
    return nproc


def pin(pinning: DevicePinning, local_rank: int, workers: int, inventory: Inventory) -> PinnedDevice:
    """The device of worker `local_rank` of `workers`; ConfigError if the node has devices, but not for all."""
    assert 0 <= local_rank < workers, (local_rank, workers)
    devices = inventory.cuda
    if pinning == "none":
        return PinnedDevice("none: devices are left to the script, the environment is not touched")
    if not devices:
        mask = " (there is nothing to mask: the same as index)" if pinning == "mask" else ""
        return PinnedDevice(
            f"{pinning}: this node has no CUDA device, worker {local_rank} runs on the CPU{mask}"
        )
    if workers > len(devices):
        raise _wrong(
            "--nproc-per-node",
            workers,
            f"at most as many workers as there are CUDA devices: {len(devices)} ({','.join(devices)})",
            f"lower --nproc-per-node to {len(devices)}, or let workers share devices with --device-pinning none",
        )
    order = Variable(
        "CUDA_DEVICE_ORDER", "PCI_BUS_ID", "the driver's order is by speed, not the one that nvidia-smi shows"
    )
    if pinning == "mask":
        entry = devices[local_rank]
        reason = f"mask: worker {local_rank} sees only CUDA device {entry}, as cuda:0 with LOCAL_RANK 0"
        masked = {"CUDA_VISIBLE_DEVICES": entry, "LOCAL_RANK": "0"}
        overruled = (Variable(name, value, reason, yielding=False) for name, value in masked.items())
        return PinnedDevice(reason, (order, *overruled))
    if workers > 1 and devices[0].startswith("MIG-"):
        raise _wrong(
            "--device-pinning",
            pinning,
            f"mask for {workers} workers on MIG devices: CUDA shows one process only the first MIG device of "
            "CUDA_VISIBLE_DEVICES",
            "use --device-pinning mask",
        )
    return PinnedDevice(
        f"index: worker {local_rank} sees {len(devices)} CUDA devices and LOCAL_RANK selects cuda:{local_rank}",
        (order,),
    )


def _wrong(origin: str, value: object, expected: str, advice: str) -> ConfigError:
    return ConfigError([Problem(origin, str(value), expected, advice)])


def _installed(proc: Path, dev: Path) -> int:
    """The number of NVIDIA GPUs whose device node we were given, or that the driver shows if there is no node.

    A container sees all of the host's GPUs in /proc, but in /dev only its own: so /dev comes first. On a host
    the nodes may be made at first use, which may be our workers': then only /proc knows. (So a container that
    was given none of its host's GPUs, yet sees /proc/driver/nvidia, needs CUDA_VISIBLE_DEVICES set to "".)
    """
    nodes = [node for node in dev.glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", node.name)]
    return len(nodes or list((proc / "driver/nvidia/gpus").glob("*")))


def _visible(listed: str, installed: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES as torch and CUDA read it: cut at the first invalid entry, empty if one is repeated.

    The first entry fixes the kind for all: GPU uuids, MIG uuids (both may be abbreviated; only the driver could
    tell whether they exist, so they are believed), or indices. `1x` is 1, as strtoul reads it.
    """
    entries: list[str] = []
    prefix = next((kind for kind in ("GPU-", "MIG-") if listed.startswith(kind)), None)
    for text in listed.split(","):
        if prefix is None:
            digits = re.match(r"\s*\+?([0-9]+)", text)
            entry = str(int(digits[1])) if digits else None
        else:
            entry = text if text.startswith(prefix) else None
        if entry is None:
            break
        if entry in entries:
            return ()
        entries.append(entry)
    beyond = (i for i, entry in enumerate(entries) if prefix is None and int(entry) >= installed)
    return tuple(entries[: next(beyond, None)]) if installed else ()
