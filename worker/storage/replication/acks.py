"""Which nodes have acknowledged the copy in a slot: a small file beside it, `a.acks`, of the memory server's.

It names the version that it is of, and the generation whose workers named the partners, and says nothing about any
other: a node may have lost since then what it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ....codec import AtMost, Checked, Count, from_plain
from ...wire.files import open_own_directory, read_whole, replace_file, seal, unseal
from ...wire.messages import MOST_PARTNERS, NodeName

SCHEMA = 1
_MAX_BYTES = 16384

Nodes = Annotated[tuple[NodeName, ...], AtMost(MOST_PARTNERS)]


@dataclass(frozen=True, slots=True)
class Acks(Checked):
    """`nodes` hold the copy whole. `unreachable` are partners that do not take it now, and have not for some time."""

    generation: Count
    step: Count
    ordered_by: Count
    """The generation whose `Replicate` named the partners."""
    nodes: Nodes = ()
    unreachable: Nodes = ()


def write_acks(folder: str, slot: str, acks: Acks) -> None:
    """`folder` is the path of the slots' folder. Raises OSError."""
    with open_own_directory(folder) as dir_fd:
        replace_file(dir_fd, f"{slot}.acks", seal(SCHEMA, acks))


def read_acks(folder: str, slot: str, version: tuple[int, int], ordered_by: int) -> Acks:
    """Of that version, to partners of that generation; none where nothing can be read of it."""
    none = Acks(*version, ordered_by)
    try:
        with open_own_directory(folder) as dir_fd:
            raw = read_whole(dir_fd, f"{slot}.acks", _MAX_BYTES)
        acks = from_plain(Acks, unseal(raw, "acks", SCHEMA)[1])
    except (OSError, ValueError):
        return none
    return acks if (acks.generation, acks.step, acks.ordered_by) == (*version, ordered_by) else none
