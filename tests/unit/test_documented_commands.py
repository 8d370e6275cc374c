"""Command lines of `elastic-agent` in README and documents: each is one that the command takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from elastic_agent.agent.commands.check import OWN_OPTIONS as CHECK_OPTIONS
from elastic_agent.agent.commands.control import REASON, TIMEOUT
from elastic_agent.agent.commands.report import REPORT_OPTIONS
from elastic_agent.agent.commands.runs import DIAGNOSE_OPTIONS, EVENTS_OPTIONS
from elastic_agent.agent.commands.status import STATUS_OPTIONS
from elastic_agent.agent.configuration.load import read_argv
from elastic_agent.cli import COMMANDS
from elastic_agent.pool import commands as pool_commands

from .test_links import PAGES, ROOT

STARTERS = re.compile(r"(\$ |sudo (-u \S+ )?|srun (-\S+ )*|[A-Z_]+=\S+ )*")
"""What may stand before the program."""
OF_SUBCOMMANDS = {
    "check": CHECK_OPTIONS,
    "status": STATUS_OPTIONS,
    "exclude": [REASON, TIMEOUT],
    "readmit": [],
    "events": EVENTS_OPTIONS,
    "report": REPORT_OPTIONS,
    "diagnose": DIAGNOSE_OPTIONS,
    "submit": [pool_commands.NAME, pool_commands.ENV, pool_commands.DIRECTORY],
    "jobs": [pool_commands.JSON],
    "logs": [pool_commands.FOLLOW],
    "wait": [],
    "cancel": [],
}
WITH_SUBJECT = (
    "exclude",
    "readmit",
    "events",
    "report",
    "diagnose",
    "logs",
    "wait",
    "cancel",
)


def commands(page: Path) -> Iterator[str]:
    """Those in blocks of code, each as one line."""
    text = page.read_text().replace("\\\n", " ")
    fenced = re.findall(r"^ *```(?:bash|sh|console)?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    .*$", text, re.MULTILINE)
    for line in (*"\n".join(fenced).splitlines(), *indented):
        begun = line.strip()
        command = begun[STARTERS.match(begun).end() :]  # type: ignore[union-attr]
        if re.match(r"(\S*/)?elastic-agent( |$)", command) and "[" not in command:
            yield command


FOUND = [(page, command) for page in PAGES for command in commands(page)]


def test_there_are_many() -> None:
    assert len(FOUND) >= 30
    assert {page.name for page, _ in FOUND} >= {
        "README.md",
        "deploy.md",
        "pool.md",
        "status.md",
    }


def problems(words: Sequence[str]) -> list[str]:
    """Of what such a command line says, whatever the machine lacks."""
    name = words[0] if words else ""
    if name in COMMANDS:
        subject = int(name in WITH_SUBJECT)
        given = read_argv(words[1 + subject :], OF_SUBCOMMANDS[name])
        return [*map(str, given.problems), *given.warnings]
    given = read_argv(words)
    return [*map(str, given.problems), *given.warnings]


def test_what_is_not_taken_is_noticed() -> None:
    for wrong in (
        ["--frobnicate", "train.py"],
        ["status", "--rdzv-endpoint"],
    ):
        assert problems(wrong)


@pytest.mark.parametrize(
    "command", [pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}") for page, command in FOUND]
)
def test_a_documented_command_line_is_one_that_is_taken(command: str) -> None:
    words = shlex.split(command.partition(" | ")[0], comments=True)[1:]
    assert problems(words) == []
