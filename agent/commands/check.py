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
from collections.abc import Iterator, Sequence

from ...codec import plain
from ...health.checks.finding import Finding, Outcome, worst, worst_first
from ...health.checks.node.runner import check_node
from ...health.checks.node.table import wanted
from ..common.exits import CheckCode, ExitCode
from ..configuration.config import HELP, ConfigError
from ..configuration.options import SECRET_VARIABLES
from ..configuration.reading.resolve import resolve_check
from ..configuration.reading.sources import read_argv
from ..configuration.types.option import Group, Source
from ..machine.inventory import inspect_machine, needs_of
from ..machine.network.addresses import unique_node_id
from ..machine.network.choice import NotReady
from .store_command import one_line_errors

SCHEMA = 1
"""Of the JSON form. It grows only by new keys; anything else makes a new number."""

_USAGE = """\
usage: elastic-agent check [--json] [options of a run] [SCRIPT [arguments]]

Checks this node for the job that these options describe: GPUs (NVML, the kernel's log), /dev/shm, the directory of
checkpoints (--check-directory), --log-dir, limits, name resolution, interface, --port-range. Starts nothing and leaves
nothing. All but that of the ports run before each join: see --check in elastic-agent --help-all, and docs/checks.md.
"""

OWN_OPTIONS = Group("check")
JSON = OWN_OPTIONS.flag("json", "one JSON document instead of a table", sources=Source.CLI)

_LEAST_WIDTH, _WIDEST = 60, 120
_RED, _YELLOW, _GREEN, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[0m"
_COLOURS = {Outcome.FAIL: _RED, Outcome.WARN: _YELLOW, Outcome.OK: _GREEN}
_WORDS = {Outcome.FAIL: "FAIL", Outcome.WARN: "WARN", Outcome.UNKNOWN: "?", Outcome.OK: "ok"}
_COUNTED = {Outcome.FAIL: "failed", Outcome.WARN: "to look at", Outcome.UNKNOWN: "unknown", Outcome.OK: "ok"}


def main(words: Sequence[str]) -> int:
    """Returns a `CheckCode`."""
    command_line = read_argv(words, OWN_OPTIONS)
    if HELP in command_line:
        codes = [f"  {int(code):>3}  {code.meaning}" for code in CheckCode]
        print("\n".join([_USAGE, *(option.help_text() for option in OWN_OPTIONS), "", "Exit codes:", *codes]))
        return CheckCode.FIT
    environ = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    try:
        resolved = resolve_check(command_line, os.environ, lambda: "check")
        machine = inspect_machine(resolved.config, environ, resources=False)
    except ConfigError as error:
        print(f"elastic-agent check: {error}", file=sys.stderr)
        return CheckCode.NOT_HERE if error.code is ExitCode.NOT_HERE else CheckCode.BAD_CONFIG
    for warning in resolved.warnings:
        print(f"elastic-agent check: warning: {warning}", file=sys.stderr)
    needs = needs_of(resolved.config, machine)
    began_at = time.monotonic()
    with one_line_errors(CheckCode.INTERRUPTED):
        findings = check_node(wanted(needs, at_join=False), needs, environ)
    if isinstance(machine.network, NotReady):
        missing = f"no network for the job: there is no {machine.network.missing}"
        findings = (*findings, Finding("interface", Outcome.FAIL, missing, machine.network.advice))
    seconds = time.monotonic() - began_at
    name = resolved.config.node_id or unique_node_id().rpartition("-")[0]
    if command_line[JSON].value:
        print(as_json(name, findings, seconds))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else _WIDEST
        colour = terminal and not os.environ.get("NO_COLOR")
        print("\n".join(table(name, findings, seconds, width, colour=colour)))
    return CheckCode.UNFIT if worst(findings) is Outcome.FAIL else CheckCode.FIT


def as_json(node: str, findings: Sequence[Finding], seconds: float) -> str:
    document = {
        "schema": SCHEMA,
        "node": node,
        "outcome": worst(findings).value,
        "seconds": round(seconds, 3),
        "findings": [plain(finding) for finding in worst_first(findings)],
    }
    return json.dumps(document, indent=2)


def table(
    node: str, findings: Sequence[Finding], seconds: float, width: int, *, colour: bool
) -> Iterator[str]:
    """One line for each check, the worst first, and what to do below it."""
    counts = Counter(finding.outcome for finding in findings)
    summary = ", ".join(f"{counts[outcome]} {_COUNTED[outcome]}" for outcome in Outcome if counts[outcome])
    yield f"node {node}: {summary}, in {seconds:.1f} s"
    yield ""
    column = max((len(finding.check) for finding in findings), default=0)
    room = max(_LEAST_WIDTH, min(width, _WIDEST))
    for finding in worst_first(findings):
        word = f"{_WORDS[finding.outcome]:<4}"
        paint = _COLOURS.get(finding.outcome, "") if colour else ""
        begin = f"{word}  {finding.check:<{column}}  "
        rest = " " * len(begin)
        lines = textwrap.wrap(_printable(finding.summary), room - len(begin), break_on_hyphens=False) or [""]
        if finding.advice:
            lines += textwrap.wrap(
                f"-> {_printable(finding.advice)}",
                room - len(begin),
                subsequent_indent="   ",
                break_on_hyphens=False,
            )
        painted = begin.replace(word, f"{paint}{word}{_PLAIN}", 1) if paint else begin
        yield painted + lines[0]
        yield from (rest + line for line in lines[1:])


def _printable(text: str) -> str:
    """On one line, and as nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
