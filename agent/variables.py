"""The variables of a worker's environment: who chose each, and why.

Several rooms have something to say about what a worker sees: torchrun's contract, the device it is pinned to, the
network it trains over, the settings of NCCL and torch. Each hands over `Variable`s; `compose` puts them on top of
what the worker inherits. A *yielding* variable is a default: what the user has set is stronger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable as one room wants it; `reason` is the sentence that a person reads about it."""

    name: str
    value: str
    reason: str
    yielding: bool = True


def compose(inherited: Mapping[str, str], chosen: Iterable[Variable]) -> dict[str, str]:
    """`inherited` with the `chosen` ones; of two with one name the later wins."""
    environment = dict(inherited)
    for variable in chosen:
        if not variable.yielding or variable.name not in inherited:
            environment[variable.name] = variable.value
    return environment
