"""The types of what is configured, for those that the standard library does not have, and the kinds of stores.

A new kind of store is a folder in `rendezvous`, and a name in `STORES`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...rendezvous.c10d.kind import C10D
from ...rendezvous.etcd.kind import ETCD
from ...rendezvous.local.kind import LOCAL
from ...rendezvous.records import Action
from ...rendezvous.store.memory import MEMORY

Affinity = Literal["none", "numa", "cores"]
CheckMode = Literal["fail", "warn", "off"]
"""What the checks before a join are for: fail keeps this node out, warn writes into the log."""
CommandKind = Literal["script", "run-path", "module", "binary"]
"""run-path: a script that `run_script` runs."""
DevicePinning = Literal["index", "mask", "none"]
Shell = Literal["bash"]
WorkerCount = int | Literal["auto", "gpu", "cpu"]

RUN_SCRIPT = "elastic_agent.run_script"

MASK = "***"
"""What is shown in place of a secret."""


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """A world has at least `min` and at most `max` nodes, 1 <= min <= max."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class Streams:
    """Some of the standard streams of a node's workers: each set is 1 for stdout, 2 for stderr, 3 for both or 0."""

    default: int = 0
    by_local_rank: tuple[tuple[int, int], ...] = ()
    """In the place of `default`."""

    def of(self, local_rank: int) -> int:
        return dict(self.by_local_rank).get(local_rank, self.default)

    def of_any(self, streams: int) -> bool:
        """Some worker's set has one of these."""
        sets = (self.default, *(each for _, each in self.by_local_rank))
        return any(each & streams for each in sets)

    def __str__(self) -> str:
        return ",".join(f"{rank}:{streams}" for rank, streams in self.by_local_rank) or str(self.default)


LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """Where a notice that this machine goes away comes from."""

    kind: Literal["auto", "aws", "gcp", "azure", "file", "off"]
    path: str = ""
    """Of the file."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" if self.path else self.kind


BUILT_IN_CAUSES = frozenset(
    (
        *("gpu_fault", "host_out_of_memory", "refused", "port", "gpu_missing"),
        *("import_error", "script_error"),
        *("cuda_out_of_memory", "connection_lost", "cuda_error", "nccl", "disk_full", "command"),
        *("exception", "killed", "signal", "unknown", "hang", "not_started", "store_server"),
    )
)
"""The names of `agent/workers/causes.py`, which a row of the file may change."""


@dataclass(frozen=True, slots=True)
class UserCause:
    """A row `[[cause]]` of the configuration file: a cause of the user's own, or a change of a built-in one."""

    name: str
    contains: str = ""
    """A text that is in a line of the exception, or in one of the last lines. Empty: none."""
    action: Action | None = None
    """None: the action of the built-in cause."""

    @property
    def parts(self) -> dict[str, str]:
        """The keys and values of the row in the file."""
        action = self.action.value if self.action is not None else ""
        parts = {"name": self.name, "contains": self.contains, "action": action}
        return {key: text for key, text in parts.items() if text}


@dataclass(frozen=True, slots=True)
class Command:
    """What every worker runs. `target` is a path, a module name or a program, by `kind`."""

    kind: CommandKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def started(self) -> Command:
        """What Python is started with, if it is Python."""
        return Command("module", RUN_SCRIPT, (self.target, *self.args)) if self.kind == "run-path" else self


STORES = {kind.name: kind for kind in (C10D, ETCD, LOCAL, MEMORY)}

ALONE = MEMORY
"""Of a node that no other one can join, where none is chosen."""

DEFAULT = C10D
"""Else."""

SHARED = tuple(kind for kind in STORES.values() if kind.port is not None)
"""Nodes of several machines can meet there."""

CLUSTERS = tuple(kind for kind in STORES.values() if kind.cluster)


def in_words(kinds: Iterable[object]) -> str:
    """
    >>> in_words(["c10d", "etcd", "memory"])
    'c10d, etcd or memory'
    """
    *others, last = map(str, kinds)
    return f"{', '.join(others)} or {last}" if others else last
