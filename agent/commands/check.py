"""`elastic-agent check`: is this node fit for the job? Takes the options of a run, starts nothing, and leaves nothing.

Each check has a process of its own (`health/checks`), so this ends within seconds, whatever hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...codec import plain
from ...health.checks.finding import Finding, Outcome, worst, worst_first
from ...health.checks.pairs import MOST_NODES, PairsReport
from ...health.checks.runner import checks_for, run_checks
from ...rendezvous.text import counted
from ..common.exits import ExitCode
from ..configuration.config import Config
from ..configuration.derive import resolve
from ..configuration.load import Settings
from ..configuration.parse import NodeCounts, Option, OptionGroup, OptionSource, duration, whole_number
from ..machine.inventory import Machine, inspect_machine, needs_of
from ..machine.network import Network, NotReady, unique_node_id, wait_for_network
from .check_nodes import check_meeting_place, check_nodes
from .command import printable, run_command

SCHEMA = 1
"""Of the JSON form. It grows only by new keys; anything else makes a new number."""

_USAGE = """\
usage: elastic-agent check [--json] [options of a run] [SCRIPT [arguments]]
       elastic-agent check --nodes N --rdzv-endpoint HOST:PORT [--wait SECONDS] [--json] [options of a run]

Checks this node for the job that these options describe: GPUs (NVML, the kernel's log), /dev/shm, --log-dir, limits,
and name resolution. Starts nothing and leaves nothing. The same checks run before each join: see --check in
elastic-agent --help, and docs/checks.md.
With --nodes, started on every node, the nodes meet in the store and try each other out; all print the same report.
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
    "with --nodes: how long to wait for the store, and then for the other nodes",
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
        report = check_nodes(config, machine, name, findings, count, command_line[WAIT].value, environ, _say)
        findings = tuple(one.finding for one in report.findings)
        whole = counted(len(report.nodes), "node")
    seconds = time.monotonic() - began_at
    if command_line[JSON].value:
        print(as_json(name, findings, report, seconds))
    else:
        print("\n".join(table(whole, findings, seconds, shutil.get_terminal_size((_WIDEST, 24)).columns)))
    return ExitCode.FAILED if worst(findings) is Outcome.FAIL else ExitCode.SUCCESS


def _inspect(command_line: Settings, environ: Mapping[str, str]) -> tuple[Config, Machine, Sequence[str]]:
    """The configuration, this machine as the job sees it, and warnings. With --nodes, waits for the network. Raises
    ConfigError and CannotStart."""
    resolved = resolve(command_line, os.environ, lambda: "check", runs=False)
    config, count = resolved.config, command_line[NODES].value
    if count is not None:
        check_meeting_place(config)
        config = replace(config, nodes=NodeCounts(count, count))
    machine = inspect_machine(config, environ, resources=False)
    if count is not None and isinstance(machine.network, NotReady):
        machine = replace(machine, network=wait_for_network(config))
    return config, machine, resolved.warnings


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def as_json(node: str, findings: Sequence[Finding], report: PairsReport | None, seconds: float) -> str:
    """Of several nodes: each finding with the nodes and links that are bad, or with `decided` false, that may be."""
    of: dict[str, object] = {"node": node}
    shown = [plain(finding) for finding in worst_first(findings)]
    if report is not None:
        of = {"nodes": report.nodes, "missing": report.missing}
        shown = [
            {**plain(one.finding), "nodes": one.nodes, "links": one.links, "decided": one.decided}
            for one in report.findings
        ]
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
