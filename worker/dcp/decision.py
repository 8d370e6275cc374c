"""What the ranks of one `dcp.save` ask for, and what is decided: a pure function, computed by the coordinator.

Both travel with the plans that DCP gathers and scatters, so a save needs no collective of its own, and
`dcp.async_save` may run it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..checkpointing.sharded.meeting import RankHome
from ..errors import CheckpointError
from ..storage.replication.copy_rule import Decision, Readiness, Version, may_copy, oldest_needed


@dataclass(frozen=True, slots=True)
class WorldRank:
    """Where a rank is: its number and that of all ranks as the launcher counts them, and its node."""

    rank: int
    world_size: int
    home: RankHome


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """By one rank.

    `size` is what it would write, in bytes, before DCP leaves out what other ranks write. `readiness`: of its slots;
    None: it has no memory for copies. `knows_nodes`: it need not be told where the others are. `last_save_failed`: its
    newest copy did not reach the disk. `is_busy`: another thread of its process is at a save of the same directory.
    """

    step: int
    rank: WorldRank
    size: int
    readiness: Readiness | None
    knows_nodes: bool
    last_save_failed: bool
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """What all ranks do.

    `copies`: each rank copies into memory, into the slot without the version `protected`. `drop_older_than`: older
    replicas are of no more use, on no node; None: some may be. `homes` are those of all ranks, for the replicas; empty:
    all know them. `durable`: the save ends when it is on disk. `most_bytes`: what the ranks of one node write, of that
    node which writes most.
    """

    copies: bool = False
    protected: Version | None = None
    drop_older_than: Version | None = None
    homes: tuple[RankHome, ...] = ()
    durable: bool = False
    most_bytes: int = 0


def decide(requests: Sequence[SaveRequest], generation: int, protected: Version | None) -> SaveDecision:
    """`requests` are by rank, `protected` is as of `may_copy`. Raises CheckpointError for different steps, and for a
    save that overlaps with another one: what the slots hold would no longer be what the ranks have asked with.

    They copy only where all have memory, and all ranks of the world take part: a slot belongs to a rank of the world.
    """
    steps = {rank: one.step for rank, one in enumerate(requests)}
    if len(set(steps.values())) > 1:
        raise CheckpointError(
            f"ranks save different steps, by rank: {steps}; call dcp.save in the same iteration on all ranks"
        )
    if busy := [rank for rank, one in enumerate(requests) if one.is_busy]:
        raise CheckpointError(
            f"step {requests[0].step} is not saved: ranks {busy} are still at another save of that directory. Wait for "
            "the future of the last dcp.async_save before the next one"
        )
    decision = SaveDecision(
        durable=any(one.last_save_failed for one in requests),
        most_bytes=max(sum(sizes) for sizes in _by_node(requests).values()),
    )
    everyone = [one.readiness for one in requests if one.readiness is not None]
    if len(everyone) < len(requests) or not are_the_world([one.rank for one in requests]):
        return decision
    verdict = may_copy(everyone, (generation, requests[0].step), protected, must=True)
    return replace(
        decision,
        copies=verdict.decision in (Decision.COPY, Decision.HAVE),
        protected=verdict.protected,
        drop_older_than=oldest_needed(everyone, generation),
        homes=() if all(one.knows_nodes for one in requests) else tuple(one.rank.home for one in requests),
    )


def are_the_world(ranks: Sequence[WorldRank]) -> bool:
    """Whether these, by rank of DCP's process group, are all ranks of the world, in its order."""
    return all((one.rank, one.world_size) == (rank, len(ranks)) for rank, one in enumerate(ranks))


def _by_node(requests: Sequence[SaveRequest]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in requests:
        found.setdefault(one.rank.home.node, []).append(one.size)
    return found
