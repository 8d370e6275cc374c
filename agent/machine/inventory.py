"""This machine as it was found, and what follows from it for this job: examined once, before anything is started.
What settings name here (folders, memory, the program of the workers) is found wanting at once, and not hours later.

`resolve` checks the settings by themselves; here they meet the machine, and `prepare` does both. Each folder and module
that finds something out (devices, network, ...) has a step in `inspect_machine`: it returns what it decided, or raises
`ConfigError`, and states what it found in *facts*, sentences that --check-config shows below the settings. The problems
of all steps are reported together.

Invariant: nothing is started, opened or changed here; two calls on the same machine give the same answer.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeVar

from ...health.checks.finding import NodeNeeds
from ..checkpoints.folder import SHARED_MEMORY, describe_folder
from ..common.variables import Variable, settle
from ..configuration.config import Command, Config, ConfigError, Problem
from ..configuration.derive import Resolved, resolve
from ..configuration.load import Settings
from ..workers.processes.helper import job_python
from .agents_here import MAX_PARENT_BYTES, run_directory_parent
from .devices import (
    CURRENT,
    Inventory,
    Placement,
    Software,
    find_software,
    pin,
    probe,
    probe_cpus,
    resolve_workers,
    share,
)
from .network import Network, NotReady, discover_network, network_variables

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the steps decided, and why: it does not change while the agent lives."""

    inventory: Inventory
    placed: tuple[Placement, ...]
    """Each worker, by local rank."""
    network: Network | NotReady
    facts: tuple[str, ...] = ()
    software: Software = CURRENT

    @property
    def workers(self) -> int:
        return len(self.placed)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Those that the workers use, all where they choose for themselves; as NVML knows them."""
        used = [device for worker in self.placed for device in worker.devices] or self.inventory.cuda
        return tuple(device.nvml_name for device in used)

    def gpus_of(self, local_rank: int) -> frozenset[str]:
        """Those that this worker may use, as NVML knows them."""
        used = self.placed[local_rank].devices or self.inventory.cuda
        return frozenset(device.nvml_name for device in used)


def prepare(
    command_line: Settings, environ: Mapping[str, str], fresh_id: Callable[[], str]
) -> tuple[Resolved, Machine]:
    """`resolve` and, of settings without a problem, `inspect_machine`. Raises `ConfigError`."""
    resolved = resolve(command_line, environ, fresh_id)
    return resolved, inspect_machine(resolved.config, environ)


def inspect_machine(config: Config, environ: Mapping[str, str], *, resources: bool = True) -> Machine:
    """Raises `ConfigError` with the problems of all steps: print it and end with its code.

    `resources`: what the settings name has to be there.
    """
    problems: list[Problem] = []
    inventory = _ask(lambda: probe(environ), problems)
    pinned = _ask(lambda: _pinned(config, inventory), problems) if inventory is not None else None
    network = _ask(lambda: discover_network(config), problems)
    if resources:
        _ask(lambda: check_resources(config, environ), problems)
        _ask(lambda: check_target(config.command, environ), problems)
    if problems or inventory is None or pinned is None or network is None:
        raise ConfigError(problems)
    first = [worker.first for worker in pinned]
    layout = probe_cpus([device.address for device in first if device and device.address])
    shares = share(config.affinity, first, layout)
    software = find_software(environ)
    facts = (
        *_device_facts(environ, inventory, pinned, shares),
        *_network_facts(environ, network),
        f"workers use {software}",
    )
    placed = tuple(
        replace(devices, variables=(*cpus.variables, *devices.variables), cpus=cpus.cpus)
        for devices, cpus in zip(pinned, shares, strict=True)
    )
    return Machine(inventory, placed, network, facts, software)


def needs_of(config: Config, machine: Machine) -> NodeNeeds:
    """What the checks of this node look at."""
    choice = machine.network if isinstance(machine.network, Network) else None
    memory = describe_folder(config.memory_checkpoints)
    logs = config.logs.given_directory
    return NodeNeeds(
        ranks=machine.workers * config.nodes.max,
        copies_bytes=memory.limit if memory is not None and config.memory_checkpoints is not None else 0,
        log_directory=str(logs) if logs is not None else "",
        address=choice.address if choice is not None else "",
        gpus=machine.gpus,
        rdma=bool(machine.inventory.cuda and choice is not None and choice.rdma_ports),
    )


def _ask(step: Callable[[], T], problems: list[Problem]) -> T | None:
    """What the step answers; None if it found problems instead, so that the other steps still run."""
    try:
        return step()
    except ConfigError as error:
        problems += error.problems
        return None


def _pinned(config: Config, inventory: Inventory) -> tuple[Placement, ...]:
    per_worker = config.devices_per_worker or 1
    workers = resolve_workers(config.nproc_per_node, per_worker, inventory)
    pinning = config.device_pinning
    return tuple(pin(pinning, local_rank, workers, per_worker, inventory) for local_rank in range(workers))


def _device_facts(
    environ: Mapping[str, str],
    inventory: Inventory,
    pinned: Sequence[Placement],
    shares: Sequence[Placement],
) -> Iterator[str]:
    cuda = [f"{device.entry} ({device.address or 'at an unknown address'})" for device in inventory.cuda]
    yield f"devices: {', '.join(cuda) or 'no CUDA device'}; {inventory.cpus} CPUs"
    for local_rank, (devices, cpus) in enumerate(zip(pinned, shares, strict=True)):
        yield f"worker {local_rank}: {devices.reason}"
        yield f"  {cpus.reason}"
        yield from _variable_facts(environ, cpus.variables)


def _network_facts(environ: Mapping[str, str], network: Network | NotReady) -> Iterator[str]:
    if isinstance(network, NotReady):
        yield f"network: it would wait for {network.missing}: {network.advice}"
        return
    yield f"network: {network}"
    yield from _variable_facts(environ, network_variables(network))


def _variable_facts(environ: Mapping[str, str], chosen: Sequence[Variable]) -> Iterator[str]:
    for variable in settle(environ, chosen):
        yield f"  {variable.name}={variable.value} ({variable.by}: {variable.reason})"


# --- What settings name here


def check_resources(config: Config, environ: Mapping[str, str]) -> None:
    """Raises ConfigError with all that cannot work."""
    problems = [
        *_log_dir(config.logs.given_directory),
        *_memory(config.memory_checkpoints),
        *_run_directory(environ),
    ]
    if problems:
        raise ConfigError(problems)


def _log_dir(directory: Path | None) -> Iterator[Problem]:
    if directory is None:
        return
    there = directory.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        found = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        found = f"this user may not write to {there}"
    else:
        return
    expected = f"a folder that is there or can be made, but {found}"
    yield Problem("--log-dir", str(directory), expected, "name another, or leave it out", here=True)


def _memory(limit: int | None) -> Iterator[Problem]:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return  # there is none, and then the agent goes on without
    room = found.f_blocks * found.f_frsize
    if limit is not None and limit > room:
        given = f"{limit / 2**30:g}GiB"
        expected = f"at most what {SHARED_MEMORY} holds, {room / 2**30:.1f} GiB"
        advice = "lower it, or make that larger (Docker: --shm-size, the chart: sharedMemory)"
        yield Problem("--memory-checkpoints", given, expected, advice, here=True)


def _run_directory(environ: Mapping[str, str]) -> Iterator[Problem]:
    if run_directory_parent(environ) is None:
        expected = f"a folder that takes a new file now, of at most {MAX_PARENT_BYTES} bytes, for the agent's sockets"
        advice = "make room there, let this user write there, or name another one in TMPDIR"
        yield Problem("TMPDIR", environ.get("TMPDIR"), expected, advice, here=True)


def check_target(command: Command, environ: Mapping[str, str]) -> None:
    """Raises ConfigError: no restart helps what is not there."""
    if command.kind == "binary" and shutil.which(command.target, path=environ.get("PATH")) is None:
        found = "this file may not be run" if os.path.isfile(command.target) else "there is none of this name"
        expected = f"a program that exists and may be run, but {found}"
        advice = f"check its name and PATH, or write its path, seen from {os.getcwd()}"
        raise ConfigError([Problem("--no-python", command.target, expected, advice)])
    ours = job_python(environ) == sys.executable
    if command.kind == "module" and ours and (missing := _missing(command.target.partition(".")[0])):
        advice = (
            f"check its name; Python looks in {os.getcwd()}, in PYTHONPATH and among what is installed for it"
        )
        raise ConfigError([Problem("-m", command.target, f"a module, but {missing}", advice)])


def _missing(package: str) -> str:
    """What is not there; empty when it is, or when that is not certain."""
    try:
        spec = importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    except (ImportError, ValueError, AttributeError):
        return ""
    return f"there is no module {package!r}" if spec is None else ""
