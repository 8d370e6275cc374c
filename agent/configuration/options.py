"""All options: the table that the command line, the environment, the file, `--help` and the documentation follow."""

from __future__ import annotations

from itertools import chain

from .config import (
    CHECK_CONFIG,
    CONFIG_FILE,
    HELP_ALL,
    ITSELF,
    LOG_DIR,
    LOG_LEVEL,
    LOGS,
    MAX_NODES,
    MIN_NODES,
    MODULE,
    NETWORK,
    NO_PYTHON,
    NODES,
    NPROC_PER_NODE,
    RUNNING,
    SCRIPT,
)
from .parse import Option, Parser, Source, read_conf
from .rendezvous import ENDPOINT, ETCD_OPTIONS, JOB_ID, MEETING
from .stopping import MAX_RESTARTS, STOPPING, TIMEOUTS

POOL_COMMANDS = {
    "submit": "put a job into the queue of a pool",
    "jobs": "the jobs of a pool",
    "wait": "until a job of a pool has ended",
    "logs": "what a job of a pool prints, on all its nodes",
    "cancel": "end a job of a pool",
}
"""Those about a pool and its jobs, each a function of `pool/commands.py` or `pool/submit.py`."""

RUN_COMMANDS = {
    "events": "the events of a job, from its agents or from the files of a run",
    "report": "how a run spent its time, and which nodes cost most of it",
    "diagnose": "pack the files of a run into one archive, with secrets masked",
}
"""Commands about the folder of a run. `agent/commands/runs` has a module for each."""

NODE_COMMANDS = {
    "drain": "let a node leave its job without losing a step",
    "exclude": "keep a node out of its job, without losing a step",
    "readmit": "let an excluded node back into its job",
}
"""Commands about one node of a job: `agent/commands/nodes.py`."""

COMMANDS = {
    "explain-env": "which variables a worker would see, who chose each and why; same options as a run",
    "check": "is this node fit to train? Same options as a run",
    "status": "how a job is, and why",
    **NODE_COMMANDS,
    **POOL_COMMANDS,
    "files": "write the files for systemd, Slurm, Helm, Grafana, Prometheus or Docker",
    **RUN_COMMANDS,
    "forget": "delete what an ended job left in etcd",
}
"""Sub-commands, each with its line in `--help`. `agent/commands` has a module for each that is in no group above."""

AFTERWARDS = (*RUN_COMMANDS, "forget")
"""Those of them about what an ended job has left."""

GROUPS = (RUNNING, NODES, MEETING, ETCD_OPTIONS, STOPPING, TIMEOUTS, NETWORK, LOGS, ITSELF)
"""In the order of `--help`."""

_SPELT = ", ".join(
    f"--{each.name} ({', '.join(each.conf)})" for group in GROUPS for each in group if each.conf
)
RDZV_CONF: Option[tuple[tuple[str, str], ...]] = MEETING.option(
    "rdzv-conf",
    Parser("KEY=VALUE,KEY=VALUE", read_conf),
    f"torchrun's spelling of {_SPELT}; may be repeated, torchrun's other keys are ignored with a warning",
    metavar="K=V,...",
    torchrun="rdzv-conf",
    shorthand=True,
)
"""Here, because it stands for options of several groups."""

OPTIONS = tuple(chain.from_iterable(GROUPS))

TARGETS = (SCRIPT, MODULE, NO_PYTHON)  # what to run; one source may give only one of them


FIRST: tuple[Option[object], ...] = (
    *(MIN_NODES, MAX_NODES, NPROC_PER_NODE, ENDPOINT, JOB_ID, MODULE, MAX_RESTARTS, LOG_DIR, LOG_LEVEL),
    *(CONFIG_FILE, CHECK_CONFIG, HELP_ALL),
)
"""What most people need first."""

USAGE = """\
usage: elastic-agent [options] SCRIPT [arguments of the script]
       elastic-agent [options] -m MODULE [arguments of the module]
       elastic-agent [options] --no-python PROGRAM [arguments of the program]
       elastic-agent [options]

Runs one job's training processes on this node and, together with the agents of other nodes, keeps the training
going through crashes, lost nodes, joins and planned departures. With nothing to run it waits for jobs: see submit.
"""

BEFORE_COMMANDS = (
    "As the very first word, instead of a script (one of that name is run as ./NAME); each knows --help:"
)

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


def short_help() -> str:
    """The options that most people need, and where the others are."""
    options = [option.help_text() for option in FIRST]
    others = len([option for option in OPTIONS if Source.CLI in option.sources]) - len(FIRST)
    more = f"--help-all shows {others} more options: stores and TLS, timeouts, devices, network, logs."
    return "\n".join(
        [
            USAGE,
            *_commands(brief=True),
            "The options that most people need first:",
            *options,
            "",
            more,
            "",
            EXAMPLES.rstrip(),
        ]
    )


def full_help() -> str:
    """All sub-commands, and all options by group with their defaults."""
    parts = [USAGE, *_commands()]
    for group in GROUPS:
        parts.append(f"{group.title}:")
        parts += [option.help_text() for option in group if Source.CLI in option.sources]
        parts.append("")
    return "\n".join([*parts, EXAMPLES.rstrip()])


def _commands(*, brief: bool = False) -> list[str]:
    """`brief`: those about a pool on one line, and so those about a node and about ended jobs."""
    joined = (*NODE_COMMANDS, *POOL_COMMANDS, *AFTERWARDS) if brief else ()
    lines = [f"  {name:<12} {line}" for name, line in COMMANDS.items() if name not in joined]
    if brief:
        lines.append(
            f"  {', '.join(NODE_COMMANDS)}: take a node out of its job without losing a step; let it back in"
        )
        lines.append(
            f"  {', '.join(AFTERWARDS)}: what a job has left: where its hours went, its keys in etcd"
        )
        lines.append(
            f"  {', '.join(POOL_COMMANDS)}: the queue of a pool, of nodes that run elastic-agent without a script"
        )
    return [BEFORE_COMMANDS, *lines, ""]


def bash_completion() -> str:
    """Completes options, sub-commands as the first word, and files everywhere else."""
    flags = [f"--{name}" for option in OPTIONS if Source.CLI in option.sources for name in option.names]
    return f"""\
# bash completion for elastic-agent
_elastic_agent() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    COMPREPLY=()
    if [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "{" ".join(dict.fromkeys(flags))}" -- "$word")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
        if [[ $COMP_CWORD == 1 ]]; then
            mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -W "{" ".join(COMMANDS)}" -- "$word")
        fi
    fi
}}
complete -o filenames -F _elastic_agent elastic-agent
"""
