"""What the c10d store does when its host, its network or its neighbours misbehave."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from torch.distributed import DistStoreError, QueueEmptyError, TCPStore

from elastic_agent.rendezvous.c10d import host as c10d_host_module
from elastic_agent.rendezvous.c10d import link as c10d_link_module
from elastic_agent.rendezvous.c10d import store as c10d_store_module
from elastic_agent.rendezvous.c10d.host import QUIET_S, C10dHost
from elastic_agent.rendezvous.c10d.link import (
    META_KEY,
    PENDING_S,
    REQUEST_LIMIT_BYTES,
    REQUEST_QUEUE,
    SCHEMA,
    Caller,
    Done,
    LongPoll,
    Reply,
    Request,
    Transact,
    decode_reply,
    encode_reply,
    encode_request,
    reply_queue,
)
from elastic_agent.rendezvous.c10d.store import C10dStore
from elastic_agent.rendezvous.errors import (
    Compacted,
    LeaseExpired,
    StoreError,
    StoreMismatch,
    StoreUnavailable,
)
from elastic_agent.rendezvous.records import WORLD_KEY, Cause, CauseKind, Endpoint, Member, Phase, World
from elastic_agent.rendezvous.store.interface import MOST_OPERATIONS, Change, Compare, Put, Read, Snapshot
from elastic_agent.rendezvous.store.kv_state import HISTORY
from elastic_agent.rendezvous.store.store_kind import check_of
from tests.patience import PATIENCE_S, eventually, in_thread, put
from tests.stopping import stop

ADDRESS = "127.0.0.1"
STRANGER = "0123456789abcdef" * 2


def raw_client(port: int) -> TCPStore:
    return TCPStore(
        ADDRESS, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S)
    )


@pytest.fixture
def openings_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that leave torch connecting in a thread: Python up to 3.13 aborts when one returns as it shuts down."""
    monkeypatch.setattr(c10d_link_module, "CONNECT_TIMEOUT", timedelta(seconds=1))
    yield
    eventually(
        lambda: not any(thread.name == "c10d-opening" for thread in threading.enumerate()),
        "torch gave up connecting",
    )


@pytest.fixture
def connect() -> Iterator[Callable[..., C10dStore]]:
    opened: list[C10dStore] = []

    def connect(port: int, request_timeout_s: float = PATIENCE_S) -> C10dStore:
        opened.append(C10dStore.connect(ADDRESS, port, "job", PATIENCE_S, request_timeout_s))
        return opened[-1]

    yield connect
    for store in opened:
        store.close()


# The host ends, hangs, or is cut off


def test_the_death_of_the_host_is_told_at_once_and_its_next_life_makes_all_void(
    connect: Callable[..., C10dStore], host_process: Callable[..., object]
) -> None:
    """A refused connection does not prove that the host has ended, but another host's answer does."""
    host = host_process()
    store = connect(host.port)
    lease = store.grant(PATIENCE_S)
    watch = store.watch(("k",), 0)
    assert watch.next(0.1) == ()
    blocked = in_thread(lambda: watch.next(3600.0))
    host.process.kill()
    assert isinstance(blocked(), StoreUnavailable)
    host.process.wait()  # its connections may end before it ceases to listen
    for outcome in (in_thread(lambda: store.read(("",)))(), in_thread(lambda: watch.next(3600.0))()):
        assert isinstance(outcome, StoreUnavailable)
        assert f"{ADDRESS}:{host.port} refuses connections" in str(outcome)
    host_process(port=host.port)

    def answer_of(call: Callable[[], object]) -> object:
        """Of the new host, after that the connection was made again."""
        outcome = in_thread(call)()
        return in_thread(call)() if isinstance(outcome, StoreUnavailable) else outcome

    for void in (
        lambda: store.keep_alive(lease),
        lambda: store.read(("",)),
        lambda: store.transact((Compare("new", 0),), (Put("new", ""),)),
    ):
        assert isinstance(answer_of(void), LeaseExpired)
    assert isinstance(answer_of(lambda: watch.next(PATIENCE_S)), Compacted)
    fresh = store.grant(PATIENCE_S)
    assert fresh != lease
    assert store.read(("",)).entries == ()
    assert isinstance(answer_of(lambda: watch.next(PATIENCE_S)), Compacted), "its revisions are the old ones"


def test_what_the_next_host_knows_of_the_last_world_stands_there_before_any_client_comes(
    connect: Callable[..., C10dStore],
) -> None:
    told: list[str] = []
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    world = World(
        "job", 7, Phase.RUNNING, (Member("a", "a-1", 2, 0),), Endpoint("h", 1), Cause(CauseKind.START)
    )
    host = C10dHost(listener, ADDRESS, "job", past=world, remember=told.append)
    store = connect(port)
    (entry,) = store.read((WORLD_KEY,)).entries
    assert World.from_json(entry.value) == world.carried_over()
    store.transact((Compare(WORLD_KEY, 0),), (Put(WORLD_KEY, "refused"),))
    store.transact((Compare(WORLD_KEY, entry.mod_revision),), (Put(WORLD_KEY, "next"),))
    assert told == [world.carried_over().to_json(), "next"]
    store.close()
    host.close()


def test_a_hung_host_is_reported_in_time_and_used_again_when_it_wakes(
    openings_end: None, connect: Callable[..., C10dStore], host_process: Callable[..., object]
) -> None:
    host = host_process()
    store = connect(host.port, request_timeout_s=0.5)
    watch = store.watch(("k",), 0)
    assert watch.next(0.1) == ()
    stop(host.process.pid)
    for _ in range(3):
        outcome = in_thread(lambda: store.read(("",)))()
        assert isinstance(outcome, StoreUnavailable)
        assert f"{ADDRESS}:{host.port}" in str(outcome)
    host.process.send_signal(signal.SIGCONT)
    seen: list[Change] = []

    def works_again() -> bool:
        try:
            put(store, "k")
            seen.extend(watch.next(PATIENCE_S))
        except StoreUnavailable:
            return False
        return bool(seen)

    eventually(works_again, "an answer of a host that woke up")
    assert [change.key for change in seen] == ["k"] * len(seen)


class Proxy:
    """A network between clients and a host that can be cut, and that can lead to another host."""

    def __init__(self, port: int) -> None:
        self.target = port
        self._listener = socket.create_server((ADDRESS, 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((ADDRESS, self.target))
            self._pairs += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self) -> None:
        for end in self._pairs:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def test_a_cut_connection_is_made_again_and_its_watch_loses_nothing(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int]
) -> None:
    host, port = c10d_host
    proxy = Proxy(port)
    store = connect(proxy.port)
    watch = store.watch(("k/",), 0)
    seen: list[Change] = []
    for n in range(5):
        blocked = in_thread(lambda: watch.next(3600.0))
        put(host, f"k/{n}")
        if n % 2:
            proxy.cut()
        outcome = blocked()
        if isinstance(outcome, StoreUnavailable):
            outcome = watch.next(PATIENCE_S)
        assert isinstance(outcome, tuple)
        seen.extend(outcome)
    assert [change.key for change in seen] == [f"k/{n}" for n in range(5)]
    assert len(store.read(("k/",)).entries) == 5
    proxy.close()


def test_another_host_at_the_same_address_is_not_taken_for_the_first_by_a_watch(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int], shared_host_process: object
) -> None:
    _, port = c10d_host
    proxy = Proxy(port)
    watch = connect(proxy.port).watch(("k",), 0)
    assert watch.next(0.1) == ()
    proxy.target = shared_host_process.port
    proxy.cut()

    def lost() -> bool:
        try:
            watch.next(PATIENCE_S)
        except Compacted as error:
            return "was started again" in str(error)
        except StoreUnavailable:
            pass
        return False

    eventually(lost, "Compacted")
    proxy.close()


def test_closing_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    host, port = started_host()
    store = C10dStore.connect(ADDRESS, port, "job", PATIENCE_S)
    assert store.watch(("k",), 0).next(0.1) == ()
    ours = set(threading.enumerate()) - before
    assert {thread.name for thread in ours} == {
        "c10d-sender",
        "c10d-receiver",
        "c10d-requests",
        "c10d-changes",
    }

    def left() -> set[str]:
        return {thread.name for thread in ours if thread.is_alive()}

    store.close()
    eventually(lambda: left() == {"c10d-requests", "c10d-changes"}, "the client's threads ended")
    host.close()
    host.close()
    assert not left()


def test_a_client_misses_and_doubles_nothing_of_what_the_hosting_node_itself_writes(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int]
) -> None:
    host, port = c10d_host
    writes, rng = 300, random.Random(1)
    watch = connect(port).watch(("k/",), 0)

    def write() -> None:
        for n in range(writes):
            put(host, f"k/{n}")
            time.sleep(
                rng.choice((0.0, 0.0001, 0.002))
            )  # so that it meets the watch at every point of its turn

    written = in_thread(write)
    seen: list[Change] = []
    while len(seen) < writes:
        changes = watch.next(PATIENCE_S)
        assert changes, f"{len(seen)} of {writes}"
        seen.extend(changes)
    assert [change.key for change in seen] == [f"k/{n}" for n in range(writes)]
    written()


def test_a_watch_is_not_told_of_what_it_knew_when_it_began_to_wait(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int]
) -> None:
    host, port = c10d_host
    put(host, "k/1")
    changes = host.watch(("",), 0).next(0.0)
    watch = connect(port).watch(("k/",), changes[-1].revision)
    assert watch.next(0.1) == ()
    eventually(lambda: bool(host._pending), "the watch waits")
    host._tell(changes)  # as when its thread was held up while the client had already asked and heard
    put(host, "k/2")
    assert [change.key for change in watch.next(PATIENCE_S)] == ["k/2"]


# Joining


def test_a_host_that_starts_late_is_waited_for() -> None:
    listener = socket.socket()
    listener.bind((ADDRESS, 0))  # not listening: connections are refused
    port = listener.getsockname()[1]
    joined = in_thread(lambda: C10dStore.connect(ADDRESS, port, "job", PATIENCE_S))
    time.sleep(0.2)
    listener.listen()
    host = C10dHost(listener, ADDRESS, "job")
    store = joined()
    assert isinstance(store, C10dStore)
    put(host, "k")
    assert [entry.key for entry in store.read(("",)).entries] == ["k"]
    store.close()
    host.close()


def test_nobody_listening_and_a_name_that_does_not_resolve_are_said() -> None:
    with socket.socket() as bound:
        bound.bind((ADDRESS, 0))
        port = bound.getsockname()[1]
        said = rf"{ADDRESS}:{port} after 0\.3 s: no process listens.*--rdzv-endpoint or --master-addr names its address"
        with pytest.raises(StoreUnavailable, match=said):
            C10dStore.connect(ADDRESS, port, "job", 0.3)
    with pytest.raises(StoreUnavailable, match=r"cannot connect to no-such-host\.invalid:29400"):
        C10dStore.connect("no-such-host.invalid", 29400, "job", 3.0)  # the answer may take its time


class _Silent404(BaseHTTPRequestHandler):
    timeout = 1.5

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("other", ["silent listener", "web server"])
def test_something_else_that_listens_is_said_in_time(openings_end: None, other: str) -> None:
    server = ThreadingHTTPServer((ADDRESS, 0), _Silent404)
    port = server.server_address[1]
    if other == "web server":
        threading.Thread(target=server.serve_forever, daemon=True).start()
    joined = in_thread(lambda: C10dStore.connect(ADDRESS, port, "job", 1.0))
    outcome = joined()
    assert isinstance(outcome, StoreUnavailable)
    assert f"{ADDRESS}:{port}" in str(outcome)
    assert "does not answer as a TCPStore" in str(outcome)
    if other == "web server":
        server.shutdown()
    server.socket.close()


def test_a_host_that_ends_while_a_connection_is_made_is_not_called_another_program(
    openings_end: None,
) -> None:
    """torch goes on trying at the closed port, for longer than anybody waits."""
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    joined = in_thread(lambda: C10dStore.connect(ADDRESS, port, "job", 1.0))
    for _ in ("the probe", "torch"):
        connection, _ = listener.accept()
    listener.close()
    connection.close()
    assert f"no process listens on {ADDRESS}:{port}" in str(joined())


def started_host() -> tuple[C10dHost, int]:
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    return C10dHost(listener, ADDRESS, "job"), port


def foreign_store() -> tuple[TCPStore, int]:
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def test_a_port_of_another_program_is_named_long_before_the_join_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(c10d_store_module, "SILENT_S", 0.2)
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    joined = in_thread(lambda: C10dStore.connect(ADDRESS, port, "job", PATIENCE_S))
    said = f"no rendezvous store yet: something listens on {ADDRESS}:{port}"
    eventually(lambda: said in caplog.text, "it is said while the agent tries on")
    host = C10dHost(listener, ADDRESS, "job")
    store = joined()
    assert isinstance(store, C10dStore), "it only was slow"
    store.close()
    host.close()


def test_a_tcpstore_of_another_program_is_refused() -> None:
    _foreign, port = foreign_store()
    with pytest.raises(
        StoreMismatch, match=rf"{ADDRESS}:{port} is a TCPStore, but not one that elastic-agent hosts"
    ):
        C10dStore.connect(ADDRESS, port, "job", PATIENCE_S)


def test_a_host_that_stood_still_is_not_mistaken_for_another_program(
    c10d_host: tuple[C10dHost, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives up a wait that the host answers late, and then does not look at the answer."""

    class Late(TCPStore):
        def wait(self, *_: object) -> None:
            raise DistStoreError("wait timeout after 2000ms")

    monkeypatch.setattr("torch.distributed.TCPStore", Late)
    _, port = c10d_host
    store = C10dStore.connect(ADDRESS, port, "job", PATIENCE_S)
    assert isinstance(store.read(("",)), Snapshot)
    store.close()


OURS = {"schema": SCHEMA, "program": "elastic-agent", "job": "job", "host": "h"}


@pytest.mark.parametrize(
    ("meta", "found"),
    [
        (json.dumps(OURS | {"job": "other"}), "job 'other', expected 'job'"),
        (
            json.dumps(OURS | {"schema": SCHEMA + 1}),
            f"schema {SCHEMA + 1}, this version of elastic-agent speaks schema {SCHEMA}",
        ),
        (json.dumps({"program": "torchrun"}), "program 'torchrun', expected 'elastic-agent'"),
        (json.dumps({key: OURS[key] for key in ("schema", "program", "job")}), "meta.host is missing"),
        ("\x80\x05garbage", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("x" * (REQUEST_LIMIT_BYTES + 1), "did not write"),
    ],
)
def test_a_store_whose_meta_is_not_ours_is_refused(meta: str, found: str) -> None:
    foreign, port = foreign_store()
    foreign.set(META_KEY, meta)
    with pytest.raises(StoreMismatch) as caught:
        C10dStore.connect(ADDRESS, port, "job", PATIENCE_S)
    assert f"{ADDRESS}:{port}" in str(caught.value)
    assert found in str(caught.value)


def test_the_store_of_a_check_is_not_the_jobs() -> None:
    """It ends with the check. Its own nodes, and a job of another name, are answered as ever."""
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    with contextlib.closing(C10dHost(listener, ADDRESS, check_of("job"))):
        with pytest.raises(StoreUnavailable, match="check --nodes` hosts a store of its own"):
            C10dStore.connect(ADDRESS, port, "job", 3.0)
        with pytest.raises(StoreMismatch):
            C10dStore.connect(ADDRESS, port, "other", PATIENCE_S)
        C10dStore.connect(ADDRESS, port, check_of("job"), PATIENCE_S).close()


# Neighbours on the port


def test_garbage_bytes_and_http_to_the_port_harm_nobody(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int]
) -> None:
    _, port = c10d_host
    store = connect(port)
    held = []
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 10_000, b"\xff" * 10_000, b"\x80\x05.", b""):
        stranger = socket.create_connection((ADDRESS, port))
        stranger.sendall(junk)
        held.append(stranger)
    put(store, "k")
    assert [entry.key for entry in connect(port).read(("",)).entries] == ["k"]
    for stranger in held:
        stranger.close()
    put(store, "k")


def encoded(kind: object, **fields: object) -> bytes:
    message = {"v": SCHEMA, "client": STRANGER, "link": 1, "id": 1, "kind": kind}
    return json.dumps(message | fields).encode()


READ: dict[str, object] = {"kind": "read", "scopes": [], "oldest_under": None}
JUNK = [
    b"",
    b"\x80\x05]\x94.",
    b"[" * 100_000,
    encoded(**READ | {"client": "../../etc/passwd"}),
    encoded(**READ | {"id": 1e300}),
    encoded(**READ | {"scopes": ["x" * REQUEST_LIMIT_BYTES]}),
    encoded(**READ | {"v": SCHEMA + 1}),
    encoded("shutdown"),
    encoded("grant", ttl_s=float("nan")),
    encoded(None),
]
"""What else may come: `tests/unit/test_store_wire.py`."""


def test_garbage_in_the_request_queue_is_counted_and_dropped(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int]
) -> None:
    host, port = c10d_host
    stranger, store = raw_client(port), connect(port)
    for count, junk in enumerate(JUNK, start=1):
        stranger.queue_push(REQUEST_QUEUE, junk)
        eventually(lambda count=count: host.dropped == count, f"dropped {junk[:60]!r}")  # type: ignore[misc]
        assert store.read(("",)).entries == ()


def test_replies_to_nobody_and_garbage_in_a_reply_queue_are_passed_over(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int]
) -> None:
    _, port = c10d_host
    store = connect(port)
    mine = reply_queue(store._client, 1)
    for junk in (b"\x80\x05.", b"", encode_reply(Reply(99, Done())), encode_reply(Reply(0, Done()))):
        raw_client(port).queue_push(mine, junk)
    assert isinstance(store.read(("",)), Snapshot)


def test_an_answer_of_the_wrong_kind_is_refused(connect: Callable[..., C10dStore]) -> None:
    host, port = foreign_store()
    host.set(META_KEY, json.dumps(OURS))
    store = connect(port)
    asked = in_thread(lambda: store.read(("",)))
    host.queue_pop(REQUEST_QUEUE)
    host.queue_push(reply_queue(store._client, 1), encode_reply(Reply(1, Done())))
    assert isinstance(asked(), StoreMismatch)


def test_a_late_call_over_an_older_link_is_not_done(c10d_host: tuple[C10dHost, int]) -> None:
    host, port = c10d_host
    client = raw_client(port)
    client.queue_push(REQUEST_QUEUE, encode_request(Request(Caller(STRANGER, 2, 1), Read(("",)))))
    assert isinstance(decode_reply(client.queue_pop(reply_queue(STRANGER, 2))).result, Snapshot)
    late = Transact((), (Put("late", ""),))
    client.queue_push(REQUEST_QUEUE, encode_request(Request(Caller(STRANGER, 1, 7), late)))
    eventually(lambda: host.dropped == 1, "the late call was dropped")
    assert host.read(("",)).entries == ()


# Bounds


def test_what_a_dead_client_left_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(c10d_host_module, "SWEEP_S", 0.01)
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    host = C10dHost(listener, ADDRESS, "job", clock=lambda: now[0])
    client, replies = raw_client(port), reply_queue(STRANGER, 1)
    client.queue_push(REQUEST_QUEUE, encode_request(Request(Caller(STRANGER, 1, 1), LongPoll(("k",), 0))))
    client.queue_push(REQUEST_QUEUE, encode_request(Request(Caller(STRANGER, 1, 2), Read(("k",)))))
    eventually(lambda: client.queue_len(replies) == 1, "the second call was answered, the first pending")
    now[0] += PENDING_S - c10d_host_module.SWEEP_S
    eventually(
        lambda: client.queue_len(replies) == 2, "the pending call was answered a sweep before it is late"
    )
    now[0] += QUIET_S
    eventually(lambda: not host._clients, "the client was forgotten, and before it its answers thrown away")
    with pytest.raises(QueueEmptyError):
        client.queue_pop(replies, False)
    assert not host._pending
    host.close()


def test_what_is_too_long_is_refused_and_nothing_else_harmed(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int]
) -> None:
    _, port = c10d_host
    store = connect(port)
    with pytest.raises(StoreError, match="too long for the c10d store"):
        store.transact((), (Put("k", "x" * REQUEST_LIMIT_BYTES),))
    for n in range(40):
        store.transact((), (Put(f"k/{n}", "x" * 200_000),))
    with pytest.raises(StoreError, match="the answer has"):
        store.read(("k/",))
    with pytest.raises(Compacted, match="the answer has"):
        store.watch(("k/",), 0).next(PATIENCE_S)
    assert len(store.read(("k/7",)).entries) == 1


def test_when_more_changed_at_once_than_is_remembered_every_watch_is_told_to_read_again(
    connect: Callable[..., C10dStore], c10d_host: tuple[C10dHost, int]
) -> None:
    host, port = c10d_host
    store = connect(port)
    watch = store.watch(("mine",), 0)
    assert watch.next(0.1) == ()
    eventually(lambda: bool(host._pending), "the watch waits")
    with host._watching:  # holds up the thread that tells of changes
        for _ in range(0, 2 * HISTORY, MOST_OPERATIONS):
            host.transact((), tuple(Put(f"k{n}", "") for n in range(MOST_OPERATIONS)))
    with pytest.raises(Compacted):
        watch.next(PATIENCE_S)
    again = store.watch(("mine",), store.read(("mine",)).revision)
    put(host, "mine")
    assert [change.key for change in again.next(PATIENCE_S)] == ["mine"]


def test_calls_to_a_host_that_does_not_read_are_bounded(
    openings_end: None, connect: Callable[..., C10dStore], host_process: Callable[..., object]
) -> None:
    host = host_process()
    store = connect(host.port, request_timeout_s=0.001)
    stop(host.process.pid)
    outcomes = set()
    for _ in range(400):
        try:
            store.transact((), (Put("k", "x" * 100_000),))
        except StoreUnavailable as error:
            outcomes.add("calls wait" in str(error))
    assert outcomes == {True, False}


def test_importing_the_store_does_not_import_torch() -> None:
    program = (
        "import sys; import elastic_agent.rendezvous.c10d.store, elastic_agent.rendezvous.c10d.host; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
