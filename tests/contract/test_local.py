"""What the local store does when its host ends, its disk is full, and others than its clients come to its socket."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest

from elastic_agent.rendezvous.errors import (
    Compacted,
    LeaseExpired,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from elastic_agent.rendezvous.local import host as host_module
from elastic_agent.rendezvous.local.files import MOST_PATH_BYTES, HostedAlready, StoreFiles
from elastic_agent.rendezvous.local.frames import Frames, frame
from elastic_agent.rendezvous.local.host import LocalHost
from elastic_agent.rendezvous.local.journal import Journal
from elastic_agent.rendezvous.local.store import LocalStore
from elastic_agent.rendezvous.store.interface import Delete, Put, Store
from elastic_agent.rendezvous.store.requests import Read
from elastic_agent.rendezvous.store.wire import (
    REQUEST_LIMIT_BYTES,
    Call,
    Caller,
    Refused,
    Reply,
    Request,
    Transact,
    decode_reply,
    encode_request,
)
from tests.contract.conftest import start_local_process

PATIENCE_S = 20.0
NOBODY = 65534
CLIENT = "0123456789abcdef" * 2

Hosts = Callable[[], LocalHost]


@pytest.fixture
def place(tmp_path: Path) -> StoreFiles:
    return StoreFiles(tmp_path, "pool")


@pytest.fixture
def connect(place: StoreFiles) -> Iterator[Callable[..., LocalStore]]:
    with ExitStack() as ends:

        def client(timeout_s: float = PATIENCE_S) -> LocalStore:
            store = LocalStore.connect(place, PATIENCE_S, timeout_s)
            ends.callback(store.close)
            return store

        yield client


@pytest.fixture
def host_process(place: StoreFiles) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    with ExitStack() as ends:

        def start() -> subprocess.Popen[str]:
            process = start_local_process(place.folder)
            ends.callback(end, process)
            return process

        yield start


def put(store: Store, key: str, value: str = "", lease: int | None = None) -> int:
    return store.transact((), (Put(key, value, lease),)).revision


def values(store: Store) -> dict[str, str]:
    return {entry.key: entry.value for entry in store.read(("",)).entries}


def end(process: subprocess.Popen[str]) -> None:
    """Also one that has ended."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def until_answered(work: Callable[[], object]) -> None:
    """Asks again while the store is not there, as each of its users does."""

    def answered() -> bool:
        try:
            work()
        except StoreUnavailable:
            return False
        return True

    eventually(answered)


class Raw:
    """A connection on which anything may be sent."""

    def __init__(self, place: StoreFiles) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(place.socket))
        self._frames = Frames(2**31)
        assert self.message() is not None, "the host introduces itself"

    def send(self, call: Call, link: int = 1, number: int = 1) -> None:
        self.socket.sendall(frame(encode_request(Request(Caller(CLIENT, link, number), call))))

    def message(self) -> bytes | None:
        while (message := self._frames.take()) is None:
            if not (received := self.socket.recv(2**16)):
                return None
            self._frames.feed(received)
        return message

    def reply(self) -> Reply:
        message = self.message()
        assert message is not None
        return decode_reply(message)

    @property
    def is_cut(self) -> bool:
        try:
            return self.message() is None
        except ConnectionResetError:
            return True


# Who hosts

STARTER = """
import sys
from pathlib import Path
from elastic_agent.rendezvous.local.kind import LOCAL
from elastic_agent.rendezvous.store.interface import Compare, Put
from elastic_agent.rendezvous.store.store_kind import Access
print("ready", flush=True)
sys.stdin.readline()
store = LOCAL.offer(Access((), "pool", 20.0, 30.0, Path(sys.argv[1])))
while True:
    (entry,) = store.read(("count",)).entries or (None,)
    before, count = (entry.mod_revision, int(entry.value)) if entry else (0, 0)
    if store.transact((Compare("count", before),), (Put("count", str(count + 1)),)).succeeded:
        break
print(type(store).__name__, flush=True)
sys.stdin.readline()
"""


def test_of_several_that_start_at_once_one_hosts_and_the_others_meet_there(place: StoreFiles) -> None:
    """Three times, the second and third with what a killed host has left behind."""
    count, rounds, starters = 0, 3, 6
    for _ in range(rounds):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", STARTER, str(place.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(starters)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            kinds = [process.stdout.readline().strip() for process in processes if process.stdout]
            assert sorted(kinds) == ["LocalHost", *["LocalStore"] * (starters - 1)]
            count += starters
            with closing(LocalStore.connect(place, PATIENCE_S)) as store:
                assert values(store) == {"count": str(count)}
        finally:
            for process in processes:
                end(process)
        assert place.socket.exists(), "a killed host removes nothing"


WORKER = """
import sys, time
from pathlib import Path
from elastic_agent.rendezvous.errors import StoreError
from elastic_agent.rendezvous.local.kind import LOCAL
from elastic_agent.rendezvous.store.interface import Put
from elastic_agent.rendezvous.store.store_kind import Access
store = LOCAL.offer(Access((), "pool", 20.0, 30.0, Path(sys.argv[1])))
print("there", flush=True)
for number in range(1_000_000):
    try:
        store.transact((), (Put(f"alive/{sys.argv[2]}", str(number)),))
    except StoreError:
        pass
    time.sleep(0.01)
"""


def test_when_the_host_is_killed_one_of_the_others_takes_its_place(place: StoreFiles) -> None:
    with ExitStack() as ends:
        processes = []
        for number in range(4):
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(place.folder), str(number)],
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.callback(end, process)
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            processes.append(process)

        def host() -> int:
            with closing(socket.socket(socket.AF_UNIX)) as asked:
                asked.connect(str(place.socket))
                credentials = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return int.from_bytes(credentials[:4], sys.byteorder)

        eventually(lambda: len(values_there(place)) == len(processes))
        known = values_there(place)
        while len(processes) > 1:
            (hosting,) = [process for process in processes if process.pid == host()]
            end(hosting)
            processes.remove(hosting)
            alive = {f"alive/{process.args[-1]}" for process in processes}  # type: ignore[index]
            eventually(partial(known_again, place, known, alive))
            assert values_there(place).keys() == known.keys(), "nothing is lost"
            known = values_there(place)


def values_there(place: StoreFiles) -> dict[str, str]:
    with closing(LocalStore.connect(place, PATIENCE_S)) as store:
        return values(store)


def known_again(place: StoreFiles, before: dict[str, str], alive: set[str]) -> bool:
    """All of these have written since."""
    found = values_there(place)
    return all(int(found[key]) > int(before[key]) for key in alive)


def test_a_second_host_is_refused_and_harms_the_first_in_nothing(
    local_host: Hosts, connect: Callable[..., LocalStore]
) -> None:
    local_host()
    store = connect()
    put(store, "k", "v")
    with pytest.raises(HostedAlready):
        local_host()
    assert values(store) == {"k": "v"}


def test_pools_of_other_names_in_one_folder_are_others(tmp_path: Path) -> None:
    with (
        closing(LocalHost(StoreFiles(tmp_path, "a"))) as a,
        closing(LocalHost(StoreFiles(tmp_path, "b"))) as b,
    ):
        put(a, "k", "a")
        assert values(b) == {}


def test_a_path_that_is_too_long_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * MOST_PATH_BYTES)
    for attempt in (
        lambda: LocalHost(StoreFiles(folder, "pool")),
        lambda: LocalStore.connect(StoreFiles(folder, "pool"), 0.1),
    ):
        with pytest.raises(StoreRefused, match="choose a shorter folder"):
            attempt()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=f"cannot host the store of pool pool in {tmp_path}/none"):
        LocalHost(StoreFiles(tmp_path / "none", "pool"))


def test_where_no_host_is_a_client_gives_up_in_time_and_says_what_to_start(place: StoreFiles) -> None:
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="start elastic-agent without a script"):
        LocalStore.connect(place, 0.3)
    assert time.monotonic() - began < 2.0


# Who may connect


def test_files_and_socket_are_for_this_user_alone(local_host: Hosts, place: StoreFiles) -> None:
    put(local_host(), "k", "v")
    for file in (place.socket, place.state, place.lock):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away_even_where_folder_and_socket_would_let_it_in(open_folder: Path) -> None:
    place = StoreFiles(open_folder, "pool")
    attempt = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1]);"
        "print(s.recv(100))"
    )

    def as_nobody() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/usr/bin/python3", "-c", attempt, str(place.socket)],
            user=NOBODY,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    with closing(LocalHost(place)) as host:
        assert "PermissionError" in as_nobody().stderr
        place.socket.chmod(0o777)
        assert as_nobody().stdout == "b''\n"
        assert host.dropped == 1
        with closing(LocalStore.connect(place, PATIENCE_S)) as store:
            put(store, "k")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_client_that_may_not_enter_is_told_whose_the_pool_is(open_folder: Path) -> None:
    open_folder.chmod(0o700)
    code = (
        "import os, sys; from pathlib import Path; from elastic_agent.rendezvous.local.files import StoreFiles\n"
        "from elastic_agent.rendezvous.local.store import LocalStore\n"
        "os.setuid(65534)\n"
        "LocalStore.connect(StoreFiles(Path(sys.argv[1]), 'pool'), 5.0)"
    )
    with closing(LocalHost(StoreFiles(open_folder, "pool"))):
        done = subprocess.run(
            [sys.executable, "-c", code, str(open_folder)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert "StoreRefused" in done.stderr
    assert "belongs to another user" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_may_use_another_users_pool_but_not_where_anybody_can_wait_for_it(open_folder: Path) -> None:
    folder = open_folder / "pool"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    code = (
        "import os, sys; from pathlib import Path; from elastic_agent.rendezvous.local.files import StoreFiles\n"
        "from elastic_agent.rendezvous.local.host import LocalHost\n"
        "os.setuid(65534); host = LocalHost(StoreFiles(Path(sys.argv[1]), 'pool')); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        with closing(LocalStore.connect(StoreFiles(folder, "pool"), PATIENCE_S)) as store:
            put(store, "k", "v")
            assert values(store) == {"k": "v"}
        open_folder.chmod(0o1777)
        with pytest.raises(StoreRefused, match=f"user {NOBODY} hosts the store in {folder}"):
            LocalStore.connect(StoreFiles(folder, "pool"), PATIENCE_S)
    finally:
        end(process)


# What is sent there


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        (REQUEST_LIMIT_BYTES + 1).to_bytes(4, "big"),
        frame(b"not json"),
        frame(b"[]"),
        frame(b'{"kind": "read"}'),
        frame(b"\x80\x04\x95"),
        frame(b"[" * 100_000),
        frame(encode_request(Request(Caller(CLIENT, 1, 1), Read(())))) + b"\xff" * 8,
    ],
    ids=lambda sent: repr(sent[:12]),
)
def test_what_is_no_call_ends_its_connection_and_no_other(
    local_host: Hosts, connect: Callable[..., LocalStore], place: StoreFiles, sent: bytes
) -> None:
    host, store = local_host(), connect()
    watch = store.watch(("",), store.read(()).revision)
    assert watch.next(0.05) == ()
    raw = Raw(place)
    raw.socket.sendall(sent)
    if b"read" in sent and sent.endswith(b"\xff"):
        assert raw.reply().id == 1
    assert raw.is_cut
    assert host.dropped == 1
    put(store, "k")
    assert [change.key for change in watch.next(PATIENCE_S)] == ["k"]


def test_a_call_of_another_version_is_answered(local_host: Hosts, place: StoreFiles) -> None:
    local_host()
    raw = Raw(place)
    call = b'{"v":99,"kind":"new","client":"%s","link":1,"id":7}' % CLIENT.encode()
    raw.socket.sendall(frame(call))
    reply = raw.reply()
    assert reply.id == 7
    assert isinstance(reply.result, Refused)


def test_a_message_in_pieces_is_done_and_one_that_does_not_end_is_cut(
    local_host: Hosts, place: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "MESSAGE_S", 0.5)
    host = local_host()
    raw = Raw(place)
    message = frame(encode_request(Request(Caller(CLIENT, 1, 1), Transact((), (Put("k", "v"),)))))
    for byte in message:
        raw.socket.sendall(bytes([byte]))
    assert raw.reply().id == 1
    raw.socket.sendall(message[:-1])
    began = time.monotonic()
    assert raw.is_cut
    assert 0.3 < time.monotonic() - began < 5.0
    assert values(host) == {"k": "v"}


def test_a_client_that_does_not_read_is_not_read_and_others_are_answered(
    local_host: Hosts, connect: Callable[..., LocalStore], place: StoreFiles
) -> None:
    host, store = local_host(), connect()
    put(store, "k", "x" * 500_000)
    raw, asked = Raw(place), 0
    raw.socket.settimeout(0.5)
    with suppress(TimeoutError):
        for asked in range(100_000):
            raw.send(Read(("k",)), number=asked)
    assert 8 < asked < 99_999
    (mine,) = [one for one in host._connections if one.to_send]
    assert len(mine.to_send) <= 2, "what is not read is not done"
    assert len(store.read(("k",)).entries) == 1
    raw.socket.settimeout(PATIENCE_S)
    assert [raw.reply().id for _ in range(8)] == list(range(8))


def test_silent_clients_cost_nothing(
    host_process: Callable[[], subprocess.Popen[str]], place: StoreFiles
) -> None:
    process = host_process()
    silent = [Raw(place) for _ in range(300)]

    def cpu_s() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s()
    time.sleep(2.0)
    assert cpu_s() - before <= 0.03
    for raw in silent:
        raw.socket.close()


def test_more_connections_than_there_may_be_are_refused_and_the_others_live(
    local_host: Hosts, connect: Callable[..., LocalStore], place: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "MOST_CONNECTIONS", 3)
    host = local_host()
    store = connect()
    others = [Raw(place) for _ in range(2)]
    with pytest.raises(StoreUnavailable):
        LocalStore.connect(place, 1.0)
    assert host.dropped
    put(store, "k")
    others[0].socket.close()
    LocalStore.connect(place, PATIENCE_S).close()


def test_a_process_without_file_descriptors_accepts_again_when_it_has_some(
    local_host: Hosts, connect: Callable[..., LocalStore], place: StoreFiles
) -> None:
    local_host()
    store = connect()
    held: list[int] = []
    waiting = socket.socket(socket.AF_UNIX)
    waiting.settimeout(PATIENCE_S)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        waiting.connect(str(place.socket))
        put(store, "k")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in held:
            os.close(fd)
    assert waiting.recv(100)
    waiting.close()


# Calls without an answer


def test_a_host_that_stands_still_is_unavailable_in_time_and_used_again_when_it_goes_on(
    host_process: Callable[[], subprocess.Popen[str]], connect: Callable[..., LocalStore]
) -> None:
    process, store = host_process(), connect(0.5)
    watch = store.watch(("",), store.read(()).revision)
    assert watch.next(0.05) == ()
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="hangs"):
            put(store, "k", "late")
        assert time.monotonic() - began < 2.0
    assert watch.next(0.1) == ()
    process.send_signal(signal.SIGCONT)
    until_answered(lambda: put(store, "k", "new"))
    assert values(store) == {"k": "new"}
    eventually(lambda: any(change.entry and change.entry.value == "new" for change in watch.next(1.0)))


def test_a_call_that_its_client_gave_up_on_is_not_done_after_a_later_one(
    local_host: Hosts, place: StoreFiles
) -> None:
    host = local_host()
    early, late = Raw(place), Raw(place)
    late.send(Transact((), (Put("k", "1"),)), link=1)
    assert late.reply().id == 1
    early.send(Read(("k",)), link=2, number=2)
    assert early.reply().id == 2
    late.send(Transact((), (Put("k", "too late"),)), link=1, number=3)
    refused = late.reply()
    assert isinstance(refused.result, Refused)
    assert refused.result.error == "StoreUnavailable"
    assert values(host) == {"k": "1"}


def test_a_host_forgets_clients_that_have_gone(local_host: Hosts, place: StoreFiles) -> None:
    host = local_host()
    with closing(LocalStore.connect(place, PATIENCE_S)) as store:
        put(store, "k")
        assert len(host._clients) == 1
    eventually(lambda: not host._clients and not host._connections)


# The next host


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_all_keys_and_leases_outlive_the_host_in_their_order(
    host_process: Callable[[], subprocess.Popen[str]], connect: Callable[..., LocalStore], how: str
) -> None:
    process, store = host_process(), connect()
    lease = store.grant(3600.0)
    for name in ("b", "a", "c", "d", "e"):
        put(store, f"jobs/{name}", name)
    put(store, "jobs/b", "again")
    put(store, "nodes/n", "", lease)
    put(store, "jobs/d", "leased", lease)
    put(store, "was leased", "", lease)
    put(store, "was leased", "kept")
    store.transact((), (Delete("jobs/c"), Put("plan", "x" * 100_000)))
    watch = store.watch(("",), store.read(()).revision)
    assert watch.next(0.05) == ()
    before = store.read(("",))
    if how == "killed":
        end(process)
    else:
        process.communicate()
    with pytest.raises(StoreUnavailable):
        store.read(("",))
    host_process()
    after = connect().read(("",))
    assert after.entries == before.entries
    assert after.revision >> 32 == (before.revision >> 32) + 1
    until_answered(lambda: store.keep_alive(lease))
    for one in (watch, store.watch(("",), before.revision)):
        with pytest.raises(Compacted):
            until_answered(partial(one.next, 1.0))
    assert store.grant(3600.0) > lease
    following = store.watch(("",), store.read(()).revision)
    store.revoke(lease)
    assert [change.key for change in following.next(PATIENCE_S)] == ["jobs/d", "nodes/n"]
    with pytest.raises(LeaseExpired):
        store.keep_alive(lease)


def test_a_queue_outlives_the_folder_of_the_socket_where_another_one_is_to_last(tmp_path: Path) -> None:
    """As that of a service does, which the machine's restart empties."""
    folder, lasting = tmp_path / "run", tmp_path / "lib"
    lasting.mkdir()
    place = StoreFiles(folder, "pool", lasting)
    for expected in ({}, {"jobs/a": "job"}):
        folder.mkdir()
        with closing(LocalHost(place)) as host:
            with closing(LocalStore.connect(StoreFiles(folder, "pool"), PATIENCE_S)) as client:
                assert values(client) == expected
            put(host, "jobs/a", "job")
        shutil.rmtree(folder)
    assert [file.name for file in lasting.iterdir()] == ["pool.state"]


HOLDER = """
import sys
from pathlib import Path
from elastic_agent.rendezvous.local.files import StoreFiles
from elastic_agent.rendezvous.local.store import LocalStore
from elastic_agent.rendezvous.store.interface import Put
store = LocalStore.connect(StoreFiles(Path(sys.argv[1]), "pool"), 20.0)
lease = store.grant(float(sys.argv[2]))
store.transact((), (Put(sys.argv[3], "", lease),))
print("holds", flush=True)
sys.stdin.read()
"""


def test_the_next_host_waits_for_the_leases_of_those_who_live_and_not_for_the_dead(
    host_process: Callable[[], subprocess.Popen[str]], place: StoreFiles
) -> None:
    host = host_process()
    with ExitStack() as ends:
        for key, ttl_s in (("dead", "3600"), ("alive", "3600"), ("silent", "3")):
            holder = subprocess.Popen(
                [sys.executable, "-c", HOLDER, str(place.folder), ttl_s, key],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.callback(end, holder)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds\n"
            if key == "dead":
                end(holder)
        end(host)
        host_process()
        there = partial(values_there, place)
        assert "silent" in there()
        eventually(lambda: sorted(there()) == ["alive", "silent"])
        eventually(lambda: sorted(there()) == ["alive"])


def test_a_lease_that_has_ended_does_not_come_back(local_host: Hosts, place: StoreFiles) -> None:
    host = local_host()
    expiring, revoked = host.grant(0.1), host.grant(60.0)
    put(host, "expiring", "", expiring)
    put(host, "revoked", "", revoked)
    host.revoke(revoked)
    eventually(lambda: not values(host))
    host.close()
    again = local_host()
    assert values(again) == {}
    for lease in (expiring, revoked):
        with pytest.raises(LeaseExpired):
            again.keep_alive(lease)


def test_whatever_was_answered_before_a_kill_is_there_after_it(
    host_process: Callable[[], subprocess.Popen[str]], place: StoreFiles
) -> None:
    answered: set[str] = set()
    for round_ in range(4):
        process = host_process()

        def write(name: str, round_: int = round_) -> None:
            with closing(LocalStore.connect(place, PATIENCE_S)) as store:
                for number in range(100_000):
                    key = f"{round_}/{name}/{number}"
                    try:
                        put(store, key, "x" * 300)
                    except StoreUnavailable:
                        return
                    answered.add(key)

        threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        end(process)
        for thread in threads:
            thread.join()
    host_process()
    with closing(LocalStore.connect(place, PATIENCE_S)) as store:
        found = values(store)
    assert len(answered) > 20
    assert answered <= found.keys()
    assert len(found) <= len(answered) + 4 * 3


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_dropped_with_a_word(
    local_host: Hosts, place: StoreFiles, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    host = local_host()
    for number in range(3):
        put(host, f"k{number}")
    host.close()
    place.state.write_bytes(place.state.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert list(values(local_host())) == ["k0", "k1"]
    assert "dropped the last" in caplog.text


def test_a_damaged_file_is_put_aside_aloud_and_its_numbers_do_not_come_again(
    local_host: Hosts, place: StoreFiles, caplog: pytest.LogCaptureFixture
) -> None:
    host = local_host()
    for number in range(5):
        put(host, f"k{number}", "content")
    host.close()
    damaged = place.state.read_bytes().replace(b"k1", b"kx")
    place.state.write_bytes(damaged)
    again = local_host()
    assert values(again) == {}
    (aside,) = place.folder.glob("pool.state.damaged-*")
    assert aside.read_bytes() == damaged
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "must be submitted again" in caplog.text
    assert str(aside) in caplog.text
    put(again, "k")


# The disk


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each write to the disk; a test may have them fail."""
    sizes: list[int] = []
    write = Journal._write

    def counted(fd: int, content: bytes) -> int:
        sizes.append(len(content))
        return write(fd, content)

    monkeypatch.setattr(Journal, "_write", staticmethod(counted))
    return sizes


def test_a_thousand_jobs_do_not_write_the_whole_queue_a_thousand_times(
    local_host: Hosts, place: StoreFiles, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)  # a test may lie on a slow disk
    host, size = local_host(), 5000
    for number in range(1000):
        put(host, f"jobs/{number}", "x" * size)
    assert sum(written) < 4 * 1000 * size
    lease = host.grant(3600.0)
    for number in range(5000):
        put(host, "plan", str(number) * 500, None if number % 2 else lease)
    put(host, "plan", "4999" * 500)
    for number in range(5000):
        put(host, "nodes/n", str(number) * 1000, lease)
    eventually(lambda: place.state.stat().st_size < 3 * 1000 * size)
    assert place.state.stat().st_size < 3 * 1000 * size
    host.close()
    found = values(local_host())
    assert len(found) == 1002
    assert found["plan"] == "4999" * 500


def test_a_full_disk_refuses_what_should_last_and_nothing_else_until_there_is_room(
    local_host: Hosts,
    connect: Callable[..., LocalStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, store = local_host(), connect()
    put(store, "before")
    lease, write = store.grant(60.0), Journal._write

    def full(fd: int, content: bytes) -> int:
        os.write(fd, content[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Journal, "_write", staticmethod(full))
    for attempt in (lambda: put(store, "k"), lambda: put(host, "l"), lambda: put(store, "m")):
        with pytest.raises(StoreUnavailable, match=r"No space left.*make room"):
            attempt()
    put(store, "nodes/n", "", lease)
    store.keep_alive(lease)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    monkeypatch.setattr(Journal, "_write", staticmethod(write))
    put(store, "after")
    host.close()
    assert list(values(local_host())) == ["after", "before", "k", "l", "m", "nodes/n"]


def test_only_who_writes_what_is_to_last_waits_for_the_disk(
    local_host: Hosts, connect: Callable[..., LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    local_host()
    writer, other = connect(), connect()
    moves, fdatasync, done = threading.Event(), os.fdatasync, threading.Event()

    def slow(fd: int) -> None:
        moves.wait()
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    thread = threading.Thread(target=lambda: (put(writer, "k", "v"), done.set()))
    thread.start()
    eventually(lambda: values(other) == {"k": "v"})
    lease = other.grant(60.0)
    put(other, "nodes/n", "", lease)
    other.keep_alive(lease)
    assert not done.is_set()
    moves.set()
    thread.join(PATIENCE_S)
    assert done.is_set()


def test_a_call_that_is_too_long_is_refused_on_this_side(
    local_host: Hosts, connect: Callable[..., LocalStore]
) -> None:
    local_host()
    store = connect()
    with pytest.raises(StoreError, match="too long for the local store"):
        put(store, "k", "x" * REQUEST_LIMIT_BYTES)
    assert values(store) == {}


# Commands


def test_a_daemon_and_the_commands_use_it_without_torch(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "elastic_agent", "--max-nodes", "2", "--node-id", "a"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        eventually(lambda: bool(list(tmp_path.glob("*/pool.sock"))))
        code = (
            "import sys; from elastic_agent.cli import main\n"
            "ended = [main(words.split()) for words in sys.argv[1:]]\n"
            "print(ended, {'torch', 'grpc', 'numpy'} & set(sys.modules))"
        )
        (tmp_path / "t.py").write_text("")
        commands = (f"submit --min-nodes 2 {tmp_path}/t.py", "jobs", "jobs --json", "cancel t.py")
        shown = ""

        def submitted() -> bool:
            nonlocal shown
            done = subprocess.run(
                [sys.executable, "-c", code, *commands],
                env=environ,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            shown = done.stdout + done.stderr
            return "[0, 0, 0, 0] set()" in shown

        eventually(submitted)
        assert "torch" not in Path(f"/proc/{daemon.pid}/maps").read_text(), shown
    finally:
        daemon.terminate()
        daemon.communicate(timeout=PATIENCE_S)
