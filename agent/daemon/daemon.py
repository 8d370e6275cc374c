"""Puts one daemon together, lets it run, and takes it apart."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...pool.member import Assignment, PoolMember
from ...pool.records import PoolNode
from ...rendezvous.store.interface import Store
from ..common.exits import CannotStart
from ..configuration.config import Config
from ..configuration.options import OPTIONS
from ..configuration.reading.settings import Settings
from ..configuration.rendezvous import ENDPOINT
from ..machine.network.discovery import wait_for_network
from ..output.log_folders import own_logs
from ..rendezvous_io.store_link import StoreLink
from ..rendezvous_io.store_opening import open_store, store_listener, store_options
from .job_words import OF_THE_POOL, agent_words
from .loop import DaemonLoop, Ending

log = logging.getLogger(__name__)


def run_daemon(
    config: Config,
    name: str,
    settings: Settings,
    environment: Mapping[str, str],
    events: queue.SimpleQueue[Any],
    on_turn: Callable[[str], None],
) -> Ending:
    """One daemon's whole life. `events` gets this process' signals."""
    clock = time.monotonic
    try:
        network = wait_for_network(config, environment)
        listener = store_listener(config, network.endpoint, network.choice.address, _bind)
        options = tuple(store_options(config, network.endpoint, listener).items())
        store = open_store(config, network.endpoint, listener, events)
    except CannotStart as refusal:
        return Ending(refusal.code, str(refusal))
    logs = config.logs.given_directory or own_logs()
    own = tuple(
        f"--{option.name}={settings[option].text}"
        for option in OPTIONS
        if settings[option].origin.startswith("--") and option.name not in OF_THE_POOL
    )
    rng, lease_ttl_s = random.SystemRandom(), config.rendezvous.lease_ttl_s
    record = PoolNode(name, uuid.uuid4().hex[:12], network.choice.address, most_nodes=config.nodes.max)
    member = PoolMember(record, lease_ttl_s=lease_ttl_s, rng=rng, now=clock(), wall=time.time)
    link = StoreLink(store, lease_ttl_s, events.put, clock, rng)

    def words(assignment: Assignment) -> list[str]:
        return agent_words(assignment, name, options, own, str(logs / assignment.job.job))

    def output(job: str) -> Path:
        return logs / job / f"{name}.log"

    place = dict(options)[ENDPOINT.name]
    log.info("node %s offers itself to pool %s at %s", name, config.rendezvous.job_id, place)
    with contextlib.closing(store):
        link.start()
        ending = DaemonLoop(member, link, words, output, environment, events, clock, on_turn).run()
        link.close()
        _depart(store, member)
    return ending


def _bind(address: str, port: int | None, purpose: str) -> Any:
    raise AssertionError("a pool's store has an endpoint")


def _depart(store: Store, member: PoolMember) -> None:
    try:
        if member.lease is not None:
            store.revoke(member.lease)
    except Exception as error:
        log.warning("left without giving up the lease: %s", error)
