"""Which run of a job this process is part of: whose the checkpoint directory is, and whose copies these are."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ...codec import Checked, Text
from .environment import WorkerEnv
from .messages import RunName

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
