"""All options: the table that the command line, the environment, the file, `--help` and the documentation follow."""

from __future__ import annotations

from itertools import chain

from .config import ITSELF, MODULE, NETWORK, NO_PYTHON, NODES, RUNNING, SCRIPT
from .rendezvous import ETCD, MEETING
from .stopping import STOPPING, TIMEOUTS

COMMAND_NAMES = ("explain-env", "status", "drain", "forget")
"""First words that are no script."""

GROUPS = (RUNNING, NODES, MEETING, ETCD, STOPPING, TIMEOUTS, NETWORK, ITSELF)
"""In the order of `--help`."""

OPTIONS = tuple(chain.from_iterable(GROUPS))

TARGETS = (SCRIPT, MODULE, NO_PYTHON)  # each says what to run; one source may give only one of them

# Variables that no process which the agent starts may inherit.
SECRET_VARIABLES = frozenset({"ELASTIC_AGENT_ETCD_PASSWORD"})

# Variables that an agent gives its workers. An agent started inside a worker inherits them.
WORKER_VARIABLES = frozenset(
    {
        "ELASTIC_AGENT_BAD_STATE",
        "ELASTIC_AGENT_GENERATION",
        "ELASTIC_AGENT_RUN",
        "ELASTIC_AGENT_REPORTS",
        "ELASTIC_AGENT_COMMITS",
        "ELASTIC_AGENT_SALVAGE",
        "ELASTIC_AGENT_DRAIN",
        "ELASTIC_AGENT_PAGE",
        "ELASTIC_AGENT_MEMORY",
        "ELASTIC_AGENT_MEMORY_BYTES",
        "ELASTIC_AGENT_WRITES",
        "ELASTIC_AGENT_LOCAL_RANK",
        "ELASTIC_AGENT_INCARNATION",
        "ELASTIC_AGENT_NODE",
        "ELASTIC_AGENT_PROCESS_GROUP_TIMEOUT_S",
    }
)
