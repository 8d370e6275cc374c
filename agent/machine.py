"""This machine as it was found, and what follows from it for this job: examined once, before anything is started.

`resolve` judges the settings by themselves; here they meet the machine. Each room that finds something out (devices,
network, ...) has a step in `examine`: it returns what it decided, or raises `ConfigError`, and says what it found in
*facts*, sentences that --check-config shows below the settings. The problems of all rooms are reported together.

Invariant: nothing is started, opened or changed here; two calls on the same machine give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .config import Config, ConfigError, Problem
from .devices import Inventory, pin, probe, resolve_workers
from .profiles import TCP, Profile, choose_profile
from .software import CURRENT, Software, find_software
from .timeouts import ladder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the rooms decided, and why: it does not change while the agent lives."""

    inventory: Inventory
    workers: int
    facts: tuple[str, ...] = ()
    software: Software = CURRENT
    profile: Profile = TCP


def examine(config: Config, environ: Mapping[str, str]) -> Machine:
    """Raises `ConfigError` with the problems of all rooms: print it and end with `ExitCode.BAD_CONFIG`."""
    problems: list[Problem] = []
    inventory = _ask(lambda: probe(environ), problems)
    workers = _ask(lambda: _workers_that_fit(config, inventory), problems) if inventory is not None else None
    profile = _ask(lambda: choose_profile(config.network_profile, ()), problems)
    if inventory is None or workers is None or profile is None:
        raise ConfigError(problems)
    software = find_software(environ)
    facts = (
        *_device_facts(config, inventory, workers),
        f"network profile {profile.transport}: {profile.reason}",
        f"workers use {software}",
        f"timeouts of training: {ladder(config.timeouts)}",
    )
    return Machine(inventory, workers, facts, software, profile)


def _ask(step: Callable[[], T], problems: list[Problem]) -> T | None:
    """What the step answers; None if it found problems instead, so that the other rooms are still asked."""
    try:
        return step()
    except ConfigError as error:
        problems += error.problems
        return None


def _workers_that_fit(config: Config, inventory: Inventory) -> int:
    workers = resolve_workers(config.nproc_per_node, inventory)
    for local_rank in range(workers):
        pin(config.device_pinning, local_rank, workers, inventory)
    return workers


def _device_facts(config: Config, inventory: Inventory, workers: int) -> list[str]:
    devices = ", ".join(device.entry for device in inventory.cuda) or "none"
    facts = [
        f"devices: CUDA {devices}; {inventory.cpus} CPUs; --nproc-per-node makes {workers} workers of them"
    ]
    for local_rank in range(workers):
        facts.append(
            f"worker {local_rank}: {pin(config.device_pinning, local_rank, workers, inventory).reason}"
        )
    return facts
