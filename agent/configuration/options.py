"""All options: the table that the command line, the environment, the file, `--help` and the documentation follow."""

from __future__ import annotations

from itertools import chain

from .config import ITSELF, MODULE, NETWORK, NO_PYTHON, NODES, RUNNING, SCRIPT
from .logs import LOGS
from .rendezvous import ETCD_OPTIONS, MEETING
from .stopping import STOPPING, TIMEOUTS
from .types.option import Option
from .types.parsers import Parser, read_conf

POOL_COMMANDS = {
    "submit": "put a job into the queue of a pool",
    "jobs": "the jobs of a pool",
    "wait": "until a job of a pool has ended",
    "logs": "what a job of a pool prints, on all its nodes",
    "cancel": "end a job of a pool",
}
"""Those about a pool and its jobs. `agent/commands/pool` has a module for each."""

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
"""Commands about one node of a job. `agent/commands/nodes` has a module for each."""

COMMANDS = {
    "explain-env": "which variables a worker would see, who chose each and why; same options as a run",
    "check": "is this node fit to train? Same options as a run",
    "status": "how a job is, and why",
    **NODE_COMMANDS,
    **POOL_COMMANDS,
    "files": "write the files for systemd, Slurm, Helm, Grafana, Prometheus or Docker",
    **RUN_COMMANDS,
    "forget": "delete what an ended job left in etcd",
    "convert": "make a sharded checkpoint of a replicated one, or the other way round",
}
"""Sub-commands, each with its line in `--help`. `agent/commands` has a module for each that is in no group above."""

AFTERWARDS = (*RUN_COMMANDS, "forget", "convert")
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

# Variables that no process which the agent starts may inherit, but for a daemon's agents of jobs.
SECRET_VARIABLES = frozenset({"ELASTIC_AGENT_ETCD_PASSWORD"})
