"""The rules of the store, with time as an argument."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.rendezvous.errors import Compacted, LeaseExpired, StoreError
from elastic_agent.rendezvous.store.interface import MOST_REQUEST_BYTES, Change, Compare, Delete, Entry, Put
from elastic_agent.rendezvous.store.kv_state import KvState


def put(kv: KvState, key: str, value: str = "", lease: int | None = None, now: float = 0.0) -> int:
    return kv.transact((), (Put(key, value, lease),), now).revision


@pytest.mark.parametrize(
    ("compares", "holds"),
    [
        ((), True),
        ((Compare("a", 1),), True),
        ((Compare("a", 0),), False),
        ((Compare("a", 2),), False),
        ((Compare("absent", 0),), True),
        ((Compare("absent", 1),), False),
        ((Compare("a", 1), Compare("b", 2)), True),
        ((Compare("a", 1), Compare("b", 1)), False),
    ],
)
def test_writes_are_done_if_every_compare_holds(compares: tuple[Compare, ...], holds: bool) -> None:
    kv = KvState()
    put(kv, "a"), put(kv, "b")
    outcome = kv.transact(compares, (Put("c", ""),), 0.0)
    assert outcome.succeeded is holds
    assert outcome.revision == kv.revision == (3 if holds else 2)
    assert len(kv.read(("c",), 0.0).entries) == holds


def test_the_outcome_shows_the_compared_keys_as_they_stand_after_it() -> None:
    kv = KvState()
    put(kv, "a", "old")
    outcome = kv.transact((Compare("a", 1), Compare("b", 0)), (Put("a", "new"), Put("b", "")), 0.0)
    assert outcome.entries == (Entry("a", "new", 1, 2), Entry("b", "", 2, 2))
    outcome = kv.transact((Compare("a", 1), Compare("x", 0)), (Delete("a"),), 0.0)
    assert outcome.entries == (Entry("a", "new", 1, 2), None)


@pytest.mark.parametrize(
    ("compares", "writes", "fits"),
    [(0, 128, True), (0, 129, False), (64, 64, True), (65, 64, False), (128, 0, True), (129, 0, False)],
)
def test_a_transaction_has_no_more_operations_than_etcd_takes(compares: int, writes: int, fits: bool) -> None:
    kv = KvState()
    asked = (
        tuple(Compare(f"c{i}", 0) for i in range(compares)),
        tuple(Put(f"w{i}", "") for i in range(writes)),
    )
    if fits:
        assert kv.transact(*asked, 0.0).succeeded
        return
    with pytest.raises(StoreError, match="operations, at most 128"):
        kv.transact(*asked, 0.0)
    assert kv.revision == 0


def test_a_transaction_has_no_more_bytes_than_etcd_takes() -> None:
    kv = KvState()
    put(kv, "a", "\u00fc" * (MOST_REQUEST_BYTES // 2))
    with pytest.raises(StoreError, match="bytes, at most"):
        put(kv, "a", "\u00fc" * (MOST_REQUEST_BYTES // 2 + 1))
    assert kv.revision == 1


def test_a_transaction_that_writes_nothing_takes_no_revision() -> None:
    kv = KvState()
    put(kv, "a")
    assert kv.transact((), (), 0.0).revision == 1
    assert kv.transact((), (Delete("absent"),), 0.0).revision == 1


# What happens to a lease of 10 s, granted at 0, with the key "k" under it.


def keep_alive(at: float) -> Callable[[KvState, int], None]:
    return lambda kv, lease: kv.keep_alive(lease, at)


def revoke(kv: KvState, lease: int) -> None:
    kv.revoke(lease)


def put_free(kv: KvState, lease: int) -> None:
    put(kv, "k", now=1.0)


@pytest.mark.parametrize(
    ("events", "now", "lives"),
    [
        ((), 9.999, True),
        ((), 10.0, False),
        ((keep_alive(9.0),), 18.999, True),
        ((keep_alive(9.0),), 19.0, False),
        ((keep_alive(9.0), keep_alive(1.0)), 11.0, False),
        ((revoke,), 0.0, False),
        ((revoke, revoke), 0.0, False),
        ((put_free,), 100.0, True),
        ((put_free, revoke), 1.0, True),
    ],
)
def test_a_key_lives_as_long_as_its_lease(
    events: tuple[Callable[[KvState, int], None], ...], now: float, lives: bool
) -> None:
    kv = KvState()
    lease = kv.grant(10.0, now=0.0)
    put(kv, "k", lease=lease)
    for event in events:
        event(kv, lease)
    assert (len(kv.read(("k",), now).entries) == 1) is lives


def test_a_lease_that_is_due_is_gone_even_if_nobody_looked() -> None:
    kv = KvState()
    lease = kv.grant(10.0, now=0.0)
    put(kv, "k", lease=lease)
    with pytest.raises(LeaseExpired, match=f"lease {lease} "):
        kv.keep_alive(lease, now=10.0)
    assert kv.changes(("",), 1) == (Change(2, "k", None),)
    with pytest.raises(LeaseExpired, match="'other' was not written"):
        kv.transact((), (Put("free", ""), Put("other", "", lease)), 10.0)
    assert kv.read(("",), 10.0).entries == ()


def test_a_lease_without_end_lives_until_it_is_revoked() -> None:
    kv = KvState()
    lease = kv.grant(math.inf, 0.0)
    put(kv, "k", lease=lease)
    kv.keep_alive(lease, 1e9)
    assert kv.expire(2e9) == []
    kv.revoke(lease)
    assert kv.read(("k",), 2e9).entries == ()


def test_the_next_expiry_is_the_earliest() -> None:
    kv = KvState()
    assert kv.next_expiry() is None
    lease = kv.grant(10.0, 0.0)
    kv.grant(5.0, 1.0)
    assert kv.next_expiry() == 6.0
    kv.expire(6.0)
    assert kv.next_expiry() == 10.0
    kv.keep_alive(lease, 7.0)
    assert kv.next_expiry() == 17.0


@pytest.mark.parametrize(("after", "compacted"), [(0, True), (2, True), (3, False), (5, False)])
def test_a_watch_behind_the_history_is_told(after: int, compacted: bool) -> None:
    kv = KvState(history=3)
    for n in range(5):
        put(kv, f"k{n}")
    if compacted:
        with pytest.raises(Compacted, match="kept from 4 on"):
            kv.changes(("",), after)
    else:
        assert [change.revision for change in kv.changes(("",), after)] == list(range(after + 1, 6))


def test_a_revision_that_is_only_half_remembered_is_forgotten() -> None:
    kv = KvState(history=3)
    kv.transact((), (Put("a", ""), Put("b", "")), 0.0)
    put(kv, "c"), put(kv, "d")
    with pytest.raises(Compacted):
        kv.changes(("",), 0)
    assert [change.key for change in kv.changes(("",), 1)] == ["c", "d"]


# The kv against a model that keeps everything and looks at all of it each time.

KEYS = st.sampled_from(["a", "a/1", "a/2", "b"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(1, 5)),
        st.tuples(st.just("keep"), st.integers(0, 3)),
        st.tuples(st.just("revoke"), st.integers(0, 3)),
        st.tuples(st.just("pass"), st.integers(1, 4)),
        st.tuples(
            st.just("write"),
            st.lists(st.tuples(KEYS, st.integers(0, 1)), max_size=2),
            st.lists(
                st.tuples(KEYS, st.sampled_from(["free", "leased", "delete"])),
                max_size=3,
                unique_by=lambda w: w[0],
            ),
            st.integers(0, 3),
        ),
    ),
    max_size=30,
)


@given(STEPS)
def test_any_sequence_of_steps_keeps_the_rules(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    kv, now = KvState(), 0.0
    leases: list[int] = []
    due: dict[int, float] = {}
    ttl: dict[int, float] = {}
    model: dict[str, tuple[int, int, int | None]] = {}  # key: created, modified, lease
    revision = 0

    def drop(lease: int) -> None:
        nonlocal revision
        del due[lease]
        orphans = [key for key, (_, _, owner) in model.items() if owner == lease]
        revision += bool(orphans)
        for key in orphans:
            del model[key]

    for step in steps:
        for lease in sorted(lease for lease, at in due.items() if at <= now):
            drop(lease)
        match step:
            case "grant", ttl_s:
                leases.append(kv.grant(ttl_s, now))
                ttl[leases[-1]], due[leases[-1]] = ttl_s, now + ttl_s
            case "pass", seconds:
                now += seconds
            case ("keep" | "revoke") as what, which if which < len(leases):
                lease = leases[which]
                if what == "revoke":
                    kv.expire(now)
                    kv.revoke(lease)
                    if lease in due:
                        drop(lease)
                elif lease in due:
                    kv.keep_alive(lease, now)
                    due[lease] = now + ttl[lease]
                else:
                    with pytest.raises(LeaseExpired):
                        kv.keep_alive(lease, now)
            case "write", asked, wanted, which:
                lease = leases[which] if which < len(leases) else 999
                compares = tuple(
                    Compare(key, model[key][1] + wrong if key in model else wrong) for key, wrong in asked
                )
                writes = tuple(
                    Delete(key) if how == "delete" else Put(key, "", lease if how == "leased" else None)
                    for key, how in wanted
                )
                holds = not any(wrong for _, wrong in asked)
                if holds and lease not in due and any(how == "leased" for _, how in wanted):
                    with pytest.raises(LeaseExpired):
                        kv.transact(compares, writes, now)
                    continue
                assert kv.transact(compares, writes, now).succeeded is holds
                if holds and any(how != "delete" or key in model for key, how in wanted):
                    revision += 1
                    for key, how in wanted:
                        if how == "delete":
                            model.pop(key, None)
                        else:
                            created = model[key][0] if key in model else revision
                            model[key] = (created, revision, lease if how == "leased" else None)
        seen = {
            entry.key: (entry.create_revision, entry.mod_revision) for entry in kv.read(("",), now).entries
        }
        for lease in sorted(lease for lease, at in due.items() if at <= now):
            drop(lease)
        assert seen == {key: (created, modified) for key, (created, modified, _) in model.items()}
        assert kv.revision == revision
        replayed: dict[str, Entry] = {}
        for change in kv.changes(("",), 0):
            replayed.pop(change.key, None)
            if change.entry is not None:
                replayed[change.key] = change.entry
        assert replayed.keys() == seen.keys()
        oldest = [entry.key for entry in kv.read((), now, oldest_under="a/").entries]
        under = [(created, key) for key, (created, _) in seen.items() if key.startswith("a/")]
        assert oldest == ([min(under)[1]] if under else [])
