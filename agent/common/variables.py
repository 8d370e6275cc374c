"""The variables of a worker's environment: who chose each, and why.

Several sources choose what a worker sees: torchrun's contract, the device it is pinned to, the
network it trains over, the settings of NCCL and torch. Each hands over `Variable`s; `compose` puts them on top of
what the worker inherits. A *yielding* variable is a default: what the user has set is stronger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

USER = "you"
"""`by` of what stands in the user's own environment."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable as one source wants it; `reason` is the sentence that a person reads about it."""

    name: str
    value: str
    reason: str
    yielding: bool = True
    by: str = "elastic-agent"
    """The source that chose it, in a word or two."""
    aliases: tuple[str, ...] = ()
    """Other names of the same setting: a yielding variable yields to what the user has set under any of them."""


def settle(inherited: Mapping[str, str], chosen: Iterable[Variable]) -> tuple[Variable, ...]:
    """The variables that were `chosen`, each as it won: of two with one name the later, or the user's own."""
    won: dict[str, Variable] = {}
    for variable in chosen:
        own = next((name for name in (variable.name, *variable.aliases) if name in inherited), None)
        if own is None or not variable.yielding:
            won[variable.name] = variable
        else:
            same = inherited[own] == variable.value
            other = "" if same else f"; ours would be {variable.name}={variable.value}: {variable.reason}"
            won.setdefault(own, Variable(own, inherited[own], f"your own{other}", by=USER))
    return tuple(won.values())


def compose(inherited: Mapping[str, str], chosen: Iterable[Variable]) -> dict[str, str]:
    """`inherited` with the `chosen` ones on top, as they are settled."""
    return {**inherited, **{variable.name: variable.value for variable in settle(inherited, chosen)}}
