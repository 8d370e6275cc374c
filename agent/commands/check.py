"""`elastic-agent check`: is this node fit for the job? Takes the options of a run, and leaves nothing.

Each check has a process of its own (`health/checks`), so this ends within seconds, whatever hangs.

With --nodes it is a job of its own, with one worker on each node, which the agent in this process starts: it has the
store, the names and the time limits of a job, and begins anew without a node that is lost. The workers try each other
(`health/checks/pairs.py`) and tell each other in the job's store, so that not even the node where workers meet has to
be reached:

    check/GENERATION/facts/RANK            what a node says about itself (`NodeFacts`)
    check/GENERATION/ready/ROUND/RANK      it waits for its partner of this round
    check/GENERATION/results/NODE          what it has found out (`NodeResults`)
    check/GENERATION/report                what all print in the end, written by rank 0
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import socket
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...codec import Document, plain
from ...health.checks.finding import Finding, Outcome, worst, worst_first
from ...health.checks.pairs import (
    MOST_NODES,
    ROUNDS,
    AllReduce,
    NodeFacts,
    NodeResults,
    PairsReport,
    all_reduce,
    make_report,
    reach,
    rounds,
    serve,
    tried_by,
)
from ...health.checks.runner import checks_for, run_checks
from ...rendezvous.errors import StoreError
from ...rendezvous.records import NODES_PREFIX, WORLD_KEY, Endpoint
from ...rendezvous.store.interface import MOST_OPERATIONS, Compare, Delete, Put, ScopedStore, Store
from ...rendezvous.store.store_kind import check_of
from ...rendezvous.text import counted
from ...threads import Thread
from ...worker.wire.environment import WorkerEnv
from ..common.exits import CannotDo, ExitCode
from ..common.ports import PortRange, bind_listener
from ..configuration.config import NO_FILES, Command, Config, ConfigError, LogConfig, Problem
from ..configuration.derive import resolve, resolve_meeting_place
from ..configuration.load import ENV_PREFIX, Settings, read_argv
from ..configuration.parse import NodeCounts, Option, OptionGroup, OptionSource, duration, whole_number
from ..configuration.rendezvous import RendezvousConfig
from ..configuration.stopping import TimeoutConfig
from ..machine.inventory import Machine, inspect_machine, needs_of
from ..machine.network import Network, NotReady, unique_node_id, wait_for_network
from ..rendezvous_io.store_opening import store_options
from ..workers.processes.proc import read
from .command import STDOUT, opened, printable, run_command

SCHEMA = 1
"""Of the JSON form. It grows only by new keys; anything else makes a new number."""

_USAGE = """\
usage: elastic-agent check [--json] [options of a run] [SCRIPT [arguments]]
       elastic-agent check --nodes N --rdzv-endpoint HOST:PORT [--wait SECONDS] [--json] [options of a run]

Checks this node for the job that these options describe: GPUs (NVML, the kernel's log), /dev/shm, --log-dir, limits,
and name resolution. Starts nothing and leaves nothing. The same checks run before each join: see --check in
elastic-agent --help, and docs/status.md.
With --nodes, started on every node, it runs a job of its own, whose workers try each other; all print its report.
"""

OWN_OPTIONS = OptionGroup("check")
JSON = OWN_OPTIONS.flag("json", "one JSON document instead of a table", sources=OptionSource.CLI)

NODES: Option[int | None] = OWN_OPTIONS.option(
    "nodes",
    whole_number(1, MOST_NODES, "nodes"),
    "check the network between N nodes, too: start the same command on each of them",
    sources=OptionSource.CLI,
)
WAIT: Option[float] = OWN_OPTIONS.option(
    "wait",
    duration(0.0),
    "with --nodes: how long to wait for another node after the last one that came",
    default="60s",
    sources=OptionSource.CLI,
)

_LEAST_WIDTH, _WIDEST = 60, 120
_WORDS = {Outcome.FAIL: "FAIL", Outcome.WARN: "WARN", Outcome.UNKNOWN: "?", Outcome.OK: "ok"}
_COUNTED = {Outcome.FAIL: "failed", Outcome.WARN: "to look at", Outcome.UNKNOWN: "unknown", Outcome.OK: "ok"}


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    return run_command("check", words, _USAGE, OWN_OPTIONS, _work)


def _work(_: str, command_line: Settings) -> int:
    environ, count = dict(os.environ), command_line[NODES].value
    config, machine, warnings = _inspect(command_line, environ)
    for warning in warnings:
        _say(f"elastic-agent check: warning: {warning}")
    needs = needs_of(config, machine)
    began_at = time.monotonic()
    findings = run_checks(checks_for(needs), needs, environ)
    if isinstance(machine.network, NotReady):
        missing = f"no network for the job: there is no {machine.network.missing}"
        findings = (*findings, Finding("network", Outcome.FAIL, missing, machine.network.advice))
    name = config.node_id or unique_node_id().rpartition("-")[0]
    whole = f"node {name}"
    report: PairsReport | None = None
    if count is not None and isinstance(machine.network, Network):
        facts = facts_of(config.node_id or unique_node_id(), machine, machine.network, findings)
        ended = run_job(config, machine, machine.network.endpoint, facts, command_line[WAIT].value)
        if isinstance(ended, int):
            return ended
        report = ended
        findings, whole = report.findings, counted(len(report.nodes), "node")
    seconds = time.monotonic() - began_at
    if command_line[JSON].value:
        shown = as_json(name, findings, report, seconds)
    else:
        width = shutil.get_terminal_size((_WIDEST, 24)).columns
        shown = "\n".join(table(whole, findings, seconds, width))
    print(shown, flush=True)
    return ExitCode.FAILED if worst(findings) is Outcome.FAIL else ExitCode.SUCCESS


def _inspect(command_line: Settings, environ: Mapping[str, str]) -> tuple[Config, Machine, Sequence[str]]:
    """The configuration, this machine as the job sees it, and warnings. With --nodes, waits for the network. Raises
    ConfigError and CannotStart."""
    resolved = resolve(command_line, os.environ, lambda: "check", runs=False)
    config, count = resolved.config, command_line[NODES].value
    if count is not None:
        if config.rendezvous.kind.port is None or not config.rendezvous.endpoints:
            advice = "add --rdzv-endpoint as the agents of the job have it, the same on all nodes"
            raise ConfigError([Problem("rdzv-endpoint", None, "the store where the nodes meet", advice)])
        config = replace(config, nodes=NodeCounts(count, count))
    machine = inspect_machine(config, environ, resources=False)
    if count is not None and isinstance(machine.network, NotReady):
        wait_s = command_line[WAIT].value
        _say(f"elastic-agent check: waiting up to {wait_s:g} s (--wait) for {machine.network.missing}")
        bounded = replace(config, rendezvous=replace(config.rendezvous, join_timeout_s=wait_s))
        machine = replace(machine, network=wait_for_network(bounded))
    return config, machine, resolved.warnings


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def as_json(node: str, findings: Sequence[Finding], report: PairsReport | None, seconds: float) -> str:
    """Of several nodes: each finding with the nodes and links that are bad, or with `decided` false, that may be."""
    of: dict[str, object] = {"node": node}
    if report is not None:
        of = {"nodes": report.nodes, "missing": report.missing}
    shown = [plain(finding) for finding in worst_first(findings)]
    outcome = worst(findings).value
    document = {"schema": SCHEMA, **of, "outcome": outcome, "seconds": round(seconds, 3), "findings": shown}
    return json.dumps(document, indent=2)


def table(whole: str, findings: Sequence[Finding], seconds: float, width: int) -> Iterator[str]:
    """One line for each check, the worst first, and what to do below it."""
    counts = Counter(finding.outcome for finding in findings)
    summary = ", ".join(f"{counts[outcome]} {_COUNTED[outcome]}" for outcome in Outcome if counts[outcome])
    yield f"{whole}: {summary}, in {seconds:.1f} s"
    yield ""
    column = max((len(finding.check) for finding in findings), default=0)
    room = max(_LEAST_WIDTH, min(width, _WIDEST)) - len(f"FAIL  {'':{column}}  ")
    for finding in worst_first(findings):
        begin = f"{_WORDS[finding.outcome]:<4}  {finding.check:<{column}}  "
        lines = textwrap.wrap(printable(finding.summary), room, break_on_hyphens=False) or [""]
        if finding.advice:
            advice = f"-> {printable(finding.advice)}"
            lines += textwrap.wrap(advice, room, subsequent_indent="   ", break_on_hyphens=False)
        yield begin + lines[0]
        yield from (" " * len(begin) + line for line in lines[1:])


# --- Between nodes: the job

FOLDER = "CHECK_OF_NODES_FOLDER"
"""The variable by which the worker finds its task, and where it leaves the report."""
MOST_CHARS = 1 << 20
"""Less than a store takes in one request."""

_FACTS = Document(NodeFacts, 1, MOST_CHARS)
_RESULTS = Document(NodeResults, 1, MOST_CHARS)
_REPORT = Document(PairsReport, 1, MOST_CHARS)


def facts_of(name: str, machine: Machine, network: Network, findings: Sequence[Finding]) -> NodeFacts:
    """What this node says about itself. `findings` are those of its own checks."""
    software = machine.software
    traits = {
        "MTU": f"{network.mtu}",
        "link speed": f"{network.speed_mbps} Mbit/s" if network.speed_mbps else "",
        "number of RDMA ports": f"{len(network.rdma_ports)}",
        "address family": network.family,
        "version of Python": platform.python_version(),
        "torch": software.torch or "none",
        "NCCL": (software.nccl or "") if software.has_nccl else "",
        "NVIDIA driver": [*read("/proc/driver/nvidia/version").split("  "), ""][1],
        "number of GPUs": f"{len(machine.inventory.cuda)}",
    }
    bad = [finding for finding in worst_first(findings) if finding.outcome is not Outcome.OK]
    return NodeFacts(
        node=name,
        address=network.address,
        machine=read("/proc/sys/kernel/random/boot_id").strip()[:64],
        traits={trait: value[:64] for trait, value in traits.items() if value},
        findings=tuple(bad[:32]),
    )


def run_job(
    config: Config, machine: Machine, endpoint: Endpoint | None, facts: NodeFacts, wait_s: float
) -> PairsReport | int:
    """The report; without one the code with which the agent has ended, which has said why. Raises CannotDo."""
    from ..main.run import run  # late: no other command needs it

    wanted, rendezvous = config.nodes.max, config.rendezvous
    place = replace(
        rendezvous,
        job_id=check_of(rendezvous.job_id),
        join_timeout_s=2 * wait_s + 10.0,
        last_call_s=wait_s,
    )
    job = replace(
        config,
        command=Command("module", "elastic_agent.agent.commands.check"),
        nodes=NodeCounts(1, wanted),
        nodes_multiple_of=1,
        preload=(),
        rendezvous=place,
        node_id=facts.node,
        http_address=None,  # a job that runs here may have it
        check="off",
        max_restarts=2,
        timeouts=TimeoutConfig(hang=None),
        memory_checkpoints=0,
        logs=LogConfig(NO_FILES, level=config.logs.level, format=config.logs.format),
    )
    task = {
        "wanted": wanted,
        "ports": str(config.port_range or ""),
        "store": store_options(job, endpoint, None),
        "facts": _FACTS.encode(facts),
    }
    # The agent makes the standard output of this process its own.
    printed, stderr = open(os.dup(STDOUT), "w", errors="backslashreplace"), sys.stderr  # noqa: SIM115
    with tempfile.TemporaryDirectory(prefix="elastic-agent-check-") as folder:
        Path(folder, "task").write_text(json.dumps(task))
        os.environ[FOLDER] = folder
        _forget(place)
        code = run(job, replace(machine, placed=machine.placed[:1]))
        if code != ExitCode.NO_ANSWER:
            _forget(place)
        sys.stdout, sys.stderr = printed, stderr
        report = Path(folder, "report")
        if report.exists():
            return _REPORT.decode(report.read_text())
    if code == ExitCode.SUCCESS:
        raise CannotDo(ExitCode.LATER, "the other nodes had just ended their check: start it again on all")
    return code


def _forget(place: RendezvousConfig) -> None:
    """What a check has left in a store that outlives it, once no node is there any more."""
    if place.kind.outlives_job:
        with contextlib.suppress(CannotDo, StoreError), opened(place) as store:
            delete_job(store)


def delete_job(store: Store) -> None:
    """Without live nodes. One that joins meanwhile is noticed, because it writes the world: that goes last, and only as
    it was read."""
    entries = sorted(store.read(("",)).entries, key=lambda entry: entry.key == WORLD_KEY)
    if any(entry.key.startswith(NODES_PREFIX) for entry in entries):
        return
    for begin in range(0, len(entries), MOST_OPERATIONS // 2):
        some = entries[begin : begin + MOST_OPERATIONS // 2]
        compares = tuple(Compare(entry.key, entry.mod_revision) for entry in some)
        if not store.transact(compares, tuple(Delete(entry.key) for entry in some)).succeeded:
            return


# --- Between nodes: the worker

STAGE_S = 120.0
"""No stage takes longer (tries to reach the others, each of the rounds): all that is tried is bounded. A later node is
left out."""
LOOK_S = 0.1
LOOK_PER_NODE_S = 0.001
"""Thousands ask one store."""


def work(folder: Path, environ: Mapping[str, str]) -> None:
    """Raises StoreError, PortError, Invalid and TimeoutError: the job begins anew."""
    task = json.loads((folder / "task").read_text())
    facts: NodeFacts = _FACTS.decode(task["facts"])
    words = {ENV_PREFIX + name.upper().replace("-", "_"): text for name, text in task["store"].items()}
    place = resolve_meeting_place(read_argv(()), words)
    assert place is not None, "an endpoint is among the words"
    ports = PortRange.parse(task["ports"]) if task["ports"] else 0
    with contextlib.ExitStack() as parts:
        store = parts.enter_context(opened(place))
        answers = parts.enter_context(bind_listener(facts.address, ports, "check"))
        hosts = parts.enter_context(bind_listener(facts.address, ports, "all-reduce of a check"))
        facts = replace(
            facts,
            port=answers.getsockname()[1],
            token=secrets.token_hex(16),
            store_port=hosts.getsockname()[1],
        )
        parts.callback(answers.shutdown, socket.SHUT_RDWR)
        Thread(lambda: serve(answers, facts.token), "check-server").start()
        generation = ScopedStore(store, f"check/{WorkerEnv.of(environ).generation}/")
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        report = NodesCheck(generation, rank, size, folder / "seen").run(facts, hosts, task["wanted"])
        (folder / "report").write_text(_REPORT.encode(report))


class NodesCheck:
    """What one worker does with the others. `seen` is a file that outlives it: the nodes that it has seen at first."""

    def __init__(self, store: Store, rank: int, size: int, seen: Path) -> None:
        self._store, self._rank, self._size, self._seen = store, rank, size, seen
        self._began_at = time.monotonic()

    def run(self, here: NodeFacts, hosts: socket.socket, wanted: int) -> PairsReport:
        """The report of all; `hosts` is for the store of an all-reduce. Raises StoreError and TimeoutError."""
        if self._seen.exists():
            here = replace(here, seen=tuple(self._seen.read_text().split()))
        ranks = [*map(str, range(self._size))]
        me = ranks[self._rank]
        self._put(f"facts/{me}", _FACTS.encode(here))
        others = self._facts(1, *tried_by(me, ranks))
        if not self._seen.exists():
            self._seen.write_text("\n".join(facts.node for facts in others))
        self._show(f"{counted(self._size, 'node')} are here; each tries to reach others")
        blocked = reach(here.address, others)
        all_reduces: dict[str, AllReduce] = {}
        for number, pairs in enumerate(rounds(ranks), 1):
            self._put(f"ready/{number}/{me}", "")
            self._show(f"round {number}: pairs do an all-reduce")
            for other in {rank for pair in pairs if me in pair for rank in pair} - {me}:
                there = self._get([f"ready/{number}/{other}"], 1, 1 + number)
                for facts in self._facts(0, other) if there else ():
                    if here.has_torch and facts.has_torch:
                        all_reduces[facts.node] = all_reduce(number, here, facts, hosts)
        results = NodeResults(tuple(facts.node for facts in others), blocked, all_reduces)
        self._put(f"results/{here.node}", _RESULTS.encode(results))
        if self._rank == 0:
            self._put("report", _REPORT.encode(self._report(wanted)))
        found = self._get(["report"], 1, 3 + ROUNDS)
        if not found:
            raise TimeoutError("the worker of rank 0 has made no report in time")
        return _REPORT.decode(found["report"])

    def _report(self, wanted: int) -> PairsReport:
        given = self._get(["results/"], self._size, 2 + ROUNDS)
        nodes = map(_FACTS.decode, self._get(["facts/"], self._size, 0).values())
        results = {key.removeprefix("results/"): _RESULTS.decode(text) for key, text in given.items()}
        return make_report(wanted, [*nodes], results)

    def _facts(self, stages: int, *ranks: str) -> list[NodeFacts]:
        """Of those that are there in time."""
        found = self._get([f"facts/{rank}" for rank in ranks], len(ranks), stages)
        return [_FACTS.decode(text) for text in found.values()]

    def _put(self, key: str, text: str) -> None:
        self._store.transact((), (Put(key, text),))

    def _get(self, scopes: Sequence[str], count: int, stages: int) -> dict[str, str]:
        """What is there when there are so many keys, or when so many stages should be over."""
        until = self._began_at + stages * STAGE_S
        while True:
            entries = self._store.read(tuple(scopes)).entries if scopes else ()
            if len(entries) >= count or time.monotonic() >= until:
                return {entry.key: entry.value for entry in entries}
            time.sleep(LOOK_S + LOOK_PER_NODE_S * self._size)

    def _show(self, line: str) -> None:
        if self._rank == 0:
            _say(line)


if __name__ == "__main__":
    work(Path(os.environ[FOLDER]), os.environ)
