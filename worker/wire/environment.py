"""The variables by which an agent tells a worker who it is and where to ask: their names stand here alone.

A field `memory_bytes` is the variable `ELASTIC_AGENT_MEMORY_BYTES`. The agent writes them, and the worker library
reads them. Without an agent, under torchrun and plain python, all fields have their defaults.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from ...codec import Checked, Invalid, Text, shown

PREFIX = "ELASTIC_AGENT_"


@dataclass(frozen=True, slots=True)
class WorkerEnv:
    generation: int = 0
    run: str = ""
    """The same for all generations of the job, and no other job's."""
    node: str = ""
    local_rank: int = -1
    """Where each worker sees its own devices alone, LOCAL_RANK is 0 for all."""
    devices: int = 1
    """How many the worker has; the first is LOCAL_RANK times that."""
    master_port: int = 0
    """What the agent has chosen for MASTER_PORT, whatever the script has made of that."""
    incarnation: str = ""
    """The agent's: by this mark the guard finds what workers leave behind."""
    page: str = ""
    """Path of the memory that worker and agent share."""
    stacks: str = ""
    """Path of the memory where the worker writes its stacks, at the agent's signal: `register_stacks`."""
    socket: str = ""
    """Path of the stream socket at which the agent answers."""
    reports: str = ""
    """Path of its datagram socket."""
    memory: str = ""
    """The folder in memory for the newest states; empty: checkpoints go to disk only."""
    memory_bytes: int = 0
    """The most that the copies of all workers there may take."""
    writes: str = ""
    """Path of the stream socket of the disk writer."""
    memory_server: str = ""
    """Path of the stream socket at which this node's memory server takes orders; empty: there is none."""
    memory_address: str = ""
    """HOST:PORT at which other nodes reach it."""
    memory_standbys: str = ""
    """NODE=HOST:PORT, with spaces between them: the memory servers of live nodes outside the world."""
    memory_replicas: int = 0
    """On how many other nodes each node's shards are kept."""
    bad_state: str = ""
    """GENERATION:STEP of the state that must not be loaded."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> WorkerEnv:
        """Raises Invalid where a number is none."""
        found: dict[str, Any] = {}
        for name, variable in NAMES.items():
            if variable in environ:
                found[name] = environ[variable]
                if name in _NUMBERS:
                    found[name] = _number(variable, environ[variable])
        return cls(**found)

    def variables(self) -> dict[str, str]:
        """Those that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        unset = WorkerEnv()
        return {NAMES[name]: str(value) for name, value in values.items() if value != getattr(unset, name)}


NAMES = {field.name: PREFIX + field.name.upper() for field in fields(WorkerEnv)}
"""Of the variables, by field."""
_NUMBERS = {field.name for field in fields(WorkerEnv) if field.type == "int"}

PROCESS_GROUP_TIMEOUT = "ELASTIC_AGENT_PROCESS_GROUP_TIMEOUT_S"
"""Read by `worker.init_process_group`, because torch takes that timeout from no variable."""
TORCH_WORKAROUNDS = "ELASTIC_AGENT_TORCH_WORKAROUNDS"
"""`0` switches all of them off. The agent hands it on as it is."""

WORKER_VARIABLES = frozenset({*NAMES.values(), PROCESS_GROUP_TIMEOUT, TORCH_WORKAROUNDS})
"""All that an agent gives its workers. An agent that is started inside a worker inherits them."""


def own_environment() -> Mapping[str, str]:
    """What speaks for the worker; nothing in the helper processes that it starts."""
    return {} if multiprocessing.parent_process() is not None else os.environ


def _number(variable: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise Invalid(
            f"{variable} is {shown(text)}, expected a whole number: an agent sets it for its workers"
        )
    return int(text)


# ---------------------------------------------------------------- the run of a job
#
# Whose the checkpoint directory is, and whose copies in memory are.

RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
RunName = Annotated[str, Text(128, RUN_NAME)]
MAX_LABEL_CHARS = 200


@dataclass(frozen=True, slots=True)
class Run(Checked):
    """`label` tells a person which job this is."""

    id: RunName
    label: Annotated[str, Text(MAX_LABEL_CHARS)] = ""

    def __str__(self) -> str:
        return f"{self.id} ({self.label})" if self.label else self.id


def this_run(environ: Mapping[str, str]) -> Run:
    """The job's, as the agent says. Without an agent each process is a run of its own."""
    job = environ.get("TORCHELASTIC_RUN_ID", "")
    where = f"process {os.getpid()} on {socket.gethostname()}"
    label = f"job {job}, {where}" if job else where
    return Run(WorkerEnv.of(environ).run or _made_up(os.getpid()), label[:MAX_LABEL_CHARS])


@functools.cache
def _made_up(pid: int) -> str:
    """For the process `pid`: one that was forked is another."""
    return uuid.uuid4().hex[:12]
