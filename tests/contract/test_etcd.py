"""What the etcd store does when members die, hang, forget or refuse; the servers are real."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.rendezvous_io.store_link import StoreLink
from elastic_agent.rendezvous.errors import (
    Compacted,
    LeaseExpired,
    StoreClosed,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from elastic_agent.rendezvous.etcd.access import Address, handshake_problem
from elastic_agent.rendezvous.etcd.channel import TXN, Channel
from elastic_agent.rendezvous.etcd.store import EtcdStore
from elastic_agent.rendezvous.node.transactions import RETRY
from elastic_agent.rendezvous.store.interface import Compare, Delete, Put, Subscription, Watch
from elastic_agent.rendezvous.store.store_kind import Login, Tls
from tests.etcd_servers import HOST, Certificates, EtcdCluster, etcd_access, etcd_cluster, make_certificates
from tests.patience import PATIENCE_S, eventually, in_thread, next_changes, persist, put
from tests.recorder import Recorder

LONG_TTL_S = 300.0
"""Where a test is not about deadlines: a call then has a minute."""


def channel_of(store: EtcdStore) -> Channel:
    return store._connection.channel(time.monotonic() + PATIENCE_S)


def connected(cluster: EtcdCluster, store: EtcdStore) -> int:
    return [member.port for member in cluster.members].index(channel_of(store).address.port)


def cut(store: EtcdStore) -> None:
    """As if the member in use had answered with an error."""
    store._connection.fail_over(channel_of(store), "cut by a test")


Connect = Callable[..., EtcdStore]


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[EtcdStore] = []

    def connect(
        cluster: EtcdCluster,
        job: str = "job",
        ttl_s: float = LONG_TTL_S,
        timeout_s: float = PATIENCE_S,
        **how: object,
    ) -> EtcdStore:
        opened.append(EtcdStore.connect(etcd_access(cluster.endpoints, job, ttl_s, timeout_s, **how)))
        return opened[-1]

    yield connect
    for store in opened:
        store.close()


@pytest.fixture
def single() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture
def three() -> Iterator[EtcdCluster]:
    with etcd_cluster(3, heartbeat_ms=100, election_ms=1000) as cluster:  # quicker ones elect under load
        yield cluster


class Traffic:
    """One thread creates keys, each once, and one watches them, as an agent would, through the same store."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self._stop = threading.Event()
        self._written_all = threading.Event()
        self.interrupted = 0
        self.compacted = 0
        self.written: list[str] = []
        self.seen: list[str] = []
        self.problem: BaseException | None = None
        watch = store.watch(("n/",), store.read(()).revision)
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True)
            for work in (self._write, lambda: self._watch(watch))
        ]
        for thread in self._threads:
            thread.start()

    def more(self) -> None:
        """Wait until one more key was written and seen, which nobody had begun to write before."""
        wanted = len(self.written) + 2
        eventually(lambda: self.problem or len(self.written) >= wanted, "another key is written")
        eventually(lambda: self.problem or len(self.seen) >= wanted, "another key is seen")
        assert self.problem is None, repr(self.problem)

    def finish(self) -> None:
        """Nothing was missed, nothing was seen twice."""
        self.more()
        self._stop.set()
        writer, watcher = self._threads
        writer.join(PATIENCE_S)
        self._written_all.set()
        watcher.join(PATIENCE_S)
        assert self.seen[: len(self.written)] == self.written
        assert len(self.seen) == len(self.written)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.problem = error

    def _write(self) -> None:
        for number in itertools.count():
            key = f"n/{number}"
            persist(lambda key=key: self._store.transact((Compare(key, 0),), (Put(key, ""),)))  # type: ignore[misc]
            self.written.append(key)
            if self._stop.wait(0.005):
                return

    def _watch(self, watch: Watch) -> None:
        rng, attempt = random.Random(1), 0
        while not (self._written_all.is_set() and len(self.seen) >= len(self.written)):
            try:
                self.seen.extend(change.key for change in watch.next(0.2))
                attempt = 0
            except StoreUnavailable:
                self.interrupted += 1
                self._stop.wait(RETRY.wait_s(attempt, rng))
                attempt += 1


# Members that die, hang, and come back


def test_a_killed_member_costs_neither_a_lease_nor_a_change(three: EtcdCluster, connect: Connect) -> None:
    store = connect(three, ttl_s=5.0)
    lease, traffic = store.grant(5.0), Traffic(store)
    traffic.more()
    three.kill(connected(three, store))
    persist(lambda: store.keep_alive(lease))
    traffic.finish()
    assert traffic.interrupted, "the watch was never cut"


@pytest.mark.parametrize("which", ["connected", "leader"])
def test_a_member_that_hangs_is_left_for_another(three: EtcdCluster, connect: Connect, which: str) -> None:
    store = connect(three, ttl_s=5.0)
    lease, traffic = store.grant(5.0), Traffic(store)
    traffic.more()
    frozen = connected(three, store) if which == "connected" else three.leader()
    three.freeze(frozen)
    persist(lambda: store.keep_alive(lease))
    traffic.more()
    assert connected(three, store) != frozen
    three.thaw(frozen)
    traffic.finish()


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_without_a_quorum_calls_say_so_and_all_goes_on_when_it_is_back(
    three: EtcdCluster, connect: Connect, how: str
) -> None:
    store = connect(three, ttl_s=1.0)
    traffic = Traffic(store)
    traffic.more()
    away = [number for number in range(3) if number != connected(three, store)]
    for number in away:
        (three.freeze if how == "frozen" else three.kill)(number)

    def fails() -> bool:
        try:
            store.read(("",))
        except StoreUnavailable:
            return True
        return False

    eventually(lambda: all(fails() for _ in range(3)), "calls fail")
    for number in away:
        (three.thaw if how == "frozen" else three.launch)(number)
    traffic.finish()


def test_one_failure_costs_one_channel_however_many_threads_see_it(
    three: EtcdCluster, connect: Connect
) -> None:
    store = connect(three, ttl_s=5.0)
    made: list[object] = []
    make = store._connection._made

    def counted(address: object) -> Channel:
        made.append(address)
        return make(address)  # type: ignore[arg-type]

    while connected(three, store) == three.leader():
        cut(store)
    store._connection._made = counted  # type: ignore[assignment,method-assign]
    three.freeze(connected(three, store))
    for ended in [in_thread(lambda: persist(lambda: store.read(("",)))) for _ in range(8)]:
        ended()
    assert len(made) == 1


def watch_threads() -> set[threading.Thread]:
    """Also those of other tests' watches, which no test has closed."""
    return {thread for thread in threading.enumerate() if thread.name == "etcd-watch"}


def test_moving_from_member_to_member_leaves_no_threads_behind(three: EtcdCluster, connect: Connect) -> None:
    others = watch_threads()
    store = connect(three)
    watch = store.watch(("k",), store.read(()).revision)
    assert watch.next(0.05) == ()
    before = threading.active_count()
    for number in range(10):
        cut(store)
        persist(lambda number=number: put(store, "k", str(number)))  # type: ignore[misc]
        assert next_changes(watch)
    eventually(lambda: threading.active_count() <= before, "the threads of the old channels end")
    store.close()
    eventually(lambda: watch_threads() <= others, "the watch's thread ends")


def test_while_every_member_is_away_the_agents_threads_hardly_use_the_processor(
    three: EtcdCluster, connect: Connect
) -> None:
    store = connect(three, ttl_s=5.0)
    recorder = Recorder()
    link = StoreLink(
        store, recorder, 5.0, lambda call: callable(call) and call(), time.monotonic, random.Random(1)
    )
    link.start()
    link.keep(store.grant(600.0))
    link.follow(Subscription(("k",), store.read(()).revision))
    eventually(lambda: recorder.told, "the lease is confirmed")
    for number in range(3):
        three.kill(number)
    with pytest.raises(StoreUnavailable):
        store.read(("",))
    began, used = time.monotonic(), time.process_time()
    threading.Event().wait(3.0)
    assert (time.process_time() - used) / (time.monotonic() - began) < 0.25
    del recorder.told[:]
    for number in range(3):
        three.launch(number)
    eventually(
        lambda: any(told[0] == "lease_confirmed" for told in recorder.told), "the lease is confirmed again"
    )
    link.close()


def test_a_watch_that_has_nothing_to_tell_wakes_nobody(single: EtcdCluster, connect: Connect) -> None:
    others = watch_threads()
    store = connect(single)
    watch = store.watch(("quiet",), store.read(()).revision)
    assert watch.next(0.1) == ()
    [reader] = watch_threads() - others
    before = times_woken(reader)
    threading.Event().wait(2.0)
    assert times_woken(reader) - before <= 4, "gRPC's own way would be twenty"


def times_woken(thread: threading.Thread) -> int:
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_closing_ends_calls_that_wait_for_an_answer(single: EtcdCluster, connect: Connect) -> None:
    store = connect(single)
    single.freeze(0)
    outcome = in_thread(lambda: store.read(("",)))
    time.sleep(0.1)  # it waits
    store.close()
    assert isinstance(outcome(), StoreClosed)
    single.thaw(0)


# Forgotten history


def test_a_watch_that_is_cut_resumes_or_reads_again_while_history_is_forgotten_under_it(
    single: EtcdCluster, connect: Connect
) -> None:
    store, writer = connect(single), connect(single)
    compacting = threading.Event()

    def compact() -> None:
        while not compacting.wait(0.2):
            single.compact()

    thread = threading.Thread(target=compact)
    thread.start()
    resumed = forgotten = 0
    watch, told = store.watch(("k",), store.read(()).revision), ""
    for number in range(20):
        cut(store)
        if number % 5 == 0:
            for older in ("older", "old"):
                put(writer, "k", older)
            single.compact()
        put(writer, "k", str(number))
        while told != str(number):
            try:
                for change in next_changes(watch):
                    assert change.entry is not None
                    told = change.entry.value
                resumed += 1
            except Compacted:
                forgotten += 1
                snapshot = store.read(("k",))
                told = snapshot.entries[0].value
                watch = store.watch(("k",), snapshot.revision)
    compacting.set()
    thread.join(PATIENCE_S)
    assert resumed
    assert forgotten


def test_a_quiet_watch_is_told_how_far_it_has_come_and_survives_compaction(connect: Connect) -> None:
    with etcd_cluster(args=("--experimental-watch-progress-notify-interval", "100ms")) as cluster:
        store = connect(cluster)
        watch = store.watch(("quiet",), store.read(()).revision)
        assert watch.next(0.1) == ()
        other = put(store, "other")
        eventually(lambda: watch.next(0.1) or watch._delivered >= [other], "it is told")  # type: ignore[attr-defined]
        cluster.compact()
        cut(store)
        put(store, "quiet", "no more")
        assert [change.key for change in next_changes(watch)] == ["quiet"]


def test_one_scope_may_run_ahead_of_another_and_each_goes_on_where_it_was(
    single: EtcdCluster, connect: Connect
) -> None:
    store = connect(single)
    watch = store.watch(("a/", "b/"), store.read(()).revision)
    seen: list[str] = []
    for number in range(20):
        put(store, f"a/{number}")
        if number % 3 == 0:
            store.transact((), (Put(f"a/{number}+", ""), Put(f"b/{number}", "")))
        cut(store)
        if number % 4 == 0:
            seen.extend(change.key for change in next_changes(watch))
    put(store, "a/end")
    put(store, "b/end")
    while not {"a/end", "b/end"} <= set(seen):
        seen.extend(change.key for change in next_changes(watch))
    wanted = store.read(("a/", "b/")).entries
    for scope in ("a/", "b/"):
        order = sorted(
            (entry for entry in wanted if entry.key.startswith(scope)),
            key=lambda one: (one.mod_revision, one.key),
        )
        assert [key for key in seen if key.startswith(scope)] == [entry.key for entry in order]


# A cluster that goes back


@pytest.mark.parametrize(
    ("token", "first", "puts"),
    [
        pytest.param("etcd-cluster", "keep_alive", 0, id="the same cluster, and a keep-alive comes first"),
        pytest.param(
            "etcd-cluster", "read", 0, id="the same cluster, and a read of another thread comes first"
        ),
        pytest.param("another", "keep_alive", 0, id="another cluster, with the same revisions"),
        pytest.param("etcd-cluster", "keep_alive", 3, id="others have written more since than was lost"),
    ],
)
def test_a_store_that_was_restored_from_a_snapshot_is_another_store(
    single: EtcdCluster, connect: Connect, token: str, first: str, puts: int
) -> None:
    """The snapshot holds the lease, so that etcd itself has nothing to say against it."""
    store, reader = connect(single), connect(single)
    lease = store.grant(60.0)
    put(store, "world", "1")
    snapshot = single.snapshot()
    if token == "etcd-cluster":
        put(store, "world", "2")
    watches = [one.watch(("world",), one.read(("world",)).revision) for one in (store, reader)]
    assert [watch.next(0.1) for watch in watches] == [(), ()]
    single.restore(snapshot, token)
    for number in range(puts):
        single.ctl("put", "/other", str(number))
    with pytest.raises(LeaseExpired):
        persist(lambda: store.keep_alive(lease) if first == "keep_alive" else store.read(("world",)))
    with pytest.raises(LeaseExpired):
        persist(lambda: store.keep_alive(lease))
    with pytest.raises(LeaseExpired):
        persist(lambda: store.transact((), (Put("world", "3"),)))
    for watch in watches:
        with pytest.raises(Compacted):
            persist(lambda watch=watch: watch.next(PATIENCE_S))
    assert [entry.value for entry in reader.read(("world",)).entries] == ["1"], "who has no lease reads on"
    again = store.grant(60.0)
    watch = store.watch(("world",), store.read(()).revision)
    store.transact((), (Put("world", "4", again),))
    assert [change.key for change in next_changes(watch)] == ["world"]
    store.keep_alive(again)


def test_a_store_that_comes_back_is_the_same_one(single: EtcdCluster, connect: Connect) -> None:
    """Its newest entry has changed while it was away, and then the revision that we know is compacted, too."""
    store = connect(single)
    lease = store.grant(60.0)
    put(store, "world", "1")
    for compacted in (False, True):
        watch = store.watch(("world",), store.read(("world",)).revision)
        assert watch.next(0.1) == ()
        single.kill(0)
        with pytest.raises(StoreUnavailable):
            store.keep_alive(lease)
        single.heal()
        single.ctl("put", "/elastic-agent/job/world", "2")
        if compacted:
            single.compact()
        persist(lambda: store.keep_alive(lease))
        if not compacted:
            assert [change.key for change in persist(lambda watch=watch: next_changes(watch))] == ["world"]
        store.transact((), (Put("nodes/a", "", lease),))
        watch.close()


# Leases, jobs, values


def test_a_lease_revoked_from_outside_is_expired(single: EtcdCluster, connect: Connect) -> None:
    store = connect(single)
    lease = store.grant(60.0)
    store.transact((), (Put("k", "", lease),))
    single.ctl("lease", "revoke", f"{lease:x}")
    with pytest.raises(LeaseExpired):
        store.keep_alive(lease)
    with pytest.raises(LeaseExpired):
        store.transact((), (Put("k", "", lease),))
    assert store.read(("",)).entries == ()


def test_a_lease_lives_at_least_as_long_as_it_was_asked_to(single: EtcdCluster, connect: Connect) -> None:
    lease = connect(single).grant(4.1)
    assert '"granted-ttl":5' in single.ctl("lease", "timetolive", f"{lease:x}")


def test_jobs_do_not_see_each_other(single: EtcdCluster, connect: Connect) -> None:
    names = ("job", "job1", "job10", "job/1", "job1/nodes")
    stores = {name: connect(single, name) for name in names}
    watches = {name: store.watch(("",), store.read(()).revision) for name, store in stores.items()}
    for name, store in stores.items():
        assert store.transact((Compare("nodes/a", 0),), (Put("nodes/a", name),)).succeeded
    for name, store in stores.items():
        assert [(entry.key, entry.value) for entry in store.read(("",)).entries] == [("nodes/a", name)]
        assert [change.entry.value for change in next_changes(watches[name]) if change.entry] == [name]
        (oldest,) = store.read((), "").entries
        assert oldest.value == name
    stores["job1"].transact((), (Delete("nodes/a"),))
    assert [len(store.read(("",)).entries) for store in stores.values()] == [1, 0, 1, 1, 1]


def test_another_prefix_is_another_place(single: EtcdCluster, connect: Connect) -> None:
    put(connect(single, prefix="/team/a/"), "k", "theirs")
    assert connect(single).read(("",)).entries == ()
    assert "/team/a/job/k" in single.ctl("get", "/team/a/", "--prefix", "--write-out", "simple")


def test_garbage_and_ten_megabytes_reach_the_reader(connect: Connect) -> None:
    with etcd_cluster(args=("--max-request-bytes", str(32 * 2**20))) as cluster:
        store = connect(cluster)
        watch = store.watch(("",), store.read(()).revision)
        put(store, "long", "x" * 10_000_000)
        messages = store._connection.rpc.messages
        garbage = messages.PutRequest(key=b"/elastic-agent/job/bad\xff", value=b"\xff\x00{")
        store._connection.call(TXN, messages.TxnRequest(success=[messages.RequestOp(request_put=garbage)]))
        entries = {entry.key: entry.value for entry in store.read(("",)).entries}
        assert len(entries["long"]) == 10_000_000
        assert entries["bad\ufffd"] == "\ufffd\x00{"
        seen = next_changes(watch)
        while len(seen) < 2:
            seen += next_changes(watch)
        assert [change.key for change in seen] == ["long", "bad\ufffd"]


def test_a_call_that_etcd_can_never_do_is_not_taken_for_an_outage(
    single: EtcdCluster, connect: Connect
) -> None:
    store = connect(single)
    with pytest.raises(StoreError, match="too many operations") as refused:
        store.transact((), tuple(Put(f"{n}", "") for n in range(200)))
    assert not isinstance(refused.value, StoreUnavailable)


# Whatever else may listen there


def test_an_address_where_no_etcd_answers_is_unavailable_within_the_deadline() -> None:
    def speak(listener: socket.socket, words: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(words)
                connection.close()

    with contextlib.ExitStack() as stack:
        silent, rude, other = (stack.enter_context(socket.create_server((HOST, 0))) for _ in range(3))
        refusing = socket.create_server((HOST, 0))
        refusing.close()
        for listener, words in ((rude, b"\xff\x00" * 999), (other, b"HTTP/1.1 400 Bad Request\r\n\r\n")):
            threading.Thread(target=speak, args=(listener, words), daemon=True).start()
        for listener in (silent, rude, other):
            access = etcd_access((listener.getsockname(),), ttl_s=2.5, timeout_s=1.5)
            with pytest.raises(StoreUnavailable, match=r"no etcd on .* after 1.5 s"):
                EtcdStore.connect(access)
        for listener in (silent, rude, other):
            listener.shutdown(socket.SHUT_RDWR)


def test_the_address_that_answers_is_found_among_others(single: EtcdCluster) -> None:
    with socket.create_server((HOST, 0)) as silent, socket.create_server((HOST, 0)) as gone:
        gone.close()
        elsewhere = (silent.getsockname(), gone_port(), ("no-such-host.invalid", 1), ("localhost", 1))
        for _ in range(4):  # it begins anywhere
            access = etcd_access((*elsewhere, *single.endpoints), ttl_s=1.0, timeout_s=PATIENCE_S)
            EtcdStore.connect(access).close()


def gone_port() -> tuple[str, int]:
    with socket.create_server((HOST, 0)) as listener:
        return HOST, int(listener.getsockname()[1])


# Passwords and permissions

USER, PASSWORD = "trainer", "correct horse"


@pytest.fixture(scope="module")
def locked() -> Iterator[EtcdCluster]:
    """`trainer` may use the job called job, and nothing else."""
    with etcd_cluster(args=("--bcrypt-cost", "4", "--auth-token-ttl", "2")) as cluster:
        enable_users(cluster, USER, f"{USER}:{PASSWORD}")
        yield cluster


def enable_users(cluster: EtcdCluster, name: str, *adding: str) -> None:
    cluster.ctl("user", "add", "root:root")
    cluster.ctl("user", "grant-role", "root", "root")
    cluster.ctl("role", "add", "job")
    cluster.ctl("role", "grant-permission", "job", "--prefix=true", "readwrite", "/elastic-agent/job/")
    cluster.ctl("user", "add", *adding)
    cluster.ctl("user", "grant-role", name, "job")
    cluster.ctl("auth", "enable")


def login(password: str = PASSWORD) -> Login:
    return Login(USER, lambda: password)


@pytest.mark.parametrize(
    ("job", "who", "said"),
    [
        ("job", login("wrong horse"), "authentication failed.*check the user and the password"),
        ("job", Login("nobody", lambda: PASSWORD), "authentication failed"),
        ("job", None, "wants a user and a password"),
        ("job2", login(), "permission denied.*grant this user a role"),
    ],
    ids=["wrong-password", "unknown-user", "no-user", "another-job"],
)
def test_who_may_not_use_the_store_is_told_at_the_start(
    locked: EtcdCluster, connect: Connect, job: str, who: Login | None, said: str
) -> None:
    with pytest.raises(StoreRefused, match=said) as refused:
        connect(locked, job, login=who)
    assert "horse" not in str(refused.value)


def test_a_password_file_that_cannot_be_read_is_named(
    locked: EtcdCluster, connect: Connect, tmp_path: Path
) -> None:
    absent = tmp_path / "password"
    with pytest.raises(StoreRefused, match=f"trainer.*{absent}"):
        connect(locked, login=Login(USER, absent.read_text))


def test_an_expired_token_is_renewed_once_for_all_threads(locked: EtcdCluster, connect: Connect) -> None:
    store = connect(locked, login=login())
    asked: list[str] = []
    witnesses = [connect(locked, login=login()) for _ in range(40)]
    for witness in witnesses:  # each tells once whether a token of its age is still good: using one renews it
        witness._connection._authenticate = lambda *_: asked.append("witness") or "none"  # type: ignore[method-assign]

    def expired() -> bool:
        try:
            witnesses.pop().read(("",))
        except StoreRefused:
            return True
        time.sleep(0.2)
        return False

    eventually(expired, "tokens expire")
    authenticate = store._connection._authenticate

    def counted(*args: object) -> str:
        asked.append("store")
        return authenticate(*args)  # type: ignore[arg-type]

    store._connection._authenticate = counted  # type: ignore[method-assign]
    watch = store.watch(("k",), store.read(()).revision)
    for ended in [in_thread(lambda: put(store, "k")) for _ in range(6)]:
        ended()
    assert next_changes(watch)
    assert asked.count("store") == 1


def test_a_watch_with_an_expired_token_gets_a_new_one(locked: EtcdCluster, connect: Connect) -> None:
    store = connect(locked, login=login())
    watch = store.watch(("k",), store.read(()).revision)
    put(store, "k")
    store._connection._session._token = "expired.1"
    with pytest.raises(StoreRefused):
        watch.next(PATIENCE_S)
    assert [change.key for change in next_changes(watch)] == ["k"]


def test_a_changed_password_is_picked_up_and_a_wrong_one_is_no_reason_to_leave(connect: Connect) -> None:
    with etcd_cluster(args=("--bcrypt-cost", "4")) as cluster:
        enable_users(cluster, USER, f"{USER}:{PASSWORD}")
        current = [PASSWORD]
        store = connect(cluster, login=Login(USER, lambda: current[0]))
        watch = store.watch(("k",), store.read(()).revision)
        asked: list[str] = []
        authenticate = store._connection._authenticate

        def counted(*args: object) -> str:
            asked.append("store")
            return authenticate(*args)  # type: ignore[arg-type]

        store._connection._authenticate = counted  # type: ignore[method-assign]
        cluster.ctl("user", "passwd", USER, "--interactive=false", user="root:root", stdin="new-horse\n")
        for _ in range(50):
            with pytest.raises(StoreUnavailable):
                store.read(("",))
        assert len(asked) < 10, "a refused password is not sent again and again"
        current[0] = "new-horse"
        persist(lambda: put(store, "k", "2"))
        assert [change.key for change in next_changes(watch)] == ["k"]


def test_a_login_where_etcd_has_no_users_is_not_needed(single: EtcdCluster, connect: Connect) -> None:
    store = connect(single, login=login())
    put(store, "k")
    enable_users(single, USER, f"{USER}:{PASSWORD}")
    put(store, "k")


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = make_certificates(tmp_path_factory.mktemp("authority"))
    made.issue("server", "server")
    made.issue("client", USER)
    strangers = make_certificates(tmp_path_factory.mktemp("strangers"))
    strangers.issue("client", USER)
    for file in ("ca.pem", "client.pem", "client.key"):
        made.file(f"strange-{file}").write_bytes(strangers.file(file).read_bytes())
    made.file("junk.pem").write_text("junk")
    return made


@pytest.fixture(scope="module")
def mutual(certificates: Certificates) -> Iterator[EtcdCluster]:
    with etcd_cluster(tls=certificates, args=("--bcrypt-cost", "4")) as cluster:
        enable_users(cluster, USER, USER, "--no-password")
        yield cluster


@pytest.fixture(scope="module")
def encrypted(certificates: Certificates) -> Iterator[EtcdCluster]:
    with etcd_cluster(tls=certificates, client_certificates=False) as cluster:
        yield cluster


def tls(certificates: Certificates, ca: str = "ca.pem", client: str | None = "client") -> Tls:
    return Tls(
        certificates.file(ca),
        certificates.file(f"{client}.pem") if client else None,
        certificates.file(f"{client}.key") if client else None,
    )


def test_a_client_certificate_names_the_user(
    mutual: EtcdCluster, certificates: Certificates, connect: Connect
) -> None:
    store = connect(mutual, tls=tls(certificates))
    watch = store.watch(("k",), store.read(()).revision)
    put(store, "k")
    assert [change.key for change in next_changes(watch)] == ["k"]
    with pytest.raises(StoreRefused, match="permission denied"):
        connect(mutual, "job2", tls=tls(certificates))


def test_members_are_verified_by_the_names_or_addresses_that_they_were_given(
    encrypted: EtcdCluster, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = encrypted.members[0].port
    for host in (HOST, "localhost"):
        access = etcd_access(
            ((host, port),), "job", LONG_TTL_S, PATIENCE_S, tls=tls(certificates, client=None)
        )
        EtcdStore.connect(access).close()
    stranger = etcd_access(
        (("localhost.localdomain", port),), "job", LONG_TTL_S, PATIENCE_S, tls=tls(certificates, client=None)
    )
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", (HOST, port))])
    with pytest.raises(StoreRefused, match="not the one to expect"):
        EtcdStore.connect(stranger)


def test_what_is_wrong_with_tls_is_said_at_the_start(
    mutual: EtcdCluster,
    encrypted: EtcdCluster,
    single: EtcdCluster,
    certificates: Certificates,
    connect: Connect,
) -> None:
    cases: list[tuple[EtcdCluster, Tls | None, str]] = [
        (encrypted, tls(certificates, "strange-ca.pem", None), "certificate is not the one to expect"),
        (encrypted, None, "it speaks TLS and we do not"),
        (mutual, None, "it speaks TLS and we do not"),
        (mutual, tls(certificates, client=None), "want another certificate of ours"),
        (mutual, tls(certificates, client="strange-client"), "want another certificate of ours"),
        (single, tls(certificates), "does it speak plain text"),
        (encrypted, tls(certificates, "junk.pem", None), "junk.pem does not hold certificates"),
        (encrypted, tls(certificates, "absent.pem", None), "absent.pem .*No such file"),
        (
            encrypted,
            Tls(*map(certificates.file, ("ca.pem", "client.pem", "ca.key"))),
            "certificate with its key",
        ),
    ]
    for cluster, how, said in cases:
        with pytest.raises(StoreRefused, match=said):
            connect(cluster, tls=how)


@pytest.mark.parametrize("linger", [(0, 0), (1, 0)], ids=["closes", "resets"])
def test_who_hangs_up_on_tls_is_asked_for_plain_text(
    certificates: Certificates, linger: tuple[int, int]
) -> None:
    with socket.create_server((HOST, 0)) as server:

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.recv(65536)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
            connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        address = Address(HOST, HOST, server.getsockname()[1])
        problem = handshake_problem(address, tls(certificates, client=None), PATIENCE_S)
    assert problem is not None
    assert "does it speak plain text" in problem


def test_a_certificate_that_goes_wrong_later_is_an_outage_that_somebody_may_repair(
    certificates: Certificates, connect: Connect, tmp_path: Path
) -> None:
    with etcd_cluster(tls=certificates, client_certificates=False) as cluster:
        ca = tmp_path / "ca.pem"
        ca.write_bytes(certificates.file("ca.pem").read_bytes())
        store = connect(cluster, tls=Tls(ca))
        watch = store.watch(("k",), store.read(()).revision)
        for damage in (lambda: ca.write_text("junk"), ca.unlink):
            damage()
            cluster.kill(0)
            cluster.launch(0)
            for _ in range(3):
                with pytest.raises(StoreUnavailable):
                    store.read(("",))
            ca.write_bytes(certificates.file("ca.pem").read_bytes())
            persist(lambda: put(store, "k"))
            assert [change.key for change in next_changes(watch)] == ["k"]


# What it takes to load


def in_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_importing_the_store_loads_neither_grpc_nor_protobuf() -> None:
    done = in_python(
        "import sys, elastic_agent.rendezvous.etcd.store\n"
        "print([name for name in ('grpc', 'google', 'etcd3', 'torch', 'ssl') if name in sys.modules])"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_making_a_store_warns_of_nothing_and_leaves_the_environment_as_it_was(single: EtcdCluster) -> None:
    done = in_python(
        "import os\n"
        "before = dict(os.environ)\n"
        "from tests.etcd_servers import etcd_access\n"
        "from elastic_agent.rendezvous.etcd.store import EtcdStore\n"
        f"store = EtcdStore.connect(etcd_access({single.endpoints!r}))\n"
        "from grpc._cython import cygrpc\n"
        "print(dict(os.environ) == before, cygrpc._GRPC_ENABLE_FORK_SUPPORT)",
        GRPC_ENABLE_FORK_SUPPORT="1",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True False\n", "", 0)


def test_a_process_may_have_loaded_protobuf_before(single: EtcdCluster) -> None:
    for implementation in ("upb", "python"):
        done = in_python(
            "import google.protobuf.descriptor\n"
            "from tests.etcd_servers import etcd_access\n"
            "from elastic_agent.rendezvous.etcd.store import EtcdStore\n"
            f"store = EtcdStore.connect(etcd_access({single.endpoints!r}))\n"
            "print(store.read(('nothing',)).entries)",
            PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=implementation,
        )
        assert (done.stdout, done.stderr) == ("()\n", "")


def test_our_messages_are_those_of_etcd() -> None:
    """Field by field those that etcd3 has generated from etcd's own files, which pure Python alone can load."""
    done = in_python(
        "import warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from etcd3 import etcdrpc\n"
        "from etcd3.etcdrpc import kv_pb2\n"
        "from elastic_agent.rendezvous.etcd import access\n"
        "def form(field):\n"
        "    kind = field.message_type or field.enum_type\n"
        "    oneof = field.containing_oneof\n"
        "    return (field.number, field.type, field.is_repeated, kind and kind.name, oneof and oneof.name)\n"
        "for name, ours in sorted(vars(access._messages()).items()):\n"
        "    theirs = (getattr(etcdrpc, name, None) or getattr(kv_pb2, name)).DESCRIPTOR\n"
        "    for field in ours.DESCRIPTOR.fields:\n"
        "        assert form(field) == form(theirs.fields_by_name[field.name]), (name, field.name)\n"
        "    for enum in ours.DESCRIPTOR.enum_types:\n"
        "        same = theirs.enum_types_by_name[enum.name].values\n"
        "        assert [(v.name, v.number) for v in enum.values] == [(v.name, v.number) for v in same]\n"
        "    print(name)",
        PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python",
    )
    assert (len(done.stdout.split()), done.stderr) == (25, "")
