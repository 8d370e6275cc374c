"""One node's part in a check of several, put together: its sockets, its place in the store, its report."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ....health.checks.finding import Finding
from ....health.checks.pairs.report import PairsReport
from ....health.checks.processes import NoAnswer
from ....rendezvous.errors import RecordInvalid, StoreError, StoreMismatch
from ....rendezvous.store.interface import Store
from ....rendezvous.store.wire import check_of
from ...common.exits import CannotStart, CommandCode, ExitCode
from ...common.ports import PortError, bind_listener
from ...configuration.config import Config, ConfigError, Problem
from ...machine.inventory import Machine
from ...machine.network import Network
from ...rendezvous_io.store_opening import open_store, store_listener
from .check_store import CheckStore
from .local_node import LocalNode, bind_sockets, describe
from .stages import JoinWait, LeaderGone, StageDriver

_CODES = {
    ExitCode.STORE_MISMATCH: CommandCode.MISMATCH,
    ExitCode.STORE_LOST: CommandCode.NO_ANSWER,
    ExitCode.BAD_CONFIG: CommandCode.BAD_CONFIG,
}


class CannotCheck(Exception):
    """There is no report; the text has the reason and what to try."""

    def __init__(self, code: CommandCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def check_meeting_place(config: Config) -> None:
    """Raises ConfigError when the nodes do not know where to meet."""
    if config.rendezvous.kind.port is None or not config.rendezvous.endpoints:
        advice = "add --rdzv-endpoint as the agents of the job have it, the same on all nodes"
        raise ConfigError([Problem("rdzv-endpoint", None, "the store where the nodes meet", advice)])


def check_nodes(
    config: Config,
    machine: Machine,
    name: str,
    findings: Sequence[Finding],
    join_wait: JoinWait,
    environ: Mapping[str, str],
    show: Callable[[str], None],
) -> PairsReport:
    """The report that every node has. `findings` are those of this node's own checks. Raises CannotCheck."""
    network = machine.network
    assert isinstance(network, Network), "the caller has waited for it"
    rendezvous = replace(config.rendezvous, join_timeout_s=max(1.0, join_wait.wait_s))
    config = replace(config, rendezvous=rendezvous)
    try:
        with contextlib.ExitStack() as parts:
            sockets = bind_sockets(config, network.choice.address)
            facts = describe(name, join_wait.wanted, machine, network.choice, sockets, findings)
            local = LocalNode(facts, sockets, config.check_directory or "", environ)
            parts.callback(local.close)
            local.start()
            store, hosts = _open_store(config, network, show)
            parts.callback(store.close)
            check_store = CheckStore(store, rendezvous.lease_ttl_s)
            parts.callback(lambda: _left(check_store))
            _join(check_store, local)
            check = StageDriver(check_store, local, join_wait, show)
            report = check.run()
            _left(check_store)
            if hosts:
                check.await_others()
            return report
    except CannotStart as error:
        raise CannotCheck(_CODES.get(error.code, CommandCode.CANNOT), str(error)) from error
    except (PortError, NoAnswer) as error:
        raise CannotCheck(CommandCode.CANNOT, str(error)) from error
    except (StoreMismatch, RecordInvalid) as error:
        raise CannotCheck(CommandCode.MISMATCH, str(error)) from error
    except (StoreError, LeaderGone) as error:
        raise CannotCheck(CommandCode.NO_ANSWER, str(error)) from error


def _open_store(config: Config, network: Network, show: Callable[[str], None]) -> tuple[Store, bool]:
    """That of a check that another node hosts, or that of the job, which runs; and whether this node hosts it."""

    def bind(address: str, port: int | None, purpose: str) -> socket.socket:
        return bind_listener(address, port or config.port_range or 0, purpose)

    listener = store_listener(config, network.endpoint, network.choice.address, bind)
    where = ", ".join(map(str, config.rendezvous.endpoints))
    show(
        f"this node hosts the store at {where}"
        if listener is not None
        else f"looking for the store at {where}"
    )
    hosts, rendezvous = listener is not None, config.rendezvous
    if rendezvous.may_host:
        # As a store that ends with this check: an agent of the job does not take it for its own.
        own = replace(config, rendezvous=replace(rendezvous, job_id=check_of(rendezvous.job_id)))
        try:
            return open_store(own, network.endpoint, listener, queue.SimpleQueue()), hosts
        except CannotStart as error:
            if hosts or error.code is not ExitCode.STORE_MISMATCH:
                raise
    return open_store(config, network.endpoint, listener, queue.SimpleQueue()), hosts


def _join(check_store: CheckStore, local: LocalNode) -> None:
    """Under another name, when there is one of its name."""
    if not check_store.join(local.facts):
        local.rename(f"{local.facts.node[:115]}-{local.facts.life}")
        check_store.join(local.facts)


def _left(check_store: CheckStore) -> None:
    with contextlib.suppress(StoreError):
        check_store.leave()
