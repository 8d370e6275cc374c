"""The `elastic-agent` command: parse, answer `--help`, `--version`, `--check-config` and the like, or call `run`.

Nothing is decided here: in `agent/configuration`, `options` has the table, `load` reads, `derive` merges and `check`
refuses; `agent/machine/inventory` finds what follows on this machine, `run` does the work and returns the exit code:
of `agent/main` where there is a script, of `pool/daemon` where there is none. A configuration with problems ends with
78, or with 73 where another machine could run it, and the list of all of them, before anything is started.

A *sub-command* does something else than run a job. It is one only as the very first word, so that a script
of that name can still be run, as `./status` or after any option.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import __version__
from .agent.common.exits import ExitCode, lack_in
from .agent.configuration.config import (
    CHECK_CONFIG,
    HELP,
    HELP_ALL,
    PRINT_COMPLETION,
    VERSION,
    ConfigError,
)
from .agent.configuration.derive import Resolved, offers_node, resolve_daemon
from .agent.configuration.load import read_argv
from .agent.configuration.options import (
    COMMANDS,
    NODE_COMMANDS,
    POOL_COMMANDS,
    RUN_COMMANDS,
    bash_completion,
    full_help,
    short_help,
)
from .agent.configuration.settings import comment
from .agent.main.process import write_error_file

if TYPE_CHECKING:
    from .agent.machine.inventory import Machine
    from .agent.main.assembly import Prepared


def main(argv: Sequence[str] | None = None, prepared: Prepared | None = None) -> int:
    """Entry point. Returns the exit code, an `ExitCode`. `prepared`: what this process has ready for an agent."""
    words = sys.argv[1:] if argv is None else argv
    try:
        os.getcwd()
    except FileNotFoundError:
        print("elastic-agent: the current folder was deleted: change to one that is there", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    if words and words[0] in POOL_COMMANDS:
        module = "submit" if words[0] == "submit" else "commands"
        work = getattr(importlib.import_module(f".pool.{module}", __package__), words[0])
        return int(work(words[1:]))
    if words and words[0] in NODE_COMMANDS:
        from .agent.commands import nodes

        return nodes.main(words)
    if words and words[0] in COMMANDS:
        # Imported when it is called: a process that runs a job needs none of them.
        rooms = {"commands.runs": RUN_COMMANDS}
        room = next((room for room, names in rooms.items() if words[0] in names), "commands")
        command = importlib.import_module(f".agent.{room}.{words[0].replace('-', '_')}", __package__)
        return int(command.main(words[1:]))
    try:
        return _run(words, prepared)
    except OSError as error:
        if not (lack := lack_in(error)):
            raise
        print(f"elastic-agent: {lack}", file=sys.stderr)
        write_error_file(os.environ, ExitCode.NOT_HERE, lack, None, time.time())
        return ExitCode.NOT_HERE


def _run(words: Sequence[str], prepared: Prepared | None) -> int:
    """A command line without a sub-command. Raises OSError."""
    command_line = read_argv(words)
    if HELP_ALL in command_line:
        print(full_help())
        return ExitCode.SUCCESS
    if HELP in command_line:
        print(short_help())
        return ExitCode.SUCCESS
    if VERSION in command_line:
        print(f"elastic-agent {__version__}")
        return ExitCode.SUCCESS
    if PRINT_COMPLETION in command_line:
        print(bash_completion(), end="")
        return ExitCode.SUCCESS
    try:
        if offers_node(command_line, os.environ):
            return _daemon(resolve_daemon(command_line, os.environ), only_check=CHECK_CONFIG in command_line)
        from .agent.machine.inventory import prepare  # late, as a command or a daemon needs none of it

        resolved, machine = prepare(command_line, os.environ, _fresh_id)
    except ConfigError as error:
        print(f"elastic-agent: {error}", file=sys.stderr)
        if CHECK_CONFIG not in command_line:
            write_error_file(os.environ, error.code, str(error), None, time.time())
        return error.code
    _warn(resolved)
    if CHECK_CONFIG in command_line:
        print("\n".join(_in_force(resolved, machine)))
        return ExitCode.SUCCESS
    from .agent.main.run import run

    return run(resolved.config, machine, prepared, _in_force(resolved, machine))


def _daemon(resolved: Resolved, *, only_check: bool) -> int:
    """Of a command line without a script. Returns the exit code."""
    _warn(resolved)
    if only_check:
        print("\n".join(resolved.settings.lines()))
        return ExitCode.SUCCESS
    from .pool.daemon import run

    return run(resolved)


def _warn(resolved: Resolved) -> None:
    for warning in resolved.warnings:
        print(f"elastic-agent: warning: {warning}", file=sys.stderr)


def _in_force(resolved: Resolved, machine: Machine) -> list[str]:
    """The settings and, as comments, what follows from them on this machine: a file that means the same."""
    facts = [comment(fact) for fact in machine.facts]
    return [*resolved.settings.lines(), "", comment("What follows from this on this machine:"), *facts]


def _fresh_id() -> str:
    return uuid.uuid4().hex[:12]
