"""The types of what is configured, for those types that the standard library does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Affinity = Literal["none", "numa", "cores"]
CommandKind = Literal["script", "module", "binary"]
DevicePinning = Literal["index", "mask", "none"]
NetworkProfile = Literal["auto", "ethernet", "infiniband", "roce", "efa", "debug"]
WorkerCount = int | Literal["auto", "gpu", "cpu"]

MASK = "***"
"""What is shown in place of a secret."""


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """A world has at least `min` and at most `max` nodes, 1 <= min <= max."""

    min: int
    max: int


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A text that no log, message or dump may show. Who uses it takes `text`, as late as possible."""

    text: str

    def __repr__(self) -> str:
        return MASK


@dataclass(frozen=True, slots=True)
class Preload:
    """What the preloaded process imports, which workers are forked from; without any word there is none."""

    words: tuple[str, ...]
    """Names of modules; default: torch, and what DDP imports at its first use; auto: what workers import."""

    def __str__(self) -> str:
        return ",".join(self.words) or "none"

    def __bool__(self) -> bool:
        return bool(self.words)


@dataclass(frozen=True, slots=True)
class Command:
    """What every worker runs. `target` is a path, a module name or a program, by `kind`."""

    kind: CommandKind
    target: str
    args: tuple[str, ...] = ()
