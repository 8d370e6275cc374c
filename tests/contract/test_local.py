"""What the store of one machine keeps when processes are killed, power goes or its disk is full, and who may use it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from elastic_agent.rendezvous.errors import (
    Compacted,
    LeaseExpired,
    StoreMismatch,
    StoreRefused,
    StoreUnavailable,
)
from elastic_agent.rendezvous.local.store import HISTORY, LONG, LOOK_S, LocalStore, store_file
from elastic_agent.rendezvous.store.interface import Delete, Put, Store

PATIENCE_S = 20.0
NOBODY = 65534


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return store_file(tmp_path, "pool")


@pytest.fixture
def offer(file: Path) -> Iterator[Callable[..., LocalStore]]:
    """Another handle, as a daemon has one."""
    with ExitStack() as ends:

        def make(timeout_s: float = PATIENCE_S) -> LocalStore:
            return ends.enter_context(closing(LocalStore.connect(file, PATIENCE_S, timeout_s, make=True)))

        yield make


def put(store: Store, key: str, value: str = "", lease: int | None = None) -> int:
    return store.transact((), (Put(key, value, lease),)).revision


def values(store: Store) -> dict[str, str]:
    return {entry.key: entry.value for entry in store.read(("",)).entries}


def values_there(file: Path) -> dict[str, str]:
    with closing(LocalStore.connect(file, PATIENCE_S)) as store:
        return values(store)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def started(program: str, *words: object, stdin: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)], stdin=stdin, stdout=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> None:
    """Also one that has ended."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


# Processes

WRITER = """
import sys
from pathlib import Path
from elastic_agent.rendezvous.local.store import LocalStore, store_file
from elastic_agent.rendezvous.store.interface import Put
store = LocalStore.connect(store_file(Path(sys.argv[1]), "pool"), 20.0, make=True)
for number in range(1_000_000):
    key = f"{sys.argv[2]}/{number}"
    store.transact((), (Put(key, "x" * 300),))
    print(key, flush=True)
"""


def test_whatever_was_answered_before_a_kill_is_there_after_it_and_others_write_on(file: Path) -> None:
    answered: set[str] = set()
    for round_ in range(3):
        writers = [started(WRITER, file.parent, f"{round_}{name}") for name in "abc"]
        try:
            for writer in writers:
                assert writer.stdout is not None
                answered.add(writer.stdout.readline().strip())
            time.sleep(0.2)
            writers[0].kill()
            assert writers[1].stdout is not None
            for _ in range(20):
                answered.add(writers[1].stdout.readline().strip())
        finally:
            for writer in writers:
                writer.kill()
                assert writer.stdout is not None
                answered.update(line.strip() for line in writer.stdout if line.endswith("\n"))
                end(writer)
    found = values_there(file)
    assert len(answered) > 60
    assert answered <= found.keys()
    assert len(found) <= len(answered) + 9, "at most one was done and not answered by each"


def test_order_and_leases_outlive_all_handles(file: Path) -> None:
    with closing(LocalStore.connect(file, PATIENCE_S, make=True)) as store:
        lease = store.grant(3600.0)
        for name in ("b", "a", "c"):
            put(store, f"jobs/{name}", name)
        put(store, "jobs/b", "again")
        put(store, "nodes/n", "", lease)
        store.transact((), (Delete("jobs/c"), Put("plan", "x" * 100_000)))
        before = store.read(("",))
    with closing(LocalStore.connect(file, PATIENCE_S, make=True)) as store:
        assert store.read(("",)) == before
        store.keep_alive(lease)
        watch = store.watch(("",), before.revision)
        store.revoke(lease)
        assert [change.key for change in watch.next(PATIENCE_S)] == ["nodes/n"]
        assert store.grant(1.0) > lease


def test_leases_do_not_outlive_the_boot(offer: Callable[..., LocalStore], file: Path) -> None:
    """A clock that begins anew: what was to end in 3600 s is to end at an instant that no lease can have now."""
    before = offer()
    lease = before.grant(3600.0)
    put(before, "nodes/n", "", lease)
    put(before, "jobs/a")
    with closing(sqlite3.connect(file)) as raw, raw:
        raw.execute("UPDATE leases SET ends = ends + 60")
    after = offer()
    assert list(values(after)) == ["jobs/a"]
    with pytest.raises(LeaseExpired):
        after.keep_alive(lease)


# Power


def test_what_is_to_last_is_on_disk_when_it_is_answered_whatever_power_takes_of_the_rest(
    offer: Callable[..., LocalStore], file: Path, tmp_path: Path
) -> None:
    """The log up to the end of the last answered transaction is on disk; of what follows any part may be torn."""
    store, log = offer(), file.with_name("pool.db-wal")
    put(store, "before")  # the log has its room
    with closing(sqlite3.connect(file)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    statements: list[str] = []
    store._database.set_trace_callback(statements.append)
    for number in range(5):
        put(store, f"jobs/{number}", "job")
    store.transact((), (Delete("before"),))
    durable = log.stat().st_size
    assert [one for one in statements if "synchronous" in one] == ["PRAGMA synchronous = FULL"] * 6
    statements.clear()
    lease = store.grant(3600.0)
    for number in range(5):
        put(store, f"nodes/{number}", "", lease)
        store.keep_alive(lease)
    assert {one for one in statements if "synchronous" in one} == {"PRAGMA synchronous = NORMAL"}
    whole = log.read_bytes()
    assert len(whole) > durable + 4096
    for number, cut in enumerate(range(durable, len(whole), 997)):
        copy = tmp_path / f"after-{number}"
        copy.mkdir(mode=0o700)
        shutil.copy(file, copy)
        (copy / log.name).write_bytes(whole[:cut] + os.urandom(500))
        found = values_there(store_file(copy, "pool"))
        assert [key for key in found if not key.startswith("nodes/")] == [
            f"jobs/{number}" for number in range(5)
        ]


# The disk


FULL_DISK = """
import os, sys, time
from pathlib import Path
from elastic_agent.rendezvous.errors import StoreUnavailable
from elastic_agent.rendezvous.local.store import LocalStore, store_file
from elastic_agent.rendezvous.store.interface import Put
folder = Path(sys.argv[1])
store = LocalStore.connect(store_file(folder, "pool"), 20.0, 0.5, make=True)
lease = store.grant(600.0)
store.transact((), (Put("jobs/a", "job"),))
for number in range(200):
    store.transact((), (Put("nodes/n", str(number) * 1000, lease),))
store._checkpoint()
with open(folder / "filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(bytes(4096))
    except OSError:
        pass
try:
    for number in range(100):
        store.transact((), (Put(f"jobs/{number}", "x" * 90_000),))
    sys.exit("there was room")
except StoreUnavailable as error:
    assert "make room" in str(error), error
for number in range(2000):
    store.keep_alive(lease)
    store.transact((), (Put("nodes/n", str(number), lease),))
    assert store.read(("jobs/a", "nodes/n")).entries[1].value == str(number)
os.unlink(folder / "filler")
store.transact((), (Put("jobs/after", ""),))
assert {"jobs/a", "jobs/after"} <= {entry.key for entry in store.read(("jobs/",)).entries}
print("ok")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount of one process")
def test_a_full_disk_refuses_what_should_last_and_ends_no_lease_and_no_read(tmp_path: Path) -> None:
    mounted = f'mount -t tmpfs -o size=6m,mode=700 none {tmp_path} && exec "$@"'
    words = ("unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", FULL_DISK, str(tmp_path))
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "ok\n", done.stderr


def test_a_lease_that_cannot_be_ended_makes_no_read_fail_and_can_be_confirmed(
    offer: Callable[..., LocalStore], file: Path
) -> None:
    """Another process holds the file's lock, as one that is stopped in the middle of a write."""
    store = offer(0.5)
    kept, lost = store.grant(0.5), store.grant(0.5)
    put(store, "nodes/kept", "", kept)
    put(store, "nodes/lost", "", lost)
    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        time.sleep(0.7)
        began = time.monotonic()
        assert list(values(store)) == ["nodes/kept", "nodes/lost"]
        assert time.monotonic() - began < 0.4, "a read waits for no other process"
        for refused in (lambda: put(store, "jobs/a"), lambda: store.keep_alive(kept)):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                refused()
            assert time.monotonic() - began < 5.0
        holder.execute("ROLLBACK")
    store.keep_alive(kept)

    def only_kept_is_left() -> bool:
        store.keep_alive(kept)
        return list(values(store)) == ["nodes/kept"]

    eventually(only_kept_is_left)
    with pytest.raises(LeaseExpired):
        store.keep_alive(lost)


def test_who_found_others_writing_leaves_them_time_to_confirm_their_leases(
    offer: Callable[..., LocalStore], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All leases are due when a writer has stood still for longer than they last."""
    monkeypatch.setattr("elastic_agent.rendezvous.local.store.BUSY_S", PATIENCE_S)
    store, other = offer(), offer()
    lease = store.grant(0.3)
    put(store, "nodes/n", "", lease)
    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        time.sleep(0.4)
        assert list(values(other)) == ["nodes/n"]
        holder.execute("ROLLBACK")
    assert list(values(other)) == ["nodes/n"], "it is due, and its owner is about to confirm it"
    store.keep_alive(lease)


def test_a_queue_that_changes_all_the_time_does_not_grow(
    offer: Callable[..., LocalStore], file: Path
) -> None:
    store = offer()
    lease = store.grant(3600.0)
    for number in range(100):
        put(store, f"jobs/{number}", "x" * 5000, lease)
    for number in range(4000):
        put(store, "plan", str(number) * 500, lease)
    assert len(values(store)) == 101
    put(store, "jobs/last", "")  # what has waited for the disk before this is done
    store.close()
    assert file.stat().st_size < 8_000_000


# Watches


def test_a_watch_waits_for_the_bell_and_hears_it(offer: Callable[..., LocalStore]) -> None:
    here, there = offer(), offer()
    watch = here.watch(("",), here.read(()).revision)
    assert watch.next(0.05) == ()
    looks, changes = [], here.changes

    def counted(scopes: tuple[str, ...], after: int) -> object:
        looks.append(after)
        return changes(scopes, after)

    here.changes = counted  # type: ignore[method-assign, assignment]
    assert watch.next(0.5) == ()
    assert len(looks) <= 4
    heard: list[float] = []
    for number in range(5):
        at = threading.Timer(0.1, lambda number=number: put(there, f"k{number}"))  # type: ignore[misc]
        began = time.monotonic()
        at.start()
        assert [change.key for change in watch.next(PATIENCE_S)] == [f"k{number}"]
        heard.append(time.monotonic() - began)
        at.join()
    assert sorted(heard)[2] < LOOK_S / 2, "at the bell, not at the next look"


def test_a_watch_tells_the_newest_of_a_key_and_whether_it_has_missed_a_deletion(
    offer: Callable[..., LocalStore],
) -> None:
    store = offer()
    lease = store.grant(3600.0)
    start = put(store, "a", "1", lease)
    put(store, "a", "2", lease)
    put(store, "b", "", lease)
    revision = store.transact((), (Delete("b"),)).revision
    changes = store.watch(("",), start).next(0.0)
    assert [(one.key, one.entry and one.entry.value) for one in changes] == [("a", "2"), ("b", None)]
    for _ in range(HISTORY):
        put(store, "c", "", lease)
    assert [one.key for one in store.watch(("",), revision).next(0.0)] == ["c"]
    with pytest.raises(Compacted):
        store.watch(("",), revision - 1).next(0.0)


def test_the_log_begins_anew_and_is_brought_into_the_file_by_one_at_a_time(
    offer: Callable[..., LocalStore], file: Path
) -> None:
    store, log = offer(), file.with_name("pool.db-wal")
    lease = store.grant(3600.0)

    def write(times: int) -> int:
        for number in range(times):
            put(store, "nodes/n", f"{number:05}" * 20_000, lease)  # SQLite writes no page that is as it was
            eventually(lambda: all(one.name != "store-disk" for one in threading.enumerate()))
        return log.stat().st_size

    assert write(10 * LONG // 100_000) < 4 * LONG
    with open(log, "rb") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        assert write(4 * LONG // 100_000) > 4 * LONG, "somebody else brings it there"


def test_a_watch_that_is_closed_leaves_no_descriptor(offer: Callable[..., LocalStore]) -> None:
    store = offer()
    put(store, "k")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        watch = store.watch(("",), 0)
        watch.next(0.0)
        watch.close()
    assert len(os.listdir("/proc/self/fd")) <= before


# Who may open it, and what


def test_files_are_for_this_user_alone(offer: Callable[..., LocalStore], file: Path) -> None:
    put(offer(), "k", "v")
    files = list(file.parent.glob("pool.db*"))
    assert len(files) == 3
    assert {stat.S_IMODE(one.stat().st_mode) for one in files} == {0o600}


def test_where_no_daemon_was_a_client_gives_up_in_time_and_says_what_to_start(file: Path) -> None:
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="start elastic-agent without a script"):
        LocalStore.connect(file, 0.3)
    assert time.monotonic() - began < 2.0
    assert not file.exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=f"cannot make the store of pool pool in {tmp_path}/none"):
        LocalStore.connect(store_file(tmp_path / "none", "pool"), 0.1, make=True)


def test_a_file_of_another_version_or_that_is_damaged_or_gone_is_refused_with_what_to_do(
    file: Path, offer: Callable[..., LocalStore]
) -> None:
    store = offer()
    put(store, "k")
    with closing(sqlite3.connect(file)) as raw:
        raw.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreMismatch, match=r"another version of elastic-agent \(schema 99, not 2\)"):
        LocalStore.connect(file, 1.0)
    for one in file.parent.glob("pool.db*"):
        one.rename(file.with_name(f"was-{one.name}"))
    with pytest.raises(StoreUnavailable, match="no daemon has made the store"):
        store.read(("",))
    file.write_bytes(b"not a database" * 1000)
    file.chmod(0o600)
    with pytest.raises(StoreMismatch, match="replaced while it was in use"):
        store.read(("",))
    for make in (False, True):
        with pytest.raises(StoreMismatch, match="move it away, and submit its jobs again"):
            LocalStore.connect(file, 1.0, make=make)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


AS_NOBODY = """
import os, sys
from pathlib import Path
from elastic_agent.rendezvous.local.store import LocalStore, store_file
os.setgid(65534)
os.setuid(65534)
store = LocalStore.connect(store_file(Path(sys.argv[1]), "pool"), 0.5, make=sys.argv[2] == "make")
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("mode", "refused"), [(0o700, "StoreRefused: cannot reach"), (0o755, "user 0 has made")]
)
def test_another_user_is_told_whose_the_pool_is(open_folder: Path, mode: int, refused: str) -> None:
    with closing(LocalStore.connect(store_file(open_folder, "pool"), PATIENCE_S, make=True)) as store:
        put(store, "k")
        open_folder.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(open_folder), "connect"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert refused in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_may_use_another_users_pool_but_not_where_anybody_can_wait_for_it(open_folder: Path) -> None:
    folder = open_folder / "pool"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    process = started(AS_NOBODY, folder, "make", stdin=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        file = store_file(folder, "pool")
        with closing(LocalStore.connect(file, PATIENCE_S)) as store:
            put(store, "k", "v")
            assert values(store) == {"k": "v"}
        assert {one.stat().st_uid for one in folder.iterdir()} == {NOBODY}
        open_folder.chmod(0o1777)
        with pytest.raises(StoreRefused, match=f"user {NOBODY} has made the store in {folder}"):
            LocalStore.connect(file, PATIENCE_S)
    finally:
        end(process)


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
        eventually(lambda: bool(list(tmp_path.glob("*/pool.db"))))
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
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=PATIENCE_S)
