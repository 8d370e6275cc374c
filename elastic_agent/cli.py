"""The `elastic-agent` command: parse, answer `--help`, `--version`, `--check-config` and the like, or call `run`.

Nothing is decided here: in `agent/configuration`, `config` has the table of options, `load` reads, `derive` merges and
`check` refuses; `agent/machine/inventory` finds what follows on this machine, `run` does the work and returns the exit
code: of `agent/main` where there is a script, of `pool/daemon` where there is none. A configuration with problems ends
with 78, or with 73 where another machine could run it, and the list of all of them, before anything is started.

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
    CONFIG_FILE,
    GROUPS,
    HELP,
    LOG_DIR,
    MAX_NODES,
    MIN_NODES,
    MODULE,
    NPROC_PER_NODE,
    OPTIONS,
    PRINT_COMPLETION,
    VERSION,
    ConfigError,
)
from .agent.configuration.derive import Resolved, offers_node, resolve_daemon
from .agent.configuration.load import comment, read_argv
from .agent.configuration.parse import Option, OptionSource
from .agent.configuration.rendezvous import ENDPOINT, JOB_ID
from .agent.configuration.stopping import MAX_RESTARTS
from .agent.main.process import write_error_file

if TYPE_CHECKING:
    from .agent.main.assembly import PreparedProcess

COMMANDS = {
    "check": ("agent.commands.check:main", "is this node fit to train? Same options as a run"),
    "status": ("agent.commands.status:main", "how a job is, and why"),
    "exclude": ("agent.commands.control:exclude", "keep a node out of its job, without losing a step"),
    "readmit": ("agent.commands.control:readmit", "let an excluded node back into its job"),
    "submit": ("pool.commands:submit", "put a job into the queue of a pool, of nodes without a script"),
    "jobs": ("pool.commands:jobs", "the jobs of a pool"),
    "wait": ("pool.commands:wait", "until a job of a pool has ended"),
    "logs": ("pool.commands:logs", "what a job of a pool prints, on all its nodes"),
    "cancel": ("pool.commands:cancel", "end a job of a pool"),
    "events": ("agent.commands.runs:events", "the events of a run"),
    "report": ("agent.commands.report:main", "how a run spent its time, and what happened to which node"),
    "diagnose": ("agent.commands.runs:diagnose", "pack the files of a run into one archive, secrets masked"),
}
"""Sub-commands, each with its function, and its line in `--help`."""


def main(argv: Sequence[str] | None = None, prepared: PreparedProcess | None = None) -> int:
    """Entry point. Returns the exit code, an `ExitCode`. `prepared`: what this process has ready for an agent."""
    words = sys.argv[1:] if argv is None else argv
    try:
        os.getcwd()
    except FileNotFoundError:
        print("elastic-agent: the current folder was deleted: change to one that is there", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    if words and words[0] == "--await-job":  # by a daemon, not by people
        return _spare_agent(*words[1:])
    if words and words[0] in COMMANDS:
        # Imported when it is called: a process that runs a job needs none of them.
        module, _, function = COMMANDS[words[0]][0].partition(":")
        return int(getattr(importlib.import_module(f"{__package__}.{module}"), function)(words[1:]))
    try:
        return _run(words, prepared)
    except OSError as error:
        if not (lack := lack_in(error)):
            raise
        print(f"elastic-agent: {lack}", file=sys.stderr)
        write_error_file(os.environ, ExitCode.NOT_HERE, lack, None, time.time())
        return ExitCode.NOT_HERE


def _spare_agent(descriptor: str, preloads: str, store: str) -> int:
    """Becomes the agent of a job when there is one, see `pool/job_agent.py`. `preloads` are words of --preload."""
    # Imported now: `main` imports these two when it knows that it needs them.
    from .agent.machine import inventory as inventory
    from .agent.main import run as run
    from .pool.job_agent import await_job

    job = await_job(int(descriptor), preloads.split(","), store)
    if job is None:
        return ExitCode.SUCCESS
    sys.argv[1:], prepared = job
    return main(sys.argv[1:], prepared)


def _run(words: Sequence[str], prepared: PreparedProcess | None) -> int:
    """A command line without a sub-command. Raises OSError."""
    command_line = read_argv(words)
    if HELP in command_line:
        print(help_text(short=command_line[HELP].origin == HELP.short))
        return ExitCode.SUCCESS
    if VERSION in command_line:
        print(f"elastic-agent {__version__}")
        return ExitCode.SUCCESS
    if PRINT_COMPLETION in command_line:
        print(bash_completion(), end="")
        return ExitCode.SUCCESS
    try:
        if offers_node(command_line, os.environ):
            resolved = resolve_daemon(command_line, os.environ)
            _warn(resolved)
            if CHECK_CONFIG in command_line:
                print("\n".join(resolved.settings.lines()))
                return ExitCode.SUCCESS
            from .pool import daemon

            return daemon.run(resolved)
        from .agent.machine.inventory import prepare  # late, as a command or a daemon needs none of it

        resolved, machine = prepare(command_line, os.environ, lambda: uuid.uuid4().hex[:12])
    except ConfigError as error:
        print(f"elastic-agent: {error}", file=sys.stderr)
        if CHECK_CONFIG not in command_line:
            write_error_file(os.environ, error.code, str(error), None, time.time())
        return error.code
    _warn(resolved)
    # The settings and, as comments, what follows from them on this machine: a file that means the same.
    facts = [comment(fact) for fact in ("What follows from this on this machine:", *machine.facts)]
    in_force = [*resolved.settings.lines(), "", *facts]
    if CHECK_CONFIG in command_line:
        print("\n".join(in_force))
        return ExitCode.SUCCESS
    from .agent.main.run import run

    return run(resolved.config, machine, prepared, in_force)


def _warn(resolved: Resolved) -> None:
    for warning in resolved.warnings:
        print(f"elastic-agent: warning: {warning}", file=sys.stderr)


# --- Help ---

FIRST: tuple[Option[object], ...] = (
    *(MIN_NODES, MAX_NODES, NPROC_PER_NODE, ENDPOINT, JOB_ID, MODULE, MAX_RESTARTS, LOG_DIR),
    *(CONFIG_FILE, CHECK_CONFIG, HELP),
)
"""What most people need first."""

USAGE = """\
usage: elastic-agent [options] SCRIPT [arguments of the script]
       elastic-agent [options] -m MODULE [arguments of the module]
       elastic-agent [options] --no-python PROGRAM [arguments of the program]
       elastic-agent [options]

Runs one job's training processes on this node and, together with the agents of other nodes, keeps the training
going through crashes, lost nodes, joins and planned departures. With nothing to run it waits for jobs: see submit.

As the very first word, instead of a script (one of that name is run as ./NAME); each knows --help:"""

EXAMPLES = """\
Examples:
  elastic-agent --nproc-per-node 2 train.py --lr 0.1
  elastic-agent --min-nodes 1 --max-nodes 4 --rdzv-endpoint node1:29400 train.py
  elastic-agent --config agent.toml --check-config
  elastic-agent --min-nodes 1 --max-nodes 4
  elastic-agent submit --max-nodes 2 -- train.py

Every option can also be given as ELASTIC_AGENT_MIN_NODES=1 in the environment or min-nodes = 1 in the file;
the command line wins over the environment, and the environment over the file. torchrun's spellings work.
"""


def help_text(*, short: bool = False) -> str:
    """All sub-commands, and all options by group with their defaults; `short`: those that most people need first."""
    commands = (f"  {name:<12} {line}" for name, (_, line) in COMMANDS.items())
    parts = [USAGE, *commands, ""]
    if short:
        parts += ["The options that most people need first:", *(option.help_text() for option in FIRST), ""]
        parts += ["--help shows all others: stores and TLS, timeouts, devices, network, logs.", ""]
    for group in () if short else GROUPS:
        parts.append(f"{group.title}:")
        parts += [option.help_text() for option in group if OptionSource.CLI in option.sources]
        parts.append("")
    if not short:
        parts += ["Exit codes:", *(f"  {int(code):>3}  {code.meaning}" for code in ExitCode), ""]
    return "\n".join([*parts, EXAMPLES.rstrip()])


def bash_completion() -> str:
    """Completes options, sub-commands, and files."""
    flags = [f"--{name}" for option in OPTIONS if OptionSource.CLI in option.sources for name in option.names]
    words = " ".join([*dict.fromkeys(flags), *COMMANDS])
    return f'# bash completion for elastic-agent\ncomplete -o default -W "{words}" elastic-agent\n'
