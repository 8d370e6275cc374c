"""`elastic-agent check --nodes N`: nodes meet in the store of a job, try each other out, and all print one report.

One node answers the others, tries them, and measures with its partners. All of it runs in processes of its own, which
end with this one: the server, the file in the checkpoint directory, each try, each all-reduce.
"""

from __future__ import annotations

import contextlib
import platform
import queue
import re
import secrets
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ... import __version__
from ...codec import Invalid, from_plain, plain
from ...health.checks.finding import Finding, Outcome, worst_first
from ...health.checks.pair_findings import MOST_FINDINGS, NodeFacts, Software
from ...health.checks.pair_report import PairsReport
from ...health.checks.pairs import Measurement, NodeResults, Obstacle, ProbeEndpoint, Reach
from ...health.checks.processes import NoAnswer, Probe, ask
from ...rendezvous.errors import RecordInvalid, StoreError, StoreMismatch
from ...rendezvous.store.interface import Store
from ...rendezvous.store.wire import check_of
from ..common.exits import CannotStart, ExitCode
from ..common.kernel_files import read
from ..common.ports import PortError, bind_listener
from ..configuration.config import Config, ConfigError, Problem
from ..machine.inventory import Machine
from ..machine.network import Network, NetworkChoice
from ..rendezvous_io.store_opening import open_store, store_listener
from ..workers.processes.workers import job_python
from .check_stages import CheckStore, JoinWait, LeaderGone, Stage, StageDriver


class CannotCheck(Exception):
    """There is no report; the text has the reason and what to try."""

    def __init__(self, code: ExitCode, reason: str) -> None:
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
            facts = describe(name, machine, network.choice, sockets, findings)
            local = LocalNode(facts, sockets, "", environ)
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
        raise CannotCheck(error.code, str(error)) from error
    except (PortError, NoAnswer) as error:
        raise CannotCheck(ExitCode.NOT_HERE, str(error)) from error
    except (StoreMismatch, RecordInvalid) as error:
        raise CannotCheck(ExitCode.MISMATCH, str(error)) from error
    except (StoreError, LeaderGone) as error:
        raise CannotCheck(ExitCode.NO_ANSWER, str(error)) from error


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
            if hosts or error.code is not ExitCode.MISMATCH:
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


# --- This node's part

SERVES_S = 10.0
FILE_S = 5.0
REACH_S = 15.0
"""A try takes 5 s at most, and there are 64 at once."""
MEASURE_S = 25.0
ALL_REDUCE_S = 60.0
"""Both import torch while they measure. A busy machine, or a file system over the network, takes long for that."""
END_S = 2.0


@dataclass(frozen=True, slots=True)
class Sockets:
    """Bound and listening, so that no other process can take them: the server's, and that of an all-reduce's store."""

    probes: socket.socket
    all_reduce: socket.socket

    def close(self) -> None:
        self.probes.close()
        self.all_reduce.close()


def bind_sockets(config: Config, address: str) -> Sockets:
    """On ports that the configuration allows. Raises PortError."""
    ports = config.port_range or 0
    probes = bind_listener(address, ports, "check")
    try:
        return Sockets(probes, bind_listener(address, ports, "all-reduce of a check"))
    except BaseException:
        probes.close()
        raise


def describe(
    name: str,
    machine: Machine,
    choice: NetworkChoice,
    sockets: Sockets,
    findings: Sequence[Finding],
) -> NodeFacts:
    """`findings` are those of this node's own checks."""
    software = machine.software
    request_token, reply_token = secrets.token_hex(16), secrets.token_hex(16)
    bad = [finding for finding in worst_first(findings) if finding.outcome is not Outcome.OK]
    return NodeFacts(
        node=name,
        life=uuid.uuid4().hex[:12],
        endpoint=ProbeEndpoint(
            name, choice.address, sockets.probes.getsockname()[1], request_token, reply_token
        ),
        all_reduce_port=sockets.all_reduce.getsockname()[1],
        machine=read("/proc/sys/kernel/random/boot_id").strip()[:64],
        interface=choice.interface,
        speed_mbps=choice.speed_mbps or 0,
        mtu=choice.mtu,
        rdma_ports=len(choice.rdma),
        gpus=len(machine.inventory.cuda),
        software=Software(
            agent=__version__,
            python=platform.python_version(),
            torch=(software.torch or "")[:64],
            nccl=(software.nccl or "")[:64] if software.has_nccl else "",
            driver=_driver(read("/proc/driver/nvidia/version")),
        ),
        findings=tuple(bad[:MOST_FINDINGS]),
    )


def _driver(text: str) -> str:
    """
    >>> _driver("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build")
    '580.95.05'
    """
    found = re.search(r"\b\d{3,4}\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""


class LocalNode:
    """This node's part: its server for probes, its file in the checkpoint directory, its tries. Close it in the end."""

    def __init__(
        self, facts: NodeFacts, sockets: Sockets, directory: str, environ: Mapping[str, str]
    ) -> None:
        """`directory` is where the script keeps its checkpoints; empty: not known. `environ` is the workers',
        without what is secret."""
        self.facts, self._sockets, self._environ = facts, sockets, environ
        self._directory = directory
        self._lasting = contextlib.ExitStack()
        self._stage = contextlib.ExitStack()

    def start(self) -> None:
        """Answer the others from now on, and write the file that they look for. Raises NoAnswer."""
        descriptor = self._sockets.probes.fileno()
        server = Probe("server", environ=self._environ, descriptors=[descriptor])
        self._lasting.callback(server.close)
        server.order({"listener": descriptor, "endpoint": plain(self.facts.endpoint)})
        server.answer(SERVES_S)
        if self._directory:
            holder = Probe("directory", environ=self._environ)
            self._lasting.callback(lambda: holder.end(END_S))
            holder.order({"hold": self._directory})
            # Why there is none, the node's own check of the directory says.
            with contextlib.suppress(NoAnswer, Invalid):
                file = holder.answer(FILE_S).get("file", "")
                self.facts = replace(self.facts, file=file)

    def rename(self, name: str) -> None:
        self.facts = replace(self.facts, node=name, endpoint=replace(self.facts.endpoint, node=name))

    def close(self) -> None:
        self._stage.close()
        self._lasting.close()
        self._sockets.close()

    def carry_out(self, stage: Stage, others: dict[str, NodeFacts]) -> NodeResults:
        self._stage.close()  # what has served a partner of the stage before
        me = self.facts.node
        if stage.what == "reach":
            return self._reach(list(others.values()))
        measured = []
        for first, second in stage.pairs:
            if me == first and second in others:
                measured.append(self._measure(stage, others[second]))
            elif me == second and first in others:
                self._serve_all_reduce(stage, others[first])
        return NodeResults(measured=tuple(measured))

    def _reach(self, others: Sequence[NodeFacts]) -> NodeResults:
        files = {one.file: one.node for one in others if one.file}
        looking = None
        with contextlib.ExitStack() as stack:
            if self._directory and files:
                with contextlib.suppress(NoAnswer):
                    looking = Probe("directory", environ=self._environ)
                    stack.callback(looking.close)
                    looking.order({"look": self._directory, "files": list(files)})
            order = self._order([one.endpoint for one in others], None)
            try:
                answer = ask("client", order, "reached", REACH_S, environ=self._environ)
                reached = tuple(from_plain(Reach, one) for one in answer)
            except NoAnswer as error:
                reached = tuple(Reach(self.facts.node, one.node, Obstacle.OWN, str(error)) for one in others)
            seen: list[str] = []
            if looking is not None:
                with contextlib.suppress(NoAnswer):
                    seen = looking.answer(FILE_S).get("seen", [])
        return NodeResults(reached, seen=tuple(files[file] for file in seen))

    def _measure(self, stage: Stage, other: NodeFacts) -> Measurement:
        with contextlib.ExitStack() as stack:
            partner = self._all_reduce(other)
            if partner is not None:
                stack.callback(partner.close)
            try:
                order = self._order([other.endpoint], stage.round)
                answer = ask("client", order, "measured", MEASURE_S, environ=self._environ)
                found = from_plain(Measurement, answer)
            except NoAnswer as error:
                return Measurement(stage.round, self.facts.node, other.node, Obstacle.OWN, str(error))
            if partner is None or found.obstacle is not None:
                return found
            partner.order(self._all_reduce_order(stage, 1, other, other))
            try:
                answer = partner.answer(ALL_REDUCE_S)
            except NoAnswer as error:
                return replace(found, all_reduce_problem=f"it hangs or dies: {error}"[:512])
        if "missing" in answer:
            return found
        if "seconds" in answer:
            return replace(found, all_reduce_s=answer["seconds"])
        return replace(found, all_reduce_problem=str(answer.get("problem"))[:512])

    def _serve_all_reduce(self, stage: Stage, other: NodeFacts) -> None:
        """The other one comes when it has measured; until the stage is over."""
        probe = self._all_reduce(other, descriptors=[self._sockets.all_reduce.fileno()])
        if probe is not None:
            self._stage.callback(probe.close)
            probe.order(self._all_reduce_order(stage, 0, other, self.facts))

    def _all_reduce(self, other: NodeFacts, descriptors: Sequence[int] = ()) -> Probe | None:
        """None where one of the two has no torch."""
        if not (self.facts.software.torch and other.software.torch):
            return None
        with contextlib.suppress(NoAnswer):
            return Probe(
                "all_reduce",
                python=job_python(self._environ),
                environ=self._environ,
                descriptors=descriptors,
            )
        return None

    def _all_reduce_order(
        self, stage: Stage, rank: int, other: NodeFacts, host: NodeFacts
    ) -> dict[str, object]:
        # NCCL refuses two processes on one GPU, as two nodes on one machine may have it.
        apart = self.facts.endpoint.address != other.endpoint.address
        nccl = apart and all(one.gpus and one.software.nccl for one in (self.facts, other))
        return {
            "rank": rank,
            "address": host.endpoint.address,
            "port": host.all_reduce_port,
            "interface": self.facts.interface,
            "key": f"check-{stage.number}",
            "backend": "nccl" if nccl else "gloo",
            "listener": self._sockets.all_reduce.fileno() if rank == 0 else None,
        }

    def _order(self, endpoints: Sequence[ProbeEndpoint], number: int | None) -> dict[str, object]:
        return {
            "me": self.facts.node,
            "address": self.facts.endpoint.address,
            "endpoints": [plain(endpoint) for endpoint in endpoints],
            "round": number,
        }
