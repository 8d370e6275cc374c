"""This machine as it was found, and what follows from it for this job: examined once, before anything is started.

`resolve` checks the settings by themselves; here they meet the machine, and `prepare` does both. Each folder and module
that finds something out (devices, network, ...) has a step in `inspect_machine`: it returns what it decided, or raises
`ConfigError`, and states what it found in *facts*, sentences that --check-config shows below the settings. The problems
of all steps are reported together.

Invariant: nothing is started, opened or changed here; two calls on the same machine give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...health.checks.finding import NodeNeeds
from ..checkpoints.folder import describe_folder
from ..common.variables import Variable, settle
from ..configuration.config import Config, ConfigError, Problem
from ..configuration.derive import Resolved, resolve
from ..configuration.settings import Settings
from ..configuration.stopping import ladder
from .affinity import CpuShare, probe_cpus, share
from .devices import (
    CURRENT,
    Device,
    Inventory,
    PinnedDevices,
    Software,
    backend_fact,
    find_software,
    pin,
    probe,
    resolve_workers,
)
from .interfaces import TCP, Profile, choose_profile, rdma_ports
from .network import Network, NotReady, discover_network
from .preflight import check_resources, check_target

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the steps decided, and why: it does not change while the agent lives.

    `pinned` and `shares` have an element for each worker, by local rank.
    """

    inventory: Inventory
    pinned: tuple[PinnedDevices, ...]
    shares: tuple[CpuShare, ...]
    network: Network | NotReady
    facts: tuple[str, ...] = ()
    software: Software = CURRENT
    profile: Profile = TCP

    @property
    def workers(self) -> int:
        return len(self.pinned)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Those that the workers use, as NVML knows them."""
        return _nvml_names(self.pinned, self.inventory)

    def gpus_of(self, local_rank: int) -> frozenset[str]:
        """Those that this worker may use, as NVML knows them."""
        return frozenset(device.nvml_name for device in self.devices_of(local_rank))

    def devices_of(self, local_rank: int) -> tuple[Device, ...]:
        """All, where the worker chooses for itself."""
        return self.pinned[local_rank].devices or self.inventory.cuda

    def variables(self, local_rank: int) -> tuple[Variable, ...]:
        """Variables of a worker that follow from the machine."""
        return (*self.shares[local_rank].variables, *self.pinned[local_rank].variables)


def prepare(
    command_line: Settings, environ: Mapping[str, str], fresh_id: Callable[[], str]
) -> tuple[Resolved, Machine]:
    """`resolve` and `inspect_machine`. Raises `ConfigError` with the problems of both."""
    try:
        resolved = resolve(command_line, environ, fresh_id)
    except ConfigError as error:
        problems, config = list(error.problems), error.config
        if config is not None:
            _ask(lambda: inspect_machine(config, environ), problems)
        raise ConfigError(problems) from None
    return resolved, inspect_machine(resolved.config, environ)


def inspect_machine(config: Config, environ: Mapping[str, str], *, resources: bool = True) -> Machine:
    """Raises `ConfigError` with the problems of all steps: print it and end with its code.

    `resources`: what the settings name has to be there.
    """
    problems: list[Problem] = []
    inventory = _ask(lambda: probe(environ), problems)
    pinned = _ask(lambda: _pinned(config, inventory), problems) if inventory is not None else None
    profile = choose_profile(rdma_ports())
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
        _network_fact(config, network),
        f"network profile {profile.transport}: {profile.reason}",
        f"workers use {software}",
        f"backend: {backend_fact(inventory.cuda, software)}",
        f"timeouts of training: {ladder(config.timeouts)}",
    )
    return Machine(inventory, pinned, shares, network, facts, software, profile)


def needs_of(config: Config, machine: Machine) -> NodeNeeds:
    """What the checks of this node look at."""
    choice = machine.network.choice if isinstance(machine.network, Network) else None
    memory = describe_folder(config.memory_checkpoints)
    logs = config.logs.given_directory
    return NodeNeeds(
        ranks=machine.workers * config.nodes.max,
        copies_bytes=memory.limit if memory is not None and config.memory_checkpoints is not None else 0,
        log_directory=str(logs) if logs is not None else "",
        interface=choice.interface if choice is not None else "",
        address=choice.address if choice is not None else "",
        gpus=machine.gpus,
        rdma=bool(machine.profile.ports and machine.inventory.cuda),
    )


def _nvml_names(pinned: Sequence[PinnedDevices], inventory: Inventory) -> tuple[str, ...]:
    """Of the devices that this node's workers use; of all, where they choose for themselves."""
    used = [device for worker in pinned for device in worker.devices] or inventory.cuda
    return tuple(device.nvml_name for device in used)


def _ask(step: Callable[[], T], problems: list[Problem]) -> T | None:
    """What the step answers; None if it found problems instead, so that the other steps still run."""
    try:
        return step()
    except ConfigError as error:
        problems += error.problems
        return None


def _pinned(config: Config, inventory: Inventory) -> tuple[PinnedDevices, ...]:
    per_worker = config.devices_per_worker
    workers = resolve_workers(config.nproc_per_node, per_worker, inventory)
    pinning = config.device_pinning
    return tuple(pin(pinning, local_rank, workers, per_worker, inventory) for local_rank in range(workers))


def _device_facts(
    environ: Mapping[str, str],
    inventory: Inventory,
    pinned: Sequence[PinnedDevices],
    shares: Sequence[CpuShare],
) -> Iterator[str]:
    cuda = [f"{device.entry} ({device.address or 'at an unknown address'})" for device in inventory.cuda]
    yield f"devices: {', '.join(cuda) or 'no CUDA device'}; {inventory.cpus} CPUs"
    for local_rank, (devices, cpus) in enumerate(zip(pinned, shares, strict=True)):
        yield f"worker {local_rank}: {devices.reason}"
        yield f"  {cpus.reason}"
        for variable in settle(environ, cpus.variables):
            yield f"  {variable.name}={variable.value} ({variable.by}: {variable.reason})"


def _network_fact(config: Config, network: Network | NotReady) -> str:
    if isinstance(network, Network):
        return f"network: {network.choice}"
    return f"network: it would wait for {network.missing}: {network.advice}"
