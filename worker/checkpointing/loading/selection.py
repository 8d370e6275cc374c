"""Which state is loaded, and who has it: every rank lists what it has, and all choose the same.

Generations of one store are numbered in order, so of the copies in memory the newest generation's newest step
wins: a generation that began below a step of an older one has abandoned that step, and one that began at it or
beyond has a step at least as high. The number on a disk may be another store's, so a checkpoint on disk is held
against that choice only if its step is beyond the one at which the choice's generation began: up to there it is
what that generation came from. Beyond it the newer generation wins, of one generation the newer step, and of
equals the memory. Where no rank has anything in memory the newest step on any disk wins, of one step the newest
generation's.

Of a state that is the same on all ranks each copy is all of it. Ranks copy it without waiting for each other, so the
newest one may be one that some rank did not come to. It counts only when every rank's random state after it is known,
unless the world has changed its size, there is no other, it is partial, made after a rank had failed, or a rank is lost
with its node: then that rank's random numbers are others than they would have been.

Of a sharded state a version in memory counts when it is *whole*: of every rank of its world there is a copy, or one of
a twin, on some node, in its own slot or as a replica, and some copy has what is common. A twin stands in for the shards
of a rank, not for what that rank has for itself, such as its random state. A version that some rank has not finished
gives way to the one that all kept meanwhile, if that one has the own copies of all ranks: a killed worker costs a step,
and no bit. Both must be of one generation: then the node where the rank was is there, and the rank had not finished.
Where that node is lost with all that its ranks had, the newer version counts.

Copies that are not whole never count, as if they were not there. Then a whole older version is taken, else the disk,
else training begins anew: no decision of a person could bring back shards that no live node has, and a job that has
not reached its first save shall go on by itself. It is not silent: `unusable` says what is lost, for the log. What is
on disk and does not verify is another matter, which a person can mend: NoUsableCheckpoint, as ever.

A run loads what is its own, or was taken over by it. Another run's checkpoint counts only where there is nothing
else, as when a job is started again: then its checkpoint is what this run goes on from. Generations of two runs
have no order: between them what this run has done since is the newer.

Workers that loaded the newest state may have failed again and again. Then their agents name it (`BadState`), and
it is chosen only where this run has no other. It is this run's: what another run has left is never what came of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ....codec import Count
from ...errors import NoUsableCheckpoint
from ...storage.disk.manifests import Manifest
from ...storage.memory.copy_header import FoundCopy, Header, NotedState
from ...storage.memory.slot_folders import Folder
from ...wire.environment import WorkerEnv

_MOST_NAMED = 8


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

    The first rank of a node offers what the memory holds, of a sharded state with the replicas of other nodes'. All of
    that `node` can read it; `address` is of its memory server.
    """

    manifest: Manifest | None = None
    bad: tuple[str, ...] = ()
    copies: tuple[FoundCopy, ...] = ()
    node: str = ""
    address: str = ""
    run: str = ""
    """The run of this rank."""
    foreign: bool = False
    """The checkpoint on disk is another run's, which this one has not taken over."""
    noted: tuple[NotedState, ...] = ()
    """Random states in memory, also of states of which this node has no copy any more."""


@dataclass(frozen=True, slots=True)
class CopyName:
    """Of one copy on one node."""

    node: str
    folder: Folder
    slot: str
    generation: Count
    step: Count


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """Where one copy lies."""

    node: str
    address: str
    folder: Folder
    slot: str
    header: Header

    @property
    def name(self) -> CopyName:
        return CopyName(self.node, self.folder, self.slot, *self.header.version)

    @property
    def common(self) -> bool:
        return self.header.shards is not None and self.header.shards.common

    def is_of(self, rank: int) -> bool:
        """Whether it is that rank's own copy, and no twin's."""
        return self.header.shards is not None and self.header.shards.rank == rank


Places = tuple[CopyPlace, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What is loaded: what the rank `rank` has on its disk, or the copy in its memory; or the shards at `places`."""

    what: Manifest | Header
    rank: int = 0
    places: tuple[Places, ...] = ()
    """By rank of the world that saved it, where its shards are: first its own copies, then those of twins."""

    @property
    def version(self) -> tuple[int, int]:
        return self.what.generation, self.what.step

    @property
    def world_size(self) -> int:
        return self.what.world_size

    @property
    def common(self) -> Places:
        """The copies that have what is the same on all ranks."""
        return tuple(dict.fromkeys(place for places in self.places for place in places if place.common))


@dataclass(frozen=True, slots=True)
class Unusable:
    """A version of which shards are missing: `nodes` have the others."""

    version: tuple[int, int]
    world_size: int
    missing: tuple[int, ...]
    nodes: tuple[str, ...]

    @property
    def reason(self) -> str:
        """One sentence for the log."""
        lost = f"what is the same on all of its {self.world_size} ranks"
        if self.missing:
            lost = f"the shards of {_named('rank', self.missing)} of {self.world_size}"
        return (
            f"step {self.version[1]} of generation {self.version[0]} cannot be loaded: no node that answers has "
            f"{lost}; the others are on {_named('node', self.nodes)}"
        )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A state in memory: the copy that a rank's node has, or a whole version of shards."""

    header: Header
    rank: int = 0
    places: tuple[Places, ...] = ()


def choose_source(offers: Sequence[Offer], bad: BadState | None = None) -> Source | None:
    """See the module's docstring; of equals the lowest rank's. `offers` are by rank.

    None when no rank has ever had a checkpoint, or shards are missing and nothing is on disk. Raises NoUsableCheckpoint
    when some are on disk and none is good.
    """
    # The memory is the agent's, and an agent has one job: what these runs have done is this job's.
    kin = {copy.header.run for offer in offers for copy in offer.copies}
    offers = [replace(offer, foreign=_is_foreign(offer, kin)) for offer in offers]
    candidates = list(_candidates(offers))
    if bad is not None:
        others = [_without(offer, bad) for offer in offers]
        good = [one for one in candidates if not bad.covers(one.header)]
        if good or any(offer.manifest and not offer.foreign for offer in others):
            return _choose(others, good)
    return _choose(offers, candidates)


def _candidates(offers: Sequence[Offer]) -> Iterator[_Candidate]:
    for rank, offer in enumerate(offers):
        yield from (_Candidate(copy.header, rank) for copy in offer.copies if copy.header.shards is None)
    whole = {places[0].header: places for places in _versions(offers) if not _missing(places)}
    for header, places in _finished(whole).items():
        yield _Candidate(header, places=_by_rank(places))


def _is_foreign(offer: Offer, kin: set[str]) -> bool:
    return offer.foreign and offer.manifest is not None and offer.manifest.run not in kin


def _without(offer: Offer, bad: BadState) -> Offer:
    unwanted = offer.manifest is not None and bad.covers(offer.manifest, foreign=offer.foreign)
    return replace(offer, manifest=None) if unwanted else offer


def _choose(offers: Sequence[Offer], candidates: Sequence[_Candidate]) -> Source | None:
    disks = _own_disks(offers, has_copies=bool(candidates))
    if candidates:
        newest = _newest(candidates, offers)
        beyond = [
            ((manifest.generation, manifest.step), place, manifest)
            for manifest, place in disks
            if _is_beyond(manifest, newest.header, offers[0].run)
        ]
        if not beyond:
            return Source(newest.header, newest.rank, newest.places)
        _, place, manifest = max(beyond, key=lambda one: one[:2])
        return Source(manifest, -place)
    if disks:
        manifest, place = max(disks, key=lambda one: (one[0].step, one[0].generation, one[1]))
        return Source(manifest, -place)
    rotten = [f"rank {rank}: {reason}" for rank, offer in enumerate(offers) for reason in offer.bad]
    if rotten:
        raise NoUsableCheckpoint(
            "checkpoints exist and none verifies; not starting again from step 0 by itself. Restore one, or delete "
            f"them to start again. {'; '.join(rotten)}"
        )
    return None


def _own_disks(offers: Sequence[Offer], *, has_copies: bool) -> list[tuple[Manifest, int]]:
    """The checkpoints on disks that may be loaded, each with its rank's place: the greater is the better."""
    disks = [(offer.manifest, -rank, offer.foreign) for rank, offer in enumerate(offers) if offer.manifest]
    has_own = has_copies or not all(foreign for *_, foreign in disks)
    return [(manifest, place) for manifest, place, foreign in disks if not (foreign and has_own)]


def _is_beyond(manifest: Manifest, header: Header, run: str) -> bool:
    if manifest.run != header.run and run in (manifest.run, header.run):
        return manifest.run == run
    return manifest.step > header.resumed_from and (manifest.generation, manifest.step) > header.version


def _newest(candidates: Sequence[_Candidate], offers: Sequence[Offer]) -> _Candidate:
    def order(one: _Candidate) -> tuple[tuple[int, int], bool, bool, int]:
        return one.header.version, not one.header.rng_holes, bool(one.header.sums), -one.rank

    return max([one for one in candidates if _counts(one.header, offers)] or candidates, key=order)


def _counts(header: Header, offers: Sequence[Offer]) -> bool:
    """Whether every rank can go on from it with its own random state, or could not be expected to.

    A rank that has noted none of this generation's states, where others have noted two, is lost with its node.
    """
    if not header.rng_holes or header.partial or header.world_size != len(offers):
        return True
    noted = {
        (one.rank, one.version)
        for offer in offers
        for one in offer.noted
        if (one.version[0], one.world_size) == (header.generation, header.world_size)
    }
    ranks = set(range(header.world_size))
    is_node_lost = {rank for rank, _ in noted} != ranks and len({version for _, version in noted}) > 1
    return is_node_lost or {rank for rank, version in noted if version == header.version} == ranks


def nodes_with(header: Header, offers: Sequence[Offer]) -> set[str]:
    """Where that state is in memory. Its bytes may differ from node to node, the state does not."""
    return {offer.node for offer in offers for copy in offer.copies if copy.header.version == header.version}


# ---------------------------------------------------------------- versions of a sharded state


def without(offer: Offer, left_out: Collection[CopyName]) -> Offer:
    """What is offered but for these copies, which could not be read."""
    copies = (
        copy
        for copy in offer.copies
        if CopyName(offer.node, copy.folder, copy.slot, *copy.header.version) not in left_out
    )
    return replace(offer, copies=tuple(copies)) if left_out else offer


def unusable(
    offers: Sequence[Offer], chosen: Source | None, bad: BadState | None = None
) -> tuple[Unusable, ...]:
    """The versions in memory, newest first, that are of later steps than `chosen` and miss shards.

    Where `chosen` is in memory the newest of them is, as a rule, a copy that a failure has interrupted.
    """
    found = []
    for places in _versions(offers):
        header = places[0].header
        is_later = chosen is None or header.step > chosen.what.step
        if is_later and _missing(places) and not (bad is not None and bad.covers(header)):
            nodes = tuple(sorted({place.node for place in places}))
            lost = tuple(rank for rank, those in enumerate(_by_rank(places)) if not those)
            found.append(Unusable(header.version, header.world_size, lost, nodes))
    return tuple(sorted(found, key=lambda one: one.version, reverse=True))


def _versions(offers: Sequence[Offer]) -> Iterator[list[CopyPlace]]:
    """All copies of shards, those of one version together: none is empty."""
    found: dict[tuple[object, ...], list[CopyPlace]] = {}
    for offer in offers:
        for copy in offer.copies:
            header = copy.header
            if header.shards is not None:
                key = (header.run, *header.version, header.resumed_from, header.world_size)
                place = CopyPlace(offer.node, offer.address, copy.folder, copy.slot, header)
                found.setdefault(key, []).append(place)
    yield from found.values()


def _finished(whole: dict[Header, list[CopyPlace]]) -> dict[Header, list[CopyPlace]]:
    """Those but the ones that a failure has interrupted."""
    with_own = {(header.run, header.version) for header, places in whole.items() if _has_all_own(places)}

    def gives_way(header: Header, places: Sequence[CopyPlace]) -> bool:
        kept = {place.header.shards.keep for place in places if place.header.shards is not None}
        interrupted = (header.run, header.version) not in with_own
        return interrupted and any(
            version is not None and version[0] == header.generation and (header.run, version) in with_own
            for version in kept
        )

    return {header: places for header, places in whole.items() if not gives_way(header, places)}


def _has_all_own(places: Sequence[CopyPlace]) -> bool:
    return all(any(place.is_of(rank) for place in those) for rank, those in enumerate(_by_rank(places)))


def _by_rank(places: Sequence[CopyPlace]) -> tuple[Places, ...]:
    found: list[list[CopyPlace]] = [[] for _ in range(places[0].header.world_size)]
    twins: list[list[CopyPlace]] = [[] for _ in found]
    for place in places:
        assert place.header.shards is not None
        found[place.header.shards.rank].append(place)
        for twin in place.header.shards.twins:
            twins[twin].append(place)
    return tuple((*own, *others) for own, others in zip(found, twins, strict=True))


def _missing(places: Sequence[CopyPlace]) -> bool:
    return not (all(_by_rank(places)) and any(place.common for place in places))


def _named(kind: str, which: Sequence[object]) -> str:
    shown = ", ".join(map(str, which[:_MOST_NAMED]))
    more = f" and {len(which) - _MOST_NAMED} more" if len(which) > _MOST_NAMED else ""
    return f"{kind}{'s' * (len(which) > 1)} {shown}{more}"
