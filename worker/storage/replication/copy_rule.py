"""When all ranks may copy their shards once more, and which version of them must live through it.

Each rank has two slots. A version is *whole* when every rank has sealed its copy of it, and *settled* once all of them
were acknowledged: every partner has its replica, or is known to be out of reach. At each `remember` the ranks exchange
what their slots hold (`Readiness`), and all come to the same `CopyVerdict`. It names the *protected* version: the
newest settled one of this generation, or, before there is one, the version that was loaded. No rank overwrites a slot
that holds it, and no partner a replica of it (`keep` in the header of the new copy), until a later verdict names a
newer one. So at any instant one version is on its nodes whole, and from the first settled one on its replicas, too.

While the newest whole version is not settled yet, the ranks do not copy: there is no third slot, and to overwrite it
would lose it if a worker died in the middle. The same holds for the loaded version, whose replicas may be on nodes that
are gone, or may never have been made: the other slot has the one that was settled before it. `save` and the last step
of a planned change wait for that, too, but not for ever: then they overwrite the version that is not settled, never
the one that is (`must`).

A version that only some ranks have, as where the memory was full on one, will never be whole: it is overwritten first.

Only versions of this generation can be whole here. Copies of the loaded one may be of another number of ranks.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..memory.slots import overwrite_order

Version = tuple[int, int]
"""Generation and step, see `Header.version`."""


class Replication(enum.IntEnum):
    """How far the replicas of one rank's copy are."""

    PENDING = 0
    DEGRADED = 1
    """A partner is out of reach, see `Acks.unreachable`; all others have it."""
    ACKNOWLEDGED = 2
    """All partners have it, or it needs none."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot of one rank. `version` is None while the slot holds no sealed copy.

    `held`: it is being read, so it cannot be overwritten now. `writing`: a copy into it has begun and is not sealed.
    """

    version: Version | None = None
    replication: Replication = Replication.PENDING
    held: bool = False
    writing: bool = False


SlotStates = tuple[SlotState, SlotState]
"""In the order of `SLOT_NAMES`."""

_SLOT = struct.Struct("!qqB")
_NO_VERSION: Version = (-1, -1)
_HELD, _WRITING = 4, 8


@dataclass(frozen=True, slots=True)
class Readiness:
    """What one rank brings: its slots."""

    slots: SlotStates

    def to_bytes(self) -> bytes:
        """Of one size always, as collectives need it."""
        return b"".join(
            _SLOT.pack(
                *(slot.version or _NO_VERSION), slot.replication | _HELD * slot.held | _WRITING * slot.writing
            )
            for slot in self.slots
        )

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def from_bytes(raw: bytes) -> Readiness:
        """The same object for the same bytes, which most of thousands of ranks bring. Raises ValueError."""
        if len(raw) != READINESS_BYTES:
            raise ValueError(f"readiness of {len(raw)} bytes, expected {READINESS_BYTES}")
        first, second = (
            SlotState(
                None if (generation, step) == _NO_VERSION else (generation, step),
                Replication(flags & 3),
                bool(flags & _HELD),
                bool(flags & _WRITING),
            )
            for generation, step, flags in _SLOT.iter_unpack(raw)
        )
        return Readiness((first, second))


READINESS_BYTES = 2 * _SLOT.size


class Decision(enum.Enum):
    """What all ranks do."""

    COPY = "copy"
    """Each rank that does not have the version already, see `has`, into its `slot_to_overwrite`."""
    HAVE = "have"
    """All have this very version already."""
    WAIT = "wait"
    """They cannot copy now; a later call may."""


@dataclass(frozen=True, slots=True)
class CopyVerdict:
    """The same on all ranks. `protected` is the version that no rank overwrites; `reason` names the rank that waits."""

    decision: Decision
    protected: Version | None
    reason: str = ""

    @property
    def copies(self) -> bool:
        return self.decision is Decision.COPY


def may_copy(
    everyone: Sequence[Readiness], version: Version, protected: Version | None, *, must: bool = False
) -> CopyVerdict:
    """See the module's docstring; `everyone` is by rank, and `version` the one that they would copy.

    protected: the version that the verdict before has named: an acknowledgment that was seen once counts, whatever
        becomes of the file that told of it. Before the first one it is the version that was loaded out of memory, if
        any.
    must: do not wait for acknowledgments any longer.
    """
    some = _distinct(everyone)
    generation = version[0]
    protected = _newer(settled(everyone, generation), protected)
    for rank, one in some.items():
        if any(slot.writing for slot in one.slots):
            return CopyVerdict(
                Decision.WAIT, protected, f"the copy before is not complete yet on rank {rank}"
            )
    whole = max(_whole(some.values(), generation), default=None)
    if whole == version:
        return CopyVerdict(Decision.HAVE, protected)
    # The loaded version is all that there is, as long as none of this generation is whole.
    newest = _newer(whole, protected)
    if newest is not None and not must and (newest != protected or newest[0] != generation):
        for rank, one in some.items():
            if replication_of(one.slots, newest) is Replication.PENDING:
                reason = (
                    f"the copy of step {newest[1]} of rank {rank} is not acknowledged by its partners yet"
                )
                return CopyVerdict(Decision.WAIT, protected, reason)
    for rank, one in some.items():
        if not has(one.slots, version) and slot_to_overwrite(one.slots, protected) is None:
            return CopyVerdict(Decision.WAIT, protected, f"the older slot of rank {rank} is being read")
    return CopyVerdict(Decision.COPY, protected)


def settled(everyone: Sequence[Readiness], generation: int) -> Version | None:
    """The newest version of this generation that every rank has sealed, with those replicas that can be had."""
    return max(_settled(_distinct(everyone).values(), generation), default=None)


def oldest_needed(everyone: Sequence[Readiness], generation: int) -> Version | None:
    """Replicas of what is older are of no more use, on no node: None while some may be.

    That is the newest version of which all partners have their replicas. While a partner is out of reach, a node that
    is lost may leave the version before as the newest whole one: until all ranks have two newer ones.
    """
    some = _distinct(everyone).values()
    found = sorted(_settled(some, generation))
    acknowledged = [
        version
        for version in found
        if all(replication_of(one.slots, version) is Replication.ACKNOWLEDGED for one in some)
    ]
    return max([*acknowledged, *found[:-1]], default=None)


def has(slots: SlotStates, version: Version) -> bool:
    """Whether this rank has that copy already, where others have not: it makes no second one."""
    return any(slot.version == version for slot in slots)


def slot_to_overwrite(slots: SlotStates, protected: Version | None) -> int | None:
    """The place of the slot that takes the next copy: an empty one, else the older; None: none is free."""
    order = overwrite_order([(slot.version, True) if slot.version is not None else None for slot in slots])
    kept = [protected is not None and slot.version == protected for slot in slots]
    return next(
        (place for place in order if not (kept[place] or slots[place].held or slots[place].writing)), None
    )


def replication_of(slots: SlotStates, version: Version) -> Replication | None:
    """None: this rank has no copy of that version."""
    return max((slot.replication for slot in slots if slot.version == version), default=None)


def _distinct(everyone: Sequence[Readiness]) -> dict[int, Readiness]:
    """By the lowest rank that brings it: most of thousands of ranks bring the very same, see `Readiness.from_bytes`."""
    ranks = dict(zip(map(id, reversed(everyone)), reversed(range(len(everyone))), strict=True))
    return {rank: everyone[rank] for rank in sorted(ranks.values())}


def _settled(everyone: Collection[Readiness], generation: int) -> list[Version]:
    return [
        version
        for version in _whole(everyone, generation)
        if all(replication_of(one.slots, version) is not Replication.PENDING for one in everyone)
    ]


def _whole(everyone: Iterable[Readiness], generation: int) -> Iterable[Version]:
    versions = [
        {slot.version for slot in one.slots if slot.version and slot.version[0] == generation}
        for one in everyone
    ]
    return set.intersection(*versions)


def _newer(one: Version | None, other: Version | None) -> Version | None:
    return max((version for version in (one, other) if version is not None), default=None)
