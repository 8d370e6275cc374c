"""What every store keeps, whatever carries it."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from elastic_agent.agent.configuration.rendezvous import STORES
from elastic_agent.rendezvous.c10d.store import C10dStore
from elastic_agent.rendezvous.errors import Compacted, LeaseExpired, StoreClosed, StoreError
from elastic_agent.rendezvous.etcd.store import EtcdStore
from elastic_agent.rendezvous.local.store import LocalStore, store_file
from elastic_agent.rendezvous.store.interface import (
    MOST_OPERATIONS,
    Change,
    Compare,
    Delete,
    Entry,
    Outcome,
    Put,
    ScopedStore,
    Store,
    Watch,
)
from elastic_agent.rendezvous.store.kv_state import HISTORY, KvState
from elastic_agent.rendezvous.store.memory import MEMORY, MemoryStore
from elastic_agent.rendezvous.store.store_kind import KEEP_ALIVES_PER_TTL
from tests.etcd_servers import EtcdCluster, etcd_access
from tests.patience import PATIENCE_S, in_thread, next_changes, put


@dataclass
class Kind:
    """One way to reach a store: `connect` gives another handle on the same one."""

    connect: Callable[[], Store]
    state_is_here: bool
    compact: Callable[[], None] | None = None
    """Forget the changes up to now; None for a store that forgets by itself, after HISTORY changes."""
    keeps_newest: bool = False
    """Of each key, for a watch that begins in the past."""
    prefix: str = field(default_factory=lambda: f"{uuid.uuid4().hex[:8]}/")
    """Of this test alone: some stores are shared by all tests."""


KINDS = (
    "memory",
    "scoped",
    "c10d-host",
    "c10d-client",
    "c10d-two-processes",
    "local",
    "local-many-handles",
    "etcd",
)


@pytest.fixture(scope="session")
def clients() -> Iterator[Callable[[int, int], Store]]:
    """The first, second, ... client of the store on a port: made once, for every test."""
    made: dict[tuple[int, int], Store] = {}

    def client(port: int, number: int) -> Store:
        if (port, number) not in made:
            made[port, number] = new_client(port)
        return made[port, number]

    yield client
    for store in made.values():
        store.close()


def new_client(port: int) -> Store:
    return C10dStore.connect("127.0.0.1", port, "job", PATIENCE_S, request_timeout_s=PATIENCE_S)


@pytest.fixture(scope="session")
def etcd_clients() -> Iterator[Callable[[EtcdCluster, int], Store]]:
    made: dict[int, Store] = {}

    def client(cluster: EtcdCluster, number: int) -> Store:
        if number not in made:
            made[number] = new_etcd_client(cluster)
        return made[number]

    yield client
    for store in made.values():
        store.close()


def new_etcd_client(cluster: EtcdCluster) -> Store:
    return EtcdStore.connect(
        etcd_access(cluster.endpoints, "job", PATIENCE_S * KEEP_ALIVES_PER_TTL, PATIENCE_S)
    )


@pytest.fixture(scope="session")
def shared_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For all tests that do it no harm; open as long as a daemon would have it open."""
    file = store_file(tmp_path_factory.mktemp("local"), "pool")
    with closing(LocalStore.connect(file, PATIENCE_S, make=True)):
        yield file


def local_client(request: pytest.FixtureRequest) -> Store:
    file = request.getfixturevalue("shared_file")
    store = LocalStore.connect(file, PATIENCE_S, request_timeout_s=PATIENCE_S)
    request.addfinalizer(store.close)
    return store


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, clients: Callable[[int, int], Store]) -> Kind:
    memory, numbers = MemoryStore(), itertools.count()
    match request.param:
        case "memory":
            return Kind(lambda: memory, True)
        case "scoped":
            return Kind(lambda: ScopedStore(memory, "runs/j/"), True)
        case "c10d-host":
            host, _ = request.getfixturevalue("shared_host")
            return Kind(lambda: host, True)
        case "c10d-client":
            _, port = request.getfixturevalue("shared_host")
            return Kind(lambda: clients(port, next(numbers)), True)
        case "local":
            one = local_client(request)
            return Kind(lambda: one, False, keeps_newest=True)
        case "local-many-handles":
            return Kind(lambda: local_client(request), False, keeps_newest=True)
        case "etcd":
            cluster, etcd_clients = map(request.getfixturevalue, ("shared_etcd", "etcd_clients"))
            return Kind(lambda: etcd_clients(cluster, next(numbers)), False, cluster.compact)
    port = request.getfixturevalue("shared_host_process").port
    return Kind(lambda: clients(port, next(numbers)), False)


@pytest.fixture(params=KINDS)
def closable(request: pytest.FixtureRequest) -> Store:
    """A store that this test may close."""
    match request.param:
        case "memory":
            return MemoryStore()
        case "scoped":
            return ScopedStore(MemoryStore(), "runs/j/")
        case "c10d-host":
            return request.getfixturevalue("c10d_host")[0]  # type: ignore[no-any-return]
        case "c10d-client":
            return new_client(request.getfixturevalue("shared_host")[1])
        case "local" | "local-many-handles":
            return local_client(request)
        case "etcd":
            return new_etcd_client(request.getfixturevalue("shared_etcd"))
    return new_client(request.getfixturevalue("shared_host_process").port)


@pytest.fixture
def store(kind: Kind) -> Store:
    return kind.connect()


@pytest.fixture
def at(kind: Kind) -> Callable[[str], str]:
    """Puts a key under this test's prefix."""
    return lambda key: kind.prefix + key


# Transactions


def test_a_key_is_created_only_if_absent(store: Store, at: Callable[[str], str]) -> None:
    first = store.transact((Compare(at("k"), 0),), (Put(at("k"), "mine"),))
    second = store.transact((Compare(at("k"), 0),), (Put(at("k"), "yours"),))
    mine = Entry(at("k"), "mine", first.revision, first.revision)
    assert first == Outcome(True, first.revision, (mine,))
    assert second == Outcome(False, first.revision, (mine,))


def test_a_write_keeps_the_create_revision_and_moves_the_mod_revision(
    store: Store, at: Callable[[str], str]
) -> None:
    created = put(store, at("k"), "1")
    updated = put(store, at("k"), "2")
    assert updated > created
    assert store.read((at("k"),)).entries == (Entry(at("k"), "2", created, updated),)
    store.transact((), (Delete(at("k")),))
    again = put(store, at("k"), "3")
    assert store.read((at("k"),)).entries == (Entry(at("k"), "3", again, again),)


def test_all_writes_of_a_transaction_have_one_revision_or_none_is_done(
    store: Store, at: Callable[[str], str]
) -> None:
    before = put(store, at("gone"))
    done = store.transact(
        (Compare(at("gone"), before),), (Put(at("a"), "1"), Put(at("b"), "2"), Delete(at("gone")))
    )
    assert [(e.key, e.mod_revision) for e in store.read((at(""),)).entries] == [
        (at("a"), done.revision),
        (at("b"), done.revision),
    ]
    refused = store.transact(
        (Compare(at("a"), done.revision), Compare(at("b"), 1)), (Put(at("a"), "x"), Delete(at("b")))
    )
    assert not refused.succeeded
    assert [e.value for e in store.read((at(""),)).entries] == ["1", "2"]
    assert [e.key if e else None for e in refused.entries] == [at("a"), at("b")]


@pytest.mark.parametrize("token", ["of nobody", "of the state before", "of a state to come"])
def test_a_state_is_replaced_only_by_who_has_seen_it(
    store: Store, at: Callable[[str], str], token: str
) -> None:
    """The revision at which a state was seen is the token for the next; whoever is refused is told what stands."""
    key = at("state")
    assert store.read((key,)).entries == ()
    before, seen = put(store, key, "before"), put(store, key, "seen")
    wrong = {"of nobody": 0, "of the state before": before, "of a state to come": seen + 1000}[token]
    refused = store.transact((Compare(key, wrong),), (Put(key, "wrong"),))
    standing = Entry(key, "seen", before, seen)
    assert (refused.succeeded, refused.entries) == (False, (standing,))
    assert store.read((key,)).entries == (standing,)
    done = store.transact((Compare(key, seen),), (Put(key, "right"),))
    assert done.succeeded
    assert done.entries == (Entry(key, "right", before, done.revision),)


def test_every_store_takes_as_many_operations_as_etcd_and_no_more(
    store: Store, at: Callable[[str], str]
) -> None:
    compares = tuple(Compare(at(f"c{i}"), 0) for i in range(64))
    deletes = tuple(Delete(at(f"d{i}")) for i in range(63))
    assert store.transact(compares, (Put(at("k"), "1"), *deletes)).succeeded
    with pytest.raises(StoreError, match=r"operations"):
        store.transact(compares, (Put(at("k"), "2"), Delete(at("d63")), *deletes))
    assert store.read((at("k"),)).entries[0].value == "1"


def test_deleting_an_absent_key_changes_nothing(store: Store, at: Callable[[str], str]) -> None:
    before = put(store, at("k"))
    assert store.transact((), (Delete(at("absent")),)).succeeded
    assert [e.mod_revision for e in store.read((at(""),)).entries] == [before]
    assert store.watch((at(""),), before).next(0.1) == ()


def test_of_racing_writers_exactly_one_wins_each_revision(kind: Kind) -> None:
    key, writers, rounds = kind.prefix + "counter", 8, 12
    put(kind.connect(), key, "0")
    won: list[tuple[int, int]] = []

    def race(writer: int, mine: Store) -> None:
        for _ in range(rounds):
            while True:
                entry = mine.read((key,)).entries[0]
                swapped = mine.transact(
                    (Compare(key, entry.mod_revision),), (Put(key, str(int(entry.value) + 1)),)
                )
                if swapped.succeeded:
                    won.append((writer, swapped.revision))
                    break

    stores = [kind.connect() for _ in range(writers)]
    for ended in [in_thread(partial(race, writer, mine)) for writer, mine in enumerate(stores)]:
        ended()
    assert stores[0].read((key,)).entries[0].value == str(writers * rounds)
    assert len({revision for _, revision in won}) == len(won) == writers * rounds


def test_values_travel_unchanged(store: Store, at: Callable[[str], str]) -> None:
    value = '{"näme": "\u2603\U0001f600", "null": "\x00", "quote": "\\""}' + "x" * 100_000
    put(store, at("schlüssel"), value)
    assert store.read((at(""),)).entries[0].value == value


# Scopes


def test_a_read_finds_every_key_in_any_of_its_scopes_in_order(store: Store, at: Callable[[str], str]) -> None:
    for key in ("b/2", "a", "b/1", "b", "a/1", "a1", "c"):
        put(store, at(key))
    found = store.read((at("b/"), at("a")))
    assert [entry.key for entry in found.entries] == [at("a"), at("b/1"), at("b/2")]
    assert store.read(()).entries == ()
    assert found.revision >= max(entry.mod_revision for entry in found.entries)


def test_the_oldest_key_is_the_one_created_first_however_often_it_was_updated(
    store: Store, at: Callable[[str], str]
) -> None:
    def oldest() -> list[str]:
        return [entry.key for entry in store.read((), at("")).entries]

    assert oldest() == []
    for key in ("z", "a", "z", "z"):
        put(store, at(key))
    assert oldest() == [at("z")]
    store.transact((), (Delete(at("z")),))
    put(store, at("z"))
    assert oldest() == [at("a")]


def test_the_oldest_key_comes_with_what_else_is_read_once_and_of_the_same_revision(
    store: Store, at: Callable[[str], str]
) -> None:
    for key in ("n/b", "n/a", "n/c", "w"):
        put(store, at(key))
    for scopes, found in [(("w",), ["n/b", "w"]), (("n/b",), ["n/b"]), (("w", "n/a"), ["n/a", "n/b", "w"])]:
        snapshot = store.read(tuple(map(at, scopes)), at("n/"))
        assert [entry.key for entry in snapshot.entries] == [at(key) for key in found]
        assert snapshot.revision == store.read(()).revision


# Leases


def test_an_expired_lease_deletes_its_keys_with_one_event_each_while_nobody_asks(
    store: Store, at: Callable[[str], str]
) -> None:
    put(store, at("kept"))  # which may wait for a disk for longer than the lease lives
    lease = store.grant(0.2)
    store.transact((), (Put(at("a"), "", lease), Put(at("b"), "", lease)))
    watch = store.watch((at(""),), store.read(()).revision)
    changes = watch.next(4.0)  # when it expires, not when the c10d host next looks round (SWEEP_S)
    assert [(change.key, change.entry) for change in changes] == [(at("a"), None), (at("b"), None)]
    assert [entry.key for entry in store.read((at(""),)).entries] == [at("kept")]
    with pytest.raises(LeaseExpired):
        store.keep_alive(lease)


def test_a_lease_that_is_kept_alive_outlives_its_time_to_live(store: Store, at: Callable[[str], str]) -> None:
    ttl_s = 1.0
    lease = store.grant(ttl_s)
    put(store, at("k"), "", lease)
    until = time.monotonic() + 1.2 * ttl_s
    while time.monotonic() < until:
        store.keep_alive(lease)
        time.sleep(0.05)
    assert len(store.read((at(""),)).entries) == 1


def test_a_lease_that_no_other_node_can_want_outlives_any_pause_of_its_process() -> None:
    now = 0.0
    store = MemoryStore(lambda: now)
    lease = store.grant(MEMORY.life_s(5.0))
    revision, watch = put(store, "k", lease=lease), store.watch(("",), 0)
    assert [change.key for change in watch.next(0.0)] == ["k"]
    now = 3600.0
    assert watch.next(0.0) == ()
    store.keep_alive(lease)
    assert store.read(("k",)).entries == (Entry("k", "", revision, revision),)
    store.revoke(lease)
    assert store.read(("k",)).entries == ()
    assert all(kind.life_s(5.0) == 5.0 for kind in STORES.values() if kind is not MEMORY)


def test_a_revoked_lease_deletes_its_keys_at_once_and_may_be_revoked_twice(
    store: Store, at: Callable[[str], str]
) -> None:
    lease = store.grant(3600.0)
    revision = put(store, at("k"), "", lease)
    store.revoke(lease)
    assert store.read((at(""),)).entries == ()
    assert [change.entry for change in next_changes(store.watch((at(""),), revision))] == [None]
    store.revoke(lease)
    with pytest.raises(LeaseExpired):
        store.keep_alive(lease)


def test_nothing_of_a_transaction_is_done_under_a_lease_that_is_gone(
    store: Store, at: Callable[[str], str]
) -> None:
    lease = store.grant(3600.0)
    store.revoke(lease)
    with pytest.raises(LeaseExpired):
        store.transact((), (Put(at("free"), ""), Put(at("leased"), "", lease)))
    assert store.read((at(""),)).entries == ()


def test_a_key_put_again_without_the_lease_outlives_it(store: Store, at: Callable[[str], str]) -> None:
    lease = store.grant(3600.0)
    put(store, at("k"), "", lease)
    put(store, at("k"), "free")
    store.revoke(lease)
    assert [entry.value for entry in store.read((at(""),)).entries] == ["free"]


# Watches


def test_a_watch_delivers_what_happened_since_its_revision_then_what_happens(
    kind: Kind, store: Store, at: Callable[[str], str]
) -> None:
    before = put(store, at("a"), "old")
    for value in ("1", "2"):
        put(store, at("a"), value)
    watch = store.watch((at(""),), before)
    values = [change.entry.value if change.entry else None for change in next_changes(watch)]
    assert values == (["2"] if kind.keeps_newest else ["1", "2"])
    store.transact((), (Delete(at("a")),))
    assert [(change.key, change.entry) for change in next_changes(watch)] == [(at("a"), None)]
    assert watch.next(0.1) == ()


def test_a_watch_delivers_only_its_scopes(store: Store, at: Callable[[str], str]) -> None:
    watch = store.watch((at("a"), at("b/")), store.read(()).revision)
    assert watch.next(0.1) == ()
    for key in ("c/1", "a1", "a/1", "a", "b", "b/1", "c/2"):
        put(store, at(key))
    seen = [change.key for change in next_changes(watch)]
    if seen == [at("a")]:
        seen += [change.key for change in next_changes(watch)]
    assert seen == [at("a"), at("b/1")]
    assert watch.next(0.1) == ()


def test_a_watch_among_concurrent_writers_loses_and_doubles_nothing(kind: Kind) -> None:
    writers, writes = 4, 50
    watcher = kind.connect()
    watches = [watcher.watch((kind.prefix,), watcher.read(()).revision) for _ in range(3)]
    seen: list[list[Change]] = [[] for _ in watches]

    def follow(watch: Watch, into: list[Change]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(into) < writers * writes and time.monotonic() < deadline:
            into.extend(watch.next(0.02))  # short, so that many a `next` ends while a change is on its way

    def write(name: int, mine: Store) -> None:
        for n in range(writes):
            put(mine, f"{kind.prefix}{name}/{n}")

    working = [in_thread(partial(follow, watch, into)) for watch, into in zip(watches, seen, strict=True)]
    working += [in_thread(partial(write, name, kind.connect())) for name in range(writers)]
    for ended in working:
        ended()
    wanted = {f"{kind.prefix}{name}/{n}" for name in range(writers) for n in range(writes)}
    for changes in seen:
        assert {change.key for change in changes} == wanted
        revisions = [change.revision for change in changes]
        assert revisions == sorted(set(revisions))


def test_a_watch_blocks_rather_than_polls(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kind.state_is_here:
        pytest.skip("the state is in another process")
    store = kind.connect()
    asked = []
    changes = KvState.changes
    watch = store.watch((kind.prefix,), store.read(()).revision)
    assert watch.next(0.1) == ()

    def counted(kv: KvState, scopes: tuple[str, ...], after: int) -> tuple[Change, ...]:
        asked.append(scopes)
        return changes(kv, scopes, after)

    monkeypatch.setattr(KvState, "changes", counted)
    assert watch.next(0.5) == ()
    assert len(asked) <= 4
    put(store, kind.prefix + "k")
    assert [change.key for change in next_changes(watch)] == [kind.prefix + "k"]


def test_a_change_ends_the_wait_of_a_watch_long_before_its_timeout(
    store: Store, at: Callable[[str], str]
) -> None:
    watch = store.watch((at(""),), store.read(()).revision)
    told = in_thread(lambda: [change.key for change in watch.next(3600.0)])
    put(store, at("k"))
    assert told() == [at("k")]


def test_a_watch_from_a_forgotten_revision_is_told_to_read_again(
    kind: Kind, store: Store, at: Callable[[str], str]
) -> None:
    if kind.keeps_newest:
        pytest.skip("it forgets deletions alone")
    start = put(store, at("first"))
    for _ in range(0, HISTORY + 1, MOST_OPERATIONS):
        store.transact((), tuple(Put(at(f"{n}"), "") for n in range(MOST_OPERATIONS)))
    if kind.compact is not None:
        kind.compact()
    with pytest.raises(Compacted):
        store.watch((at(""),), start - 1).next(PATIENCE_S)
    now = store.read((at("first"),)).revision
    assert store.watch((at(""),), now).next(0.1) == ()


def test_a_watch_is_not_compacted_by_changes_it_did_not_ask_for(
    store: Store, at: Callable[[str], str]
) -> None:
    watch = store.watch((at("mine"),), store.read(()).revision)
    for _ in range(0, 2 * HISTORY, MOST_OPERATIONS):
        store.transact((), tuple(Put(at(f"other/{n}"), "") for n in range(MOST_OPERATIONS)))
        assert watch.next(0.02) == ()
    put(store, at("mine"))
    assert [change.key for change in next_changes(watch)] == [at("mine")]


@pytest.mark.parametrize("what", ["watch", "store"])
def test_closing_from_another_thread_ends_a_blocked_watch(closable: Store, what: str) -> None:
    watch = closable.watch(("mine",), closable.read(()).revision)
    began = threading.Event()

    def follow() -> None:
        assert watch.next(0.05) == ()
        began.set()
        watch.next(3600.0)

    outcome = in_thread(follow)
    assert began.wait(PATIENCE_S)
    for _ in range(2):
        (watch if what == "watch" else closable).close()
    assert isinstance(outcome(), StoreClosed)
    with pytest.raises(StoreClosed):
        watch.next(0.0)
    closable.close()


def test_a_closed_store_says_so(closable: Store) -> None:
    closable.close()
    closable.close()
    for call in (
        lambda: closable.read(("",)),
        lambda: closable.grant(1.0),
        lambda: closable.watch(("",), 0).next(0.0),
    ):
        with pytest.raises(StoreClosed):
            call()
