"""Whose copy of the state is loaded: every rank lists what it has, and all choose the same.

Generations of one store are numbered in order, so of the copies in memory the newest generation's newest step wins: a
generation that began below a step of an older one has abandoned that step, and one that began at it or beyond has a
step at least as high. The number on a disk may be another store's, so a checkpoint on disk is held against that choice
only if its step is beyond the one at which the choice's generation began: up to there it is what that generation came
from. Beyond it the newer generation wins, of one generation the newer step, and of equals the memory.

Ranks copy without waiting for each other, so the newest copy may be one that some rank did not come to. It counts
only when every rank's random state after it is known, unless the world has changed its size, there is no other, or
it is partial, made after a rank had failed: then that rank's random numbers are others than they would have been.

Where no rank has anything in memory the newest step on any disk wins, of one step the newest generation's.

A run loads what is its own, or was taken over by it. Another run's checkpoint counts only where there is nothing else,
as when a job is started again: then its checkpoint is what this run goes on from. Generations of two runs have no
order: between them what this run has done since is the newer.

Workers that loaded the newest state may have failed again and again. Then their agents name it (`BadState`), and it is
chosen only where this run has no other. It is this run's: what another run has left is never what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import NoUsableCheckpoint
from ...storage.disk.manifests import Manifest
from ...storage.memory.copy_header import Header, NotedState
from ...wire.environment import WorkerEnv


@dataclass(frozen=True, slots=True)
class BadState:
    """All generations that loaded the state of `step` failed, last in `generation`; this is generation `present`."""

    generation: int
    step: int
    present: int
    run: str = ""
    """Whose generations these are."""

    @staticmethod
    def of(env: WorkerEnv, run: str) -> BadState | None:
        generation, colon, step = env.bad_state.partition(":")
        if not colon:
            return None
        return BadState(int(generation), int(step), env.generation, run)

    def covers(self, what: Manifest | Header, *, foreign: bool = False) -> bool:
        """That state, and what came of it. What later generations have made of an older one is good.

        `foreign`: another run's, which this one has not taken over.
        """
        if foreign:
            return False
        made_since = what.run == self.run and self.generation < what.generation <= self.present
        return what.step >= self.step and not made_since


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank has: its disk's newest checkpoint, what does not verify there, and what is in its node's memory.

    One rank of a node offers what the memory holds; all of that `node` can read it.
    """

    manifest: Manifest | None = None
    bad: tuple[str, ...] = ()
    copies: tuple[Header, ...] = ()
    node: str = ""
    run: str = ""
    """The run of this rank."""
    foreign: bool = False
    """The checkpoint on disk is another run's, which this one has not taken over."""
    noted: tuple[NotedState, ...] = ()
    """Random states in memory, also of states of which this node has no copy any more."""


@dataclass(frozen=True, slots=True)
class Source:
    """The rank whose checkpoint is loaded: the one on its disk, or the copy in its memory."""

    rank: int
    what: Manifest | Header


def choose_source(offers: Sequence[Offer], bad: BadState | None = None) -> Source | None:
    """See the module's docstring; of equals the lowest rank's. `offers` are by rank.

    None when no rank has ever had a checkpoint. Raises NoUsableCheckpoint when some exist and none is good.
    """
    kin = runs_in_memory(offers)
    offers = [replace(offer, foreign=_is_foreign(offer, kin)) for offer in offers]
    others = [_without(offer, bad) for offer in offers] if bad is not None else []
    if any(offer.copies or (offer.manifest and not offer.foreign) for offer in others):
        return _choose(others)
    return _choose(offers)


def _is_foreign(offer: Offer, kin: set[str]) -> bool:
    return offer.foreign and offer.manifest is not None and offer.manifest.run not in kin


def _without(offer: Offer, bad: BadState) -> Offer:
    unwanted = offer.manifest is not None and bad.covers(offer.manifest, foreign=offer.foreign)
    manifest = None if unwanted else offer.manifest
    copies = tuple(copy for copy in offer.copies if not bad.covers(copy))
    return replace(offer, manifest=manifest, copies=copies)


def _choose(offers: Sequence[Offer]) -> Source | None:
    disks = _own_disks(offers)
    newest = _newest_copy(offers)
    if newest is not None:
        header, rank = newest
        beyond = [
            ((manifest.generation, manifest.step), place, manifest)
            for manifest, place in disks
            if _is_beyond(manifest, header, offers[0].run)
        ]
        if not beyond:
            return Source(-rank, header)
        _, rank, manifest = max(beyond, key=lambda one: one[:2])
        return Source(-rank, manifest)
    if disks:
        manifest, rank = max(disks, key=lambda one: (one[0].step, one[0].generation, one[1]))
        return Source(-rank, manifest)
    rotten = [f"rank {rank}: {reason}" for rank, offer in enumerate(offers) for reason in offer.bad]
    if rotten:
        raise NoUsableCheckpoint(
            "checkpoints exist and none verifies; not starting again from step 0 by itself. Restore one, or delete "
            f"them to start again. {'; '.join(rotten)}"
        )
    return None


def runs_in_memory(offers: Sequence[Offer]) -> set[str]:
    """The memory is the agent's, and an agent has one job: what these runs have done is this job's."""
    return {copy.run for offer in offers for copy in offer.copies}


def _own_disks(offers: Sequence[Offer]) -> list[tuple[Manifest, int]]:
    """The checkpoints on disks that may be loaded, each with its rank's place: the greater is the better."""
    disks = [(offer.manifest, -rank, offer.foreign) for rank, offer in enumerate(offers) if offer.manifest]
    has_own = any(offer.copies for offer in offers) or not all(foreign for *_, foreign in disks)
    return [(manifest, place) for manifest, place, foreign in disks if not (foreign and has_own)]


def _is_beyond(manifest: Manifest, header: Header, run: str) -> bool:
    if manifest.run != header.run and run in (manifest.run, header.run):
        return manifest.run == run
    return manifest.step > header.resumed_from and (manifest.generation, manifest.step) > header.version


def _newest_copy(offers: Sequence[Offer]) -> tuple[Header, int] | None:
    copies = [(copy, -rank) for rank, offer in enumerate(offers) for copy in offer.copies]
    counting = [(header, rank) for header, rank in copies if _counts(header, offers)]
    if not copies:
        return None
    return max(
        counting or copies, key=lambda one: (one[0].version, not one[0].rng_holes, bool(one[0].sums), one[1])
    )


def _counts(header: Header, offers: Sequence[Offer]) -> bool:
    """Whether every rank can go on from it with its own random state, or could not be expected to."""
    if not header.rng_holes or header.partial or header.world_size != len(offers):
        return True
    known = {
        one.rank
        for offer in offers
        for one in offer.noted
        if (one.version, one.world_size) == (header.version, header.world_size)
    }
    return known.issuperset(range(header.world_size))


def nodes_with(header: Header, offers: Sequence[Offer]) -> set[str]:
    """Where that state is in memory. Its bytes may differ from node to node, the state does not."""
    return {offer.node for offer in offers for copy in offer.copies if copy.version == header.version}
