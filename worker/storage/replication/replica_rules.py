"""Which copies a memory server brings to others, takes and drops: pure rules, which the simulator runs, too."""

from __future__ import annotations

from collections.abc import Iterable

from ..memory.copy_header import Header
from .copy_rule import Version


def is_abandoned(version: Version, *, generation: int, resumed: Version) -> bool:
    """Whether the workers of that generation, who went on from `resumed`, have gone on without this version."""
    return version[0] < generation and version > resumed


def is_twin(found: Header, header: Header) -> bool:
    """Whether both have the same shards of one state."""
    return (
        found.shards is not None
        and header.shards is not None
        and found.shards.digest == header.shards.digest
        and (found.version, found.run, found.world_size) == (header.version, header.run, header.world_size)
    )


def is_superfluous(versions: Iterable[Version], needed: Version) -> bool:
    """Whether a replica with these versions, the one on its way included, is of no more use: nodes that are still to
    bring theirs here have brought `needed`, the oldest that is of use."""
    return all(version < needed for version in versions)
