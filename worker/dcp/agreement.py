"""What the ranks of one `dcp.save` bring to it, and what they agree on: a pure function, computed by the coordinator.

Both travel with the plans that DCP gathers and scatters, so a save needs no collective of its own, and
`dcp.async_save` may run it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import CheckpointError
from ..storage.replication.copy_rule import Decision, Line, Readiness, Version, may_copy, settled
from ..storage.replication.partners import NodePlace


@dataclass(frozen=True, slots=True)
class Home:
    """Where a rank is: its number and that of all ranks as the launcher counts them, and its node."""

    rank: int
    world_size: int
    node: NodePlace


@dataclass(frozen=True, slots=True)
class Brought:
    """By one rank.

    `size` is what it would write, in bytes, before DCP leaves out what other ranks write. `readiness`: of its slots;
    None: it has no memory for copies. `knows_nodes`: it need not be told which nodes there are. `was_refused`: its
    newest copy did not reach the disk.
    """

    step: int
    home: Home
    size: int
    readiness: Readiness | None
    knows_nodes: bool
    was_refused: bool


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do.

    `copies`: each rank copies into memory, into the slot without the version `keep`. `nodes`: those of the world, for
    the replicas; empty: all ranks know them. `durable`: the save ends when it is on disk. `most_bytes`: what the ranks
    of one node write, of that node which writes most.
    """

    copies: bool = False
    keep: Version | None = None
    settled: Version | None = None
    nodes: tuple[NodePlace, ...] = ()
    durable: bool = False
    most_bytes: int = 0


def agree(brought: Sequence[Brought], line: Line) -> Agreed:
    """By rank. Raises CheckpointError where the ranks save different steps.

    They copy only where all have memory, and all ranks of the world take part: a slot belongs to a rank of the world.
    """
    steps = {rank: one.step for rank, one in enumerate(brought)}
    if len(set(steps.values())) > 1:
        raise CheckpointError(f"ranks save different steps, by rank: {steps}")
    agreed = Agreed(
        durable=any(one.was_refused for one in brought),
        most_bytes=max(sum(sizes) for sizes in _by_node(brought).values()),
    )
    everyone = [one.readiness for one in brought if one.readiness is not None]
    if len(everyone) < len(brought) or not are_the_world([one.home for one in brought]):
        return agreed
    verdict = may_copy(everyone, line, must=True)
    return replace(
        agreed,
        copies=verdict.decision in (Decision.COPY, Decision.HAVE),
        keep=verdict.keep,
        settled=settled(everyone, line.generation),
        nodes=() if all(one.knows_nodes for one in brought) else nodes_of([one.home for one in brought]),
    )


def are_the_world(homes: Sequence[Home]) -> bool:
    """Whether these, by rank of DCP's process group, are all ranks of the world, in its order."""
    return all((one.rank, one.world_size) == (rank, len(homes)) for rank, one in enumerate(homes))


def nodes_of(homes: Sequence[Home]) -> tuple[NodePlace, ...]:
    """Each once. DCP lets one rank write what several have, so no rank's part can stand for another's."""
    found: dict[str, NodePlace] = {}
    for one in homes:
        first = found.get(one.node.node, one.node)
        found[first.node] = replace(first, digests=first.digests | {part_name(one.rank)})
    return tuple(found.values())


def part_name(rank: int) -> str:
    """What stands for the digest of a rank's part where partners are chosen."""
    return f"{rank:08}"


def _by_node(brought: Sequence[Brought]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in brought:
        found.setdefault(one.home.node.node, []).append(one.size)
    return found
