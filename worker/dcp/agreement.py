"""What the ranks of one `dcp.save` bring to it, and what they agree on: a pure function, computed by the coordinator.

Both travel with the plans that DCP gathers and scatters, so a save needs no collective of its own, and
`dcp.async_save` may run it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..checkpointing.sharded.meeting import RankHome
from ..errors import CheckpointError
from ..storage.replication.copy_rule import Decision, Readiness, Version, may_copy, settled


@dataclass(frozen=True, slots=True)
class WorldRank:
    """Where a rank is: its number and that of all ranks as the launcher counts them, and its node."""

    rank: int
    world_size: int
    home: RankHome


@dataclass(frozen=True, slots=True)
class Brought:
    """By one rank.

    `size` is what it would write, in bytes, before DCP leaves out what other ranks write. `readiness`: of its slots;
    None: it has no memory for copies. `knows_others`: it need not be told where the others are. `was_refused`: its
    newest copy did not reach the disk.
    """

    step: int
    rank: WorldRank
    size: int
    readiness: Readiness | None
    knows_others: bool
    was_refused: bool


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do.

    `copies`: each rank copies into memory, into the slot without the version `keep`. `homes` are those of all ranks,
    for the replicas; empty: all know them. `durable`: the save ends when it is on disk. `most_bytes`: what the ranks of
    one node write, of that node which writes most.
    """

    copies: bool = False
    keep: Version | None = None
    settled: Version | None = None
    homes: tuple[RankHome, ...] = ()
    durable: bool = False
    most_bytes: int = 0


def agree(brought: Sequence[Brought], generation: int, keep: Version | None) -> Agreed:
    """`brought` is by rank, `keep` as of `may_copy`. Raises CheckpointError where the ranks save different steps.

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
    if len(everyone) < len(brought) or not are_the_world([one.rank for one in brought]):
        return agreed
    verdict = may_copy(everyone, (generation, brought[0].step), keep, must=True)
    return replace(
        agreed,
        copies=verdict.decision in (Decision.COPY, Decision.HAVE),
        keep=verdict.keep,
        settled=settled(everyone, generation),
        homes=() if all(one.knows_others for one in brought) else tuple(one.rank.home for one in brought),
    )


def are_the_world(ranks: Sequence[WorldRank]) -> bool:
    """Whether these, by rank of DCP's process group, are all ranks of the world, in its order."""
    return all((one.rank, one.world_size) == (rank, len(ranks)) for rank, one in enumerate(ranks))


def _by_node(brought: Sequence[Brought]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in brought:
        found.setdefault(one.rank.home.node, []).append(one.size)
    return found
