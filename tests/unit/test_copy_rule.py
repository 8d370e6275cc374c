"""When all ranks may copy their shards, and what they keep meanwhile."""

from __future__ import annotations

import itertools

import pytest

from elastic_agent.worker.storage.replication.copy_rule import (
    READINESS_BYTES,
    Decision,
    Readiness,
    Replication,
    SlotState,
    may_copy,
    oldest_needed,
    settled,
    slot_to_overwrite,
)

PENDING, DEGRADED, ACKNOWLEDGED = Replication
EMPTY = SlotState()
LOADED = (3, 90)
VERSION = (4, 120)


def slot(step: int, replication: Replication = ACKNOWLEDGED, *, held: bool = False) -> SlotState:
    return SlotState((4, step), replication, held)


def old(step: int = 90, replication: Replication = ACKNOWLEDGED) -> SlotState:
    return SlotState((3, step), replication)


def rank(*slots: SlotState) -> Readiness:
    first, second = (*slots, EMPTY, EMPTY)[:2]
    return Readiness((first, second))


WRITING = SlotState(writing=True)


@pytest.mark.parametrize(
    ("everyone", "before", "decision", "protected"),
    [
        # the first copy of all
        ([rank(), rank()], None, Decision.COPY, None),
        # the first one after a load; the other slot has what was settled before
        ([rank(old(), old(80)), rank()], LOADED, Decision.COPY, LOADED),
        ([rank(old(80, PENDING), old()), rank()], LOADED, Decision.COPY, LOADED),
        ([rank(old(), old(80)), rank(old(80), old(90, PENDING))], LOADED, Decision.WAIT, LOADED),
        ([rank(slot(100)), rank(old(90, PENDING))], LOADED, Decision.WAIT, LOADED),
        # an acknowledgment that an earlier verdict knew of
        (
            [rank(slot(110), slot(100)), rank(slot(110, PENDING), slot(100))],
            (4, 110),
            Decision.COPY,
            (4, 110),
        ),
        # the rule at work: all have the newest, with its replicas
        ([rank(slot(100), slot(110)), rank(slot(110), slot(100))], LOADED, Decision.COPY, (4, 110)),
        ([rank(slot(110), old()), rank(slot(110))], LOADED, Decision.COPY, (4, 110)),
        # a partner is out of reach
        ([rank(slot(100), slot(110, DEGRADED)), rank(slot(110), slot(100))], LOADED, Decision.COPY, (4, 110)),
        # the newest has not reached all partners
        ([rank(slot(100), slot(110)), rank(slot(110, PENDING), slot(100))], LOADED, Decision.WAIT, (4, 100)),
        ([rank(slot(110), old()), rank(slot(110, PENDING))], LOADED, Decision.WAIT, LOADED),
        # a GPU is still copying
        ([rank(slot(100), slot(110)), rank(slot(100), WRITING)], LOADED, Decision.WAIT, (4, 100)),
        # the memory of rank 1 was full at step 110: this version will never be whole
        ([rank(slot(100), slot(110)), rank(slot(100))], LOADED, Decision.COPY, (4, 100)),
        ([rank(slot(100), slot(110)), rank(slot(90), slot(100))], LOADED, Decision.COPY, (4, 100)),
        # nor does it matter to anyone that it has not reached the partners
        ([rank(slot(100), slot(110, PENDING)), rank(slot(100))], LOADED, Decision.COPY, (4, 100)),
        # the older slot is being written to disk
        ([rank(slot(100, held=True), slot(110)), rank(slot(110))], LOADED, Decision.WAIT, (4, 110)),
        # the newer one is, which is no matter
        ([rank(slot(100), slot(110, held=True)), rank(slot(110))], LOADED, Decision.COPY, (4, 110)),
        # all have this step already, as when a step is remembered and then saved
        ([rank(slot(120, PENDING)), rank(slot(120, PENDING))], LOADED, Decision.HAVE, LOADED),
        # one has not
        ([rank(slot(120), slot(110)), rank(slot(110))], LOADED, Decision.COPY, (4, 110)),
        ([rank(slot(120), slot(110, held=True)), rank(slot(110))], LOADED, Decision.COPY, (4, 110)),
        # the same step of the generation before is another version
        ([rank(old(120), old()), rank(old(120))], (3, 120), Decision.COPY, (3, 120)),
    ],
)
def test_the_rule(
    everyone: list[Readiness],
    before: tuple[int, int] | None,
    decision: Decision,
    protected: tuple[int, int] | None,
) -> None:
    found = may_copy(everyone, VERSION, before)
    assert (found.decision, found.protected) == (decision, protected), found
    assert bool(found.reason) == (decision is Decision.WAIT)


def test_of_many_ranks_with_one_readiness_the_one_that_waits_is_named() -> None:
    raw = rank(slot(110), slot(100)).to_bytes()
    alike = [Readiness.from_bytes(raw) for _ in range(4)]
    found = may_copy([*alike, rank(slot(110, PENDING), slot(100)), *alike], VERSION, LOADED)
    assert (found.decision, found.protected) == (Decision.WAIT, (4, 100))
    assert "of rank 4 " in found.reason


def test_a_copy_that_must_be_made_overwrites_the_one_without_replicas() -> None:
    ranks = [rank(slot(100), slot(110, PENDING)), rank(slot(110), slot(100))]
    found = may_copy(ranks, VERSION, LOADED, must=True)
    assert (found.decision, found.protected) == (Decision.COPY, (4, 100))
    assert [slot_to_overwrite(one.slots, found.protected) for one in ranks] == [1, 0]


@pytest.mark.parametrize("must", [False, True])
def test_even_a_copy_that_must_be_made_waits_for_readers_and_writers(must: bool) -> None:
    held = [rank(slot(100), slot(110)), rank(slot(110), slot(100, held=True))]
    writing = [rank(slot(110), WRITING)] * 2
    for ranks in (held, writing):
        found = may_copy(ranks, VERSION, LOADED, must=must)
        assert (found.decision, found.protected) == (Decision.WAIT, (4, 110))


@pytest.mark.parametrize(
    ("slots", "protected", "place"),
    [
        ((EMPTY, EMPTY), None, 0),
        ((slot(100), EMPTY), None, 1),
        ((slot(110), slot(100)), (4, 110), 1),
        ((slot(100), slot(110)), (4, 110), 0),
        # a version that is newer than the protected one
        ((slot(100), slot(110)), (4, 100), 1),
        # neither is to be kept: the older, but not while it is read
        ((old(80), slot(110)), (4, 120), 0),
        ((slot(80, held=True), slot(110)), (4, 120), 1),
        ((slot(100, held=True), slot(110)), (4, 110), None),
        ((WRITING, slot(110)), (4, 110), None),
    ],
)
def test_the_slot_to_overwrite(
    slots: tuple[SlotState, SlotState], protected: tuple[int, int] | None, place: int | None
) -> None:
    assert slot_to_overwrite(slots, protected) == place


def test_what_is_settled() -> None:
    both = [rank(slot(100), slot(110)), rank(slot(100), slot(110, PENDING))]
    assert settled(both, 4) == (4, 100)
    assert settled([rank(slot(110)), rank(slot(100))], 4) is None
    # copies of an older generation may be of another number of ranks: that they are all here says nothing
    assert settled([rank(old())] * 2, 4) is None


@pytest.mark.parametrize(
    ("everyone", "needed"),
    [
        # the newest has all of its replicas
        ([rank(slot(100), slot(110))] * 2, (4, 110)),
        ([rank(slot(110), old())] * 2, (4, 110)),
        # it has not, yet
        ([rank(slot(100), slot(110)), rank(slot(100), slot(110, PENDING))], (4, 100)),
        # a partner is out of reach: what came before may still be all that is left when a node is lost
        ([rank(slot(100), slot(110)), rank(slot(100), slot(110, DEGRADED))], (4, 100)),
        ([rank(slot(110, DEGRADED), old())] * 2, None),
        # what was before two versions is on no rank any more
        ([rank(slot(100, DEGRADED), slot(110, DEGRADED))] * 2, (4, 100)),
        ([rank(slot(100, PENDING), slot(110, DEGRADED))] * 2, None),
        ([rank(old())] * 2, None),
    ],
)
def test_which_replicas_are_needed_no_more(everyone: list[Readiness], needed: tuple[int, int] | None) -> None:
    assert oldest_needed(everyone, 4) == needed


def test_what_was_settled_once_is_kept_for_good() -> None:
    ranks = [rank(slot(110), slot(100)), rank(slot(110), slot(100))]
    protected = may_copy(ranks, VERSION, LOADED).protected
    forgotten = [ranks[0], rank(slot(110, PENDING), slot(100))]
    assert protected == (4, 110)
    assert may_copy(forgotten, VERSION, protected, must=True).protected == (4, 110)


STATES = [
    EMPTY,
    WRITING,
    old(),
    old(90, PENDING),
    slot(100),
    slot(100, PENDING),
    slot(110),
    slot(110, PENDING, held=True),
]


def test_of_all_states_of_two_ranks_a_whole_version_lives_through_the_copy() -> None:
    pairs = [
        one
        for one in itertools.product(STATES, STATES)
        if one[0].version != one[1].version or one[0] == EMPTY
    ]
    for first, second in itertools.product(pairs, pairs):
        ranks = [rank(*first), rank(*second)]
        for must in (False, True):
            found = may_copy(ranks, VERSION, LOADED, must=must)
            done = settled(ranks, 4)
            assert found.protected == (done or LOADED)
            if not found.copies:
                continue
            for one in ranks:
                place = slot_to_overwrite(one.slots, found.protected)
                assert place is not None
                lost = one.slots[place]
                assert not lost.held
                assert lost.version != found.protected
                whole = all(lost.version in {s.version for s in other.slots} for other in ranks)
                if not must and whole and lost.version and lost.version[0] == 4:
                    assert done is not None
                    assert lost.version < done


@pytest.mark.parametrize("slots", list(itertools.product(STATES, STATES)))
def test_readiness_travels_in_a_fixed_size(slots: tuple[SlotState, SlotState]) -> None:
    ready = Readiness(slots)
    raw = ready.to_bytes()
    assert len(raw) == READINESS_BYTES
    assert Readiness.from_bytes(raw) == ready


@pytest.mark.parametrize("raw", [b"", bytes(READINESS_BYTES - 1), b"\xff" * READINESS_BYTES])
def test_other_bytes_are_no_readiness(raw: bytes) -> None:
    with pytest.raises(ValueError):
        Readiness.from_bytes(raw)
