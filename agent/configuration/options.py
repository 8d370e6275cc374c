"""All options: the table that the command line, the environment, the file, `--help` and the documentation follow."""

from __future__ import annotations

from itertools import chain

from .config import ITSELF, MODULE, NETWORK, NO_PYTHON, NODES, RUNNING, SCRIPT
from .rendezvous import ETCD_OPTIONS, MEETING
from .stopping import STOPPING, TIMEOUTS

COMMAND_NAMES = ("explain-env", "status", "drain", "forget")
"""First words that are no script."""

GROUPS = (RUNNING, NODES, MEETING, ETCD_OPTIONS, STOPPING, TIMEOUTS, NETWORK, ITSELF)
"""In the order of `--help`."""

OPTIONS = tuple(chain.from_iterable(GROUPS))

TARGETS = (SCRIPT, MODULE, NO_PYTHON)  # each says what to run; one source may give only one of them

# Variables that no process which the agent starts may inherit.
SECRET_VARIABLES = frozenset({"ELASTIC_AGENT_ETCD_PASSWORD"})
