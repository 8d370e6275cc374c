"""`elastic-agent check --nodes N`: nodes meet in the store of a job, try each other out, and all print one report.

Its keys in the job's store are all leased, so that nothing stays of nodes that are killed, and the job sees none:

    check/nodes/NODE            what a node says about itself (`NodeFacts`); the oldest one leads
    check/stage                 the number of what all do now, and who is there, written by the one that leads
    check/results/STAGE/NODE    what a node has found out in that stage
    check/report                what all print in the end

In stage 0 each node tries to reach the others; then follow the rounds of all-reduces. A node that ends is left out from
then on. When the leader ends, the others say so: nothing of theirs is lost but time.
"""

from __future__ import annotations

import contextlib
import platform
import queue
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from ... import __version__
from ...codec import Checked, Count, Document, Invalid
from ...health.checks.finding import Finding, Outcome, worst_first
from ...health.checks.pair_probes import AllReduceOrder, all_reduce, reach, serve
from ...health.checks.pairs import (
    AllReduce,
    CheckResults,
    Node,
    NodeFacts,
    NodeResults,
    PairsReport,
    make_report,
    pair_of,
    rounds,
    tried_by,
)
from ...rendezvous.errors import LeaseExpired, RecordInvalid, StoreError, StoreMismatch, StoreUnavailable
from ...rendezvous.store.interface import Compare, Entry, Put, ScopedStore, Store
from ...rendezvous.store.wire import check_of
from ...threads import Thread
from ..common.exits import CannotStart, ExitCode
from ..common.ports import PortError, bind_listener
from ..configuration.config import Config, ConfigError, Problem
from ..machine.inventory import Machine
from ..machine.network import Network
from ..rendezvous_io.store_opening import open_store, quiet_torch, store_listener
from ..workers.processes.helper import job_python
from ..workers.processes.proc import read

_T = TypeVar("_T")


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
    wanted: int,
    wait_s: float,
    environ: Mapping[str, str],
    show: Callable[[str], None],
) -> PairsReport:
    """The report that all `wanted` nodes have, or those that came within `wait_s`. `findings` are those of this node's
    own checks. Raises CannotStart."""
    network = machine.network
    assert isinstance(network, Network), "the caller has waited for it"
    rendezvous = replace(config.rendezvous, join_timeout_s=max(1.0, wait_s))
    config = replace(config, rendezvous=rendezvous)
    try:
        with contextlib.ExitStack() as parts:
            local = LocalNode(name, config, machine, network, findings, environ)
            parts.callback(local.close)
            store, hosts = _open_store(config, network, show)
            parts.callback(store.close)
            check_store = CheckStore(store, rendezvous.lease_ttl_s)
            parts.callback(check_store.leave)
            if not check_store.join(local.facts):  # there is one of this name
                local.facts = replace(local.facts, node=f"{name[:115]}-{local.facts.life}")
                check_store.join(local.facts)
            check = NodesCheck(check_store, local, wanted, wait_s, show)
            report = check.run()
            check_store.leave()
            if hosts:
                check.await_others()
            return report
    except PortError as error:
        raise CannotStart(ExitCode.NOT_HERE, str(error)) from error
    except (StoreMismatch, RecordInvalid) as error:
        raise CannotStart(ExitCode.MISMATCH, str(error)) from error
    except (StoreError, LeaderGone) as error:
        raise CannotStart(ExitCode.NO_ANSWER, str(error)) from error


def _open_store(config: Config, network: Network, show: Callable[[str], None]) -> tuple[Store, bool]:
    """That of a check that another node hosts, or that of the job, which runs; and whether this node hosts it."""
    listener = store_listener(config, network.endpoint, network.address)
    hosts, rendezvous = listener is not None, config.rendezvous
    where = ", ".join(map(str, rendezvous.endpoints))
    quiet_torch()
    show(f"this node hosts the store at {where}" if hosts else f"looking for the store at {where}")
    if rendezvous.may_host:
        # As a store that ends with this check: an agent of the job does not take it for its own.
        own = replace(config, rendezvous=replace(rendezvous, job_id=check_of(rendezvous.job_id)))
        try:
            return open_store(own, network.endpoint, listener, queue.SimpleQueue()), hosts
        except CannotStart as error:
            if hosts or error.code is not ExitCode.MISMATCH:
                raise
    return open_store(config, network.endpoint, listener, queue.SimpleQueue()), hosts


# --- This node's part


class LocalNode:
    """Answers the others until it is closed, and tries them."""

    def __init__(
        self,
        name: str,
        config: Config,
        machine: Machine,
        network: Network,
        findings: Sequence[Finding],
        environ: Mapping[str, str],
    ) -> None:
        """`findings` are those of this node's own checks, `environ` is the workers'. Raises PortError."""
        software, self._environ = machine.software, environ
        self._sockets = contextlib.ExitStack()
        with self._sockets:  # closed, should the second one fail
            ports = config.port_range or 0
            probes = self._sockets.enter_context(bind_listener(network.address, ports, "check"))
            self._store = self._sockets.enter_context(
                bind_listener(network.address, ports, "all-reduce of a check")
            )
            self._sockets = self._sockets.pop_all()
        traits = {
            "MTU": f"{network.mtu}",
            "link speed": f"{network.speed_mbps} Mbit/s" if network.speed_mbps else "",
            "number of RDMA ports": f"{len(network.rdma_ports)}",
            "address family": network.family,
            "version of elastic-agent": __version__,
            "version of Python": platform.python_version(),
            "torch": software.torch or "none",
            "NCCL": (software.nccl or "") if software.has_nccl else "",
            "NVIDIA driver": [*read("/proc/driver/nvidia/version").split("  "), ""][1],
            "number of GPUs": f"{len(machine.inventory.cuda)}",
        }
        bad = [finding for finding in worst_first(findings) if finding.outcome is not Outcome.OK]
        self.facts = NodeFacts(
            node=name,
            life=uuid.uuid4().hex[:12],
            address=network.address,
            port=probes.getsockname()[1],
            token=secrets.token_hex(32),
            store_port=self._store.getsockname()[1],
            machine=read("/proc/sys/kernel/random/boot_id").strip()[:64],
            interface=network.interface,
            traits={trait: value[:64] for trait, value in traits.items() if value},
            findings=tuple(bad[:32]),
        )
        self._sockets.callback(lambda: probes.shutdown(socket.SHUT_RDWR))
        Thread(lambda: serve(probes, self.facts.token), "check-server").start()

    def close(self) -> None:
        self._sockets.close()

    def reach(self, others: Sequence[NodeFacts]) -> NodeResults:
        return NodeResults(tuple(other.node for other in others), reach(self.facts.address, others))

    def all_reduce(self, number: int, other: NodeFacts) -> NodeResults:
        """At the same time as `other`; the first of the two hosts the store."""
        here = self.facts
        if not (here.has_torch and other.has_torch):
            return NodeResults()
        first = pair_of(here.node, other.node)[0] == here.node
        host = here if first else other
        # NCCL refuses two processes on one GPU, as two nodes on one machine may have it.
        apart = here.address != other.address
        nccl = apart and all(
            one.traits["number of GPUs"] != "0" and "NCCL" in one.traits for one in (here, other)
        )
        order = AllReduceOrder(
            rank=0 if first else 1,
            address=host.address,
            port=host.store_port,
            interface=here.interface,
            key=f"check-{number}",
            backend="nccl" if nccl else "gloo",
            listener=self._store.fileno() if first else None,
        )
        rate, problem = all_reduce(order, job_python(self._environ), self._environ)
        return NodeResults(all_reduce=AllReduce(other.node, rate, problem))


# --- The keys

PREFIX = "check/"
NODES, RESULTS, STAGE, REPORT = "nodes/", "results/", "stage", "report"
SCHEMA = 3
MOST_CHARS = 1 << 20
"""Less than a store takes in one request."""
OUTAGE_S = 20.0
"""For how long a store that does not answer is asked again."""
PAUSE_S = 0.25
CONFIRMS_PER_TTL = 4


@dataclass(frozen=True, slots=True)
class Stage(Checked):
    """What all of these nodes do now, each with its life; the first one leads."""

    number: Count
    members: dict[Node, Node]


_FACTS = Document(NodeFacts, SCHEMA, MOST_CHARS)
STAGES = Document(Stage, SCHEMA, MOST_CHARS)
_RESULTS = Document(NodeResults, SCHEMA, MOST_CHARS)
_REPORT = Document(PairsReport, SCHEMA, MOST_CHARS)


class CheckStore:
    """The keys of a check, as one node reads and writes them. All methods raise StoreError, LeaseExpired when this node
    was too slow to keep its place, and RecordInvalid for what no node of this version has written."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store, self._ttl_s = ScopedStore(store, PREFIX), ttl_s
        self._lease: int | None = None
        self._over = threading.Event()
        self._lost: Exception | None = None

    def join(self, facts: NodeFacts) -> bool:
        """False when another one of this name is there."""
        if self._lease is None:
            self._lease = self._asked(lambda: self._store.grant(self._ttl_s))
            Thread(self._keep, "check-lease").start()
        key = NODES + facts.node
        put = Put(key, _FACTS.encode(facts), self._lease)

        def once() -> bool:
            outcome = self._store.transact((Compare(key, 0),), (put,))
            (entry,) = outcome.entries
            return outcome.succeeded or (entry is not None and entry.value == put.value)

        return self._asked(once)

    def leave(self) -> None:
        """With all that this node has written. Never raises."""
        self._over.set()
        lease, self._lease = self._lease, None
        if lease is not None:
            with contextlib.suppress(StoreError):
                self._store.revoke(lease)

    def oldest(self) -> str | None:
        """The name of the node that leads, as long as it lives."""
        entries = self._asked(lambda: self._store.read((), NODES)).entries
        return entries[0].key.removeprefix(NODES) if entries else None

    def present(self, names: Iterable[str] = ("",)) -> dict[str, NodeFacts]:
        """Those of these nodes that are here now, by name; all by default."""
        found = [_read(_FACTS, entry) for entry in self._entries(*(NODES + name for name in names))]
        return {facts.node: facts for facts in found}

    def stage(self) -> Stage | None:
        return next((_read(STAGES, entry) for entry in self._entries(STAGE)), None)

    def report(self) -> PairsReport | None:
        return next((_read(_REPORT, entry) for entry in self._entries(REPORT)), None)

    def results(self, number: int) -> dict[str, NodeResults]:
        """By node."""
        under = f"{RESULTS}{number}/"
        return {entry.key.removeprefix(under): _read(_RESULTS, entry) for entry in self._entries(under)}

    def put(self, key: str, document: Document[_T], value: _T) -> None:
        assert self._lease is not None, "only a node that has joined writes"
        put = Put(key, document.encode(value), self._lease)
        self._asked(lambda: self._store.transact((), (put,)))

    def _entries(self, *scopes: str) -> Sequence[Entry]:
        return self._asked(lambda: self._store.read(scopes)).entries if scopes else ()

    def _asked(self, question: Callable[[], _T]) -> _T:
        """All questions may be asked twice."""

        def once() -> _T:
            if self._lost is not None:
                raise LeaseExpired(f"this node did not keep its place in the store: {self._lost}")
            return question()

        again = retry_if_exception_type(StoreUnavailable)
        stop = stop_after_delay(OUTAGE_S)
        return Retrying(retry=again, stop=stop, wait=wait_fixed(PAUSE_S), reraise=True)(once)

    def _keep(self) -> None:
        lease = self._lease
        while lease is not None and not self._over.wait(self._ttl_s / CONFIRMS_PER_TTL):
            try:
                self._store.keep_alive(lease)
            except StoreUnavailable:
                continue
            except StoreError as error:
                self._lost = error
                return


def _read(document: Document[_T], entry: Entry) -> _T:
    try:
        return document.decode(entry.value)
    except Invalid as error:
        raise RecordInvalid(PREFIX + entry.key, str(error)) from error


# --- The stages

STAGE_S = 120.0
"""No stage takes longer where all that is tried is bounded; a later node is left out."""
LEAVE_S = 10.0
LOOK_S = 0.1
LOOK_PER_NODE_S = 0.001
"""Thousands ask one store."""


class LeaderGone(Exception):
    """The node that led the check has ended or hangs; the text names it."""


class NodesCheck:
    """Takes one node, which has joined, through the stages; if it is the oldest one, it leads."""

    def __init__(
        self, store: CheckStore, local: LocalNode, wanted: int, wait_s: float, show: Callable[[str], None]
    ) -> None:
        self._store, self._local, self._show = store, local, show
        self._wanted, self._wait_s = wanted, wait_s
        self._me = local.facts.node
        self._look_s = LOOK_S + LOOK_PER_NODE_S * wanted
        self._names: tuple[str, ...] = ()
        """Of all nodes, in the order that the rounds follow from."""

    def run(self) -> PairsReport:
        """Raises LeaderGone, and what a `CheckStore` does."""
        done, leader, busy = -1, "", False
        patient_s = self._wait_s + STAGE_S
        until = time.monotonic() + patient_s
        while time.monotonic() < until:
            stage = self._store.stage()
            if stage is None and done >= 0:
                raise LeaderGone(
                    f"node {leader} led this check and ended in the middle of it: look there first"
                )
            if stage is None:
                leader = self._store.oldest() or ""
                if leader == self._me:
                    return self._lead()
            elif stage.members.get(self._me) != self._local.facts.life:
                if not busy:
                    self._show(
                        "another check is under way with this store and --rdzv-id: waiting for its end"
                    )
                busy = True
            elif stage.number > done:
                done, leader = stage.number, next(iter(stage.members))
                self._carry_out(stage)
                until = time.monotonic() + patient_s
            elif (report := self._store.report()) is not None:
                return report
            time.sleep(self._look_s)
        raise LeaderGone(
            f"nothing new for {patient_s:g} s: node {leader or 'that leads'} hangs; end it there"
        )

    def await_others(self) -> None:
        """Waits until the others have left, at most `LEAVE_S`: they still need the store that this node hosts, or the
        report. A host that does not lead has left by then, so that it and the leader do not wait for each other."""
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until and set(self._store.present()) - {self._me}:
            time.sleep(self._look_s)

    def _carry_out(self, stage: Stage) -> None:
        there = [*stage.members]
        self._names = self._names or tuple(there)
        others: Sequence[str] = tried_by(self._me, there)
        if stage.number > 0:
            pairs = [*rounds(self._names)][stage.number - 1]
            others = [name for pair in pairs if self._me in pair for name in pair if name != self._me]
        facts = [*self._store.present(set(others).intersection(there)).values()]
        results = NodeResults()
        if stage.number == 0:
            results = self._local.reach(facts)
        elif facts:
            results = self._local.all_reduce(stage.number, facts[0])
        self._store.put(f"{RESULTS}{stage.number}/{self._me}", _RESULTS, results)

    # --- The leader

    def _lead(self) -> PairsReport:
        nodes = self._gather()
        found = CheckResults(self._wanted, nodes)
        if len(nodes) > 1:
            self._show(f"{len(nodes)} nodes are here; each tries to reach others")
            for number in range(1 + len([*rounds([node.node for node in nodes])])):
                if number > 0:
                    self._show(f"round {number}: pairs do an all-reduce")
                self._stage(found, number)
        report = make_report(found)
        self._store.put(REPORT, _REPORT, report)
        self.await_others()
        return report

    def _gather(self) -> tuple[NodeFacts, ...]:
        """This node first, the others by name."""
        wanted, until = self._wanted, time.monotonic() + self._wait_s
        shown: set[str] = set()
        while True:
            nodes = self._store.present()
            if set(nodes) != shown:
                shown = set(nodes)
                self._show(f"{len(nodes)} of {wanted} nodes are here: {', '.join(sorted(nodes)[:16])}")
            if len(nodes) >= wanted or time.monotonic() >= until:
                return (self._local.facts, *(nodes[name] for name in sorted(nodes) if name != self._me))
            time.sleep(self._look_s)

    def _stage(self, found: CheckResults, number: int) -> None:
        """All do it, and this one gathers what they find."""
        lives = {one.node: one.life for one in found.nodes if one.node not in found.gone}
        until = time.monotonic() + STAGE_S
        stage = Stage(number, lives)
        self._store.put(STAGE, STAGES, stage)
        self._carry_out(stage)
        while True:
            given, present = self._store.results(number), self._store.present()
            late = time.monotonic() >= until
            for name in set(lives) - set(given):
                if late or name not in present or present[name].life != lives[name]:
                    found.gone[name] = f"in round {number}" if number else "as they tried to reach each other"
            if set(lives) <= {*given, *found.gone}:
                break
            time.sleep(self._look_s)
        found.given += [(name, results) for name, results in given.items() if name in lives]
