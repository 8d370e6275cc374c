"""Memory servers over loopback: what other nodes read of them, who they let in, and what they cost who does not."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.checkpoints import copies as copies_module
from elastic_agent.agent.checkpoints import replicator, server
from elastic_agent.agent.checkpoints.copies import CopyReader, copies_of
from elastic_agent.agent.checkpoints.receiver import Receiver
from elastic_agent.worker.storage.memory.copy_header import FoundCopy
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.memory.slots import PIECE_BYTES, sums_of_bytes
from elastic_agent.worker.storage.replication import link
from elastic_agent.worker.storage.replication.client import CopyGone, MemoryClient, order
from elastic_agent.worker.storage.replication.key_file import read_key, write_key
from elastic_agent.worker.storage.replication.link import HELLO_BYTES, NotAuthenticated
from elastic_agent.worker.storage.replication.messages import (
    PUSH_ANSWERS,
    STRETCHES,
    AbandonNewer,
    Piece,
    Push,
    Read,
    Replicate,
    Send,
    Settled,
    Stretch,
)
from tests.memory_servers import DIRECTORY, KEY, Node, Proxy, Recorder, header_of, wait_for

FOLDER = SlotFolder.of(DIRECTORY, 0)
Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`rate`: at most so many bytes per second leave the node."""
    with contextlib.ExitStack() as stack:

        def node(name: str, rate: int = 0, **more: object) -> Node:
            if rate:
                monkeypatch.setattr(replicator, "CopyReader", slow_reader(rate))
            made = Node(tmp_path, name, **more)  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield node


def slow_reader(rate: int) -> type[CopyReader]:
    class Slow(CopyReader):
        done = 0

        def read(self, offset: int, into: memoryview) -> None:
            time.sleep(len(into) / rate)
            super().read(offset, into)
            Slow.done += len(into)

    return Slow


def read_bytes() -> int:
    """Of copies that slow readers have sent on, or are about to."""
    done: int = replicator.CopyReader.done  # type: ignore[attr-defined]
    return done


def filled(node: Node, step: int = 3, size: int = 3 << 20) -> bytes:
    block = random.Random(step).randbytes(65521)  # a prime: no two stretches of a copy are alike
    data = (block * (size // len(block) + 1))[:size]
    node.fill(header_of(step, size), data)
    return data


def acked(node: Node, step: int, *by: str, **more: int) -> None:
    """Wait until exactly these nodes have acknowledged the copy."""
    wait_for(lambda: set(node.acks(step, **more).nodes) == set(by), f"the acks of step {step}")


def copies(node: Node, directory: str = DIRECTORY) -> list[FoundCopy]:
    return list(copies_of(node.memory, SlotFolder.of(directory).directory))


def ask(client: MemoryClient) -> None:
    """For a few bytes of what `filled` has put there."""
    client.read(FOLDER, "a", (1, 3), 0, memoryview(bytearray(4)))


def ended(connection: socket.socket) -> bool:
    """Whether the other end closes it, without another word."""
    connection.settimeout(5.0)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


# ---------------------------------------------------------------- read


def test_all_copies_of_a_directory_are_found(make: Make) -> None:
    node = make("a")
    node.fill(header_of(3, 10, rank=4), b"x" * 10)
    node.fill(header_of(4, 10, rank=4), b"x" * 10)
    node.fill(header_of(4, 12, rank=5), b"y" * 12, local_rank=1)
    found = copies(node)
    assert [(one.folder, one.slot, one.header.step) for one in found] == [
        (SlotFolder.of(DIRECTORY, 0), "a", 3),
        (SlotFolder.of(DIRECTORY, 0), "b", 4),
        (SlotFolder.of(DIRECTORY, 1), "a", 4),
    ]
    assert found[2].header == header_of(4, 12, rank=5)
    assert copies(node, "/elsewhere") == []
    with node.client() as client:
        assert list(client.copies(DIRECTORY)) == found
        assert client.copies("/elsewhere") == ()


@pytest.mark.parametrize(
    ("offset", "count"), [(0, 3 << 20), (5, 0), (1, 1), ((1 << 20) - 1, 3), ((3 << 20) - 7, 7)]
)
def test_bytes_are_read(make: Make, offset: int, count: int) -> None:
    node = make("a")
    data = filled(node)
    with node.client() as client:
        into = bytearray(count)
        for _ in range(2):  # over one connection
            client.read(FOLDER, "a", (1, 3), offset, memoryview(into))
            assert into == data[offset : offset + count]


def test_a_copy_that_is_gone_is_an_error_of_its_own_and_the_connection_goes_on(make: Make) -> None:
    node = make("a")
    data = filled(node)
    into = memoryview(bytearray(4))
    with node.client() as client:
        for where in (
            (FOLDER, "a", (1, 4), 0),
            (FOLDER, "b", (1, 3), 0),
            (SlotFolder.of("/no"), "a", (1, 3), 0),
        ):
            with pytest.raises(CopyGone):
                client.read(*where, into)
        with pytest.raises(CopyGone, match="has 3145728 bytes, and 3145730 are asked for"):
            client.read(FOLDER, "a", (1, 3), (3 << 20) - 2, into)
        client.read(FOLDER, "a", (1, 3), 0, into)
        assert into == data[:4]
    assert not os.path.exists(os.path.join(node.memory, SlotFolder.of("/no").name))


def test_a_slot_that_is_being_read_can_be_overwritten_and_the_read_says_so(make: Make) -> None:
    """A server holds a slot only for the time of a copy into its own buffer."""
    node = make("a")
    filled(node, 3, 64 << 20)
    reading = link.connect(node.address, KEY, 5.0)
    with node.client() as client:
        reading.send(Read(FOLDER, "a", 1, 3, 0, 64 << 20, False))
        time.sleep(0.1)  # the server has filled all buffers on the way, and waits
        node.fill(header_of(4, 10), b"x" * 10)
        node.fill(header_of(5, 10), b"y" * 10)  # into the slot that is being read
        with contextlib.closing(reading):
            while isinstance(reading.receive(STRETCHES), Stretch):
                reading.receive_payload(memoryview(bytearray(reading.payload_bytes)))
        into = memoryview(bytearray(10))
        client.read(FOLDER, "a", (1, 5), 0, into)
        assert into == b"y" * 10


def test_many_ranges_are_read_at_once(make: Make) -> None:
    node = make("a")
    data = filled(node)
    offsets = random.Random(7).sample(range(len(data) - 5000), 100)
    parts = [bytearray(offset % 5000) for offset in offsets]
    with node.client() as client:
        ranges = [(offset, memoryview(part)) for offset, part in zip(offsets, parts, strict=True)]
        client.read_many(FOLDER, "a", (1, 3), ranges)
        for offset, part in zip(offsets, parts, strict=True):
            assert part == data[offset : offset + len(part)]
        with pytest.raises(CopyGone):
            client.read_many(FOLDER, "a", (1, 4), ranges)
        client.read_many(
            FOLDER, "a", (1, 3), ranges
        )  # what came after the refusal is not taken for an answer
        client.read_many(FOLDER, "a", (1, 3), [])


def test_ranges_are_verified_where_that_is_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy of three pieces only those that have the ranges, each once for all connections."""
    seen: list[int] = []

    def verify(self: CopyReader, piece: int) -> None:
        seen.append(piece)
        original(self, piece)

    original = CopyReader._verify
    monkeypatch.setattr(CopyReader, "_verify", verify)
    node = make("a")
    data = bytearray(random.Random(3).randbytes(1 << 20) * 33)
    header = header_of(3, len(data))
    damaged_at = 2 * PIECE_BYTES + 7
    sums = sums_of_bytes(memoryview(data))
    data[damaged_at] ^= 1
    node.fill(replace(header, sums=sums), bytes(data))
    into = bytearray(5000)
    for _ in range(2):
        with node.client() as client:
            client.read(FOLDER, "a", (1, 3), PIECE_BYTES - 100, memoryview(into), verify=True)
            assert into == data[PIECE_BYTES - 100 :][:5000]
    assert seen == [0, 1]
    with node.client() as client:
        client.read(FOLDER, "a", (1, 3), damaged_at, memoryview(into))
        with pytest.raises(CopyGone, match=r"33554432 to 34603008 in slot a .* do not match their checksum"):
            client.read(FOLDER, "a", (1, 3), len(data) - 5000, memoryview(into), verify=True)
        assert copies(node) == []
        node.fill(replace(header, sums=sums), bytes(data))
        with pytest.raises(CopyGone, match="do not match"):
            client.read(FOLDER, "a", (1, 3), damaged_at, memoryview(into), verify=True)


# ---------------------------------------------------------------- the door


def test_without_the_key_nothing_is_said(make: Make) -> None:
    node = make("a")
    filled(node)
    with node.client(bytes(32)) as client, pytest.raises(ConnectionError):
        ask(client)
    with socket.create_connection(("127.0.0.1", node.port)) as stranger:
        hello = link.receive_exactly(stranger, HELLO_BYTES, time.monotonic() + 5.0)
        stranger.sendall(bytes(64))
        assert ended(stranger)
    assert KEY not in hello


def test_a_server_without_the_key_is_not_believed(make: Make) -> None:
    """It answers, and cannot prove anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        client = make("a").client()
        client._address = address

        def impostor() -> None:
            connection, _ = listener.accept()
            connection.sendall(link.hello())
            connection.recv(64)
            connection.sendall(bytes(32))

        threading.Thread(target=lambda: [impostor(), impostor()], daemon=True).start()
        with pytest.raises(NotAuthenticated, match="does not have this job's key"):
            ask(client)


def test_a_recorded_conversation_opens_nothing(make: Make) -> None:
    node = make("a")
    filled(node)
    proxy = Recorder(node.port)
    with MemoryClient(proxy.address, KEY, 5.0) as client:
        ask(client)
    said = proxy.said
    assert len(said) > 64
    with socket.create_connection(("127.0.0.1", node.port)) as replayed:
        link.receive_exactly(replayed, HELLO_BYTES, time.monotonic() + 5.0)
        replayed.sendall(said[:64])
        assert ended(replayed)
    # Nor does what was said on one authenticated connection on another one.
    fresh = link.connect(node.address, KEY, 5.0)
    with contextlib.closing(fresh):
        fresh.connection.sendall(said[64:])
        assert ended(fresh.connection)


def test_a_silent_client_is_cut_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.1)
    monkeypatch.setattr(server, "SILENCE_S", 0.1)
    node = make("a")
    filled(node)
    with socket.create_connection(("127.0.0.1", node.port), timeout=5.0) as silent:
        link.receive_exactly(silent, HELLO_BYTES, time.monotonic() + 5.0)
        assert ended(silent)
    # In the middle of a request, too; one that waits between two requests may wait.
    begun = link.connect(node.address, KEY, 5.0)
    with contextlib.closing(begun), node.client() as idle:
        ask(idle)
        begun.connection.sendall(b"x")
        assert ended(begun.connection)
        kept = idle._link
        assert kept is not None
        ask(idle)
        assert idle._link is kept


def test_who_reads_or_sends_too_slowly_is_cut_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte now and then is no sign of life. No thread is held for it for longer than its bytes may take."""
    monkeypatch.setattr(server, "SILENCE_S", 0.2)
    monkeypatch.setattr(link, "LEAST_RATE", 1 << 30)
    node = make("a")
    filled(node, 3, 64 << 20)
    reader = link.connect(node.address, KEY, 5.0)
    with contextlib.closing(reader):
        reader.send(Read(FOLDER, "a", 1, 3, 0, 64 << 20, False))
        taken = 0
        with contextlib.suppress(ConnectionError):
            while more := reader.connection.recv(1 << 14):
                taken += len(more)
                time.sleep(0.01)
        assert taken < 64 << 20
    sender = link.connect(node.address, KEY, 5.0)
    began = time.monotonic()
    with contextlib.closing(sender):
        sender.send(Push("b", FOLDER, header_of(3, 1 << 20, digest="b")))
        assert isinstance(sender.receive(PUSH_ANSWERS), Send)
        with contextlib.suppress(ConnectionError):
            sender.send(Piece(0), memoryview(bytes(1 << 20)), pause=lambda _: time.sleep(0.6))
        assert ended(sender.connection)
    assert time.monotonic() - began < 5.0
    assert node.replica("b", 3) is None
    with node.client() as client:
        ask(client)


def test_garbage_costs_nothing(make: Make) -> None:
    node = make("a")
    data = filled(node)
    strangers = []
    into = memoryview(bytearray(100))
    with node.client() as client:
        client.read(FOLDER, "a", (1, 3), 0, into)
        for number in range(1000):
            stranger = socket.create_connection(("127.0.0.1", node.port), timeout=5.0)
            if number % 2:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            strangers.append(stranger)
            if len(strangers) > 200:
                strangers.pop(0).close()
        client.read(FOLDER, "a", (1, 3), 0, into)
        assert into == data[:100]
    with node.client() as another:
        another.read(FOLDER, "a", (1, 3), 0, into)
    assert len(node.server._entrance._door) <= server.AT_THE_DOOR
    assert len(node.server._pool._threads) <= 4
    for stranger in strangers:
        stranger.close()


def test_who_has_the_key_cannot_send_garbage_either(make: Make) -> None:
    """A damaged or wrong message ends its connection alone."""
    node = make("a")
    filled(node)
    for garbage in (bytes(200), b"\xff" * 200, b"{}\n" * 100):
        begun = link.connect(node.address, KEY, 5.0)
        with contextlib.closing(begun):
            begun.connection.sendall(garbage)
            assert ended(begun.connection)
    wrong = link.connect(node.address, KEY, 5.0)
    with contextlib.closing(wrong):
        wrong.send(Stretch())  # no request
        assert ended(wrong.connection)
    for push in (
        Push("b", FOLDER, replace(header_of(3, 10), shards=None)),
        Push("b", SlotFolder.of(DIRECTORY), header_of(3, 10)),
    ):
        wrong = link.connect(node.address, KEY, 5.0)
        with contextlib.closing(wrong):
            wrong.send(push)
            assert ended(wrong.connection)
    with node.client() as client:
        ask(client)


def test_a_connection_that_was_closed_is_made_anew(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_INSIDE", 2)
    node = make("a")
    filled(node)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(node.client()) for _ in range(4)]
        for _ in range(2):
            for client in clients:
                ask(client)


def test_a_key_that_is_not_there_yet_lets_no_one_in(make: Make) -> None:
    node = make("a")
    os.unlink(os.path.join(node.memory, "server-key"))
    with node.client() as client, pytest.raises(ConnectionError):
        ask(client)
    with pytest.raises(FileNotFoundError):
        read_key(node.memory)
    threading.Timer(0.05, write_key, (node.memory, KEY)).start()
    assert read_key(node.memory, 5.0) == KEY
    assert os.stat(os.path.join(node.memory, "server-key")).st_mode & 0o777 == 0o600


def test_a_changed_byte_is_noticed_and_asked_for_again(make: Make) -> None:
    """Of the bytes that come back as of those that go."""
    node = make("a")
    data = filled(node)
    proxy = Recorder(node.port, corrupt_at=1 << 20)
    with MemoryClient(proxy.address, KEY, 5.0) as client:
        into = memoryview(bytearray(len(data)))
        client.read(FOLDER, "a", (1, 3), 0, into)
        assert into == data
    assert proxy.connections == 2


# ---------------------------------------------------------------- push


def test_a_sealed_copy_comes_to_all_partners_and_is_acknowledged(make: Make) -> None:
    a, b, c = make("a"), make("b"), make("c")
    a.replicate_to(b.partner, c.partner)
    for step, size in ((3, 40 << 20), (4, 20 << 20), (5, 1)):
        data = filled(a, step, size)
        acked(a, step, "b", "c")
        for partner in (b, c):
            assert partner.replica("a", step) == data
    assert a.acks(4).nodes  # the older one of the two slots
    [older, newer] = copies(b)
    assert {older.header.step, newer.header.step} == {4, 5}
    assert older.folder == FOLDER.replica_of("a")
    slots = a.slots()
    assert all(found.sums for found in slots.headers().values())
    slots.close()


def test_what_is_there_before_the_order_is_brought_too(make: Make) -> None:
    a, b = make("a"), make("b")
    filled(a)
    a.replicate_to(b.partner)
    acked(a, 3, "b")


def test_an_ack_is_of_one_order_alone(make: Make) -> None:
    """The partner may have lost since then what it had."""
    a, b = make("a"), make("b")
    filled(a)
    a.replicate_to(b.partner)
    acked(a, 3, "b")
    assert a.acks(3, ordered_by=2).nodes == ()
    shutil.rmtree(os.path.join(b.memory, FOLDER.replica_of("a").name))
    a.replicate_to(b.partner, generation=2, resumed=(1, 3))
    acked(a, 3, "b", ordered_by=2)
    assert b.replica("a", 3)


def test_a_push_begins_anew_where_the_connection_broke(make: Make) -> None:
    a, b = make("a"), make("b")
    size = 3 * PIECE_BYTES + 100
    data = filled(a, 3, size)
    proxy = Proxy(b.port, cut_after=(2 * PIECE_BYTES + 5000, 0, 10))
    a.replicate_to(replace(b.partner, address=proxy.address))
    acked(a, 3, "b")
    assert b.replica("a", 3) == data
    assert len(proxy.passed) == 4
    proxy.close()


def test_a_byte_that_changed_on_the_way_is_sent_again(make: Make) -> None:
    a, b = make("a"), make("b")
    data = filled(a, 3, 3 * PIECE_BYTES)
    proxy = Proxy(b.port, corrupt_at=PIECE_BYTES + 5000)
    a.replicate_to(replace(b.partner, address=proxy.address))
    acked(a, 3, "b")
    assert b.replica("a", 3) == data
    assert len(proxy.passed) == 2
    proxy.close()


def test_a_copy_that_does_not_match_its_own_checksums_is_never_acknowledged(
    make: Make, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "UNREACHABLE_AFTER_S", 0.3)
    a, b = make("a"), make("b")
    a.fill(replace(header_of(3, 10), sums=(1,)), b"x" * 10)
    a.replicate_to(b.partner)
    wait_for(lambda: a.acks(3).unreachable == ("b",), "the refusal")
    assert a.acks(3).nodes == ()
    assert "version (1, 3) does not match its checksums" in capfd.readouterr().err
    assert b.replica("a", 3) is None


def test_a_newer_copy_takes_the_place_of_one_on_its_way(make: Make) -> None:
    """And a slot that is overwritten meanwhile, as by a save that must not wait."""
    a, b = make("a", rate=16 * PIECE_BYTES), make("b")
    filled(a, 3, 8 * PIECE_BYTES)
    a.replicate_to(b.partner)
    wait_for(read_bytes, "the first piece")
    filled(a, 4, 100)
    newest = filled(a, 5, 200)  # in the slot that is being sent
    acked(a, 5, "b")
    assert b.replica("a", 5) == newest
    assert b.replica("a", 3) is None
    assert read_bytes() < 3 * PIECE_BYTES


def test_an_acknowledged_replica_stays_whole_while_the_next_one_comes(make: Make) -> None:
    a, b = make("a", rate=16 * PIECE_BYTES), make("b")
    first = filled(a, 3, 2 * PIECE_BYTES)
    a.replicate_to(b.partner)
    acked(a, 3, "b")
    for step in (4, 5):
        filled(a, step, 2 * PIECE_BYTES)
        sent = read_bytes()
        wait_for(lambda sent=sent: read_bytes() > sent, "a piece of the next one")
        assert b.replica("a", step - 1) is not None
        acked(a, step, "b")
    assert b.replica("a", 3) is None
    assert first


@pytest.mark.parametrize("which", ["source", "partner"])
def test_a_server_that_was_killed_goes_on(make: Make, which: str) -> None:
    """The source's order is kept; a partner that has lost what came in part gets it from the beginning."""
    a, b = make("a", rate=10 * PIECE_BYTES), make("b")
    data = filled(a, 3, 4 * PIECE_BYTES)
    a.replicate_to(b.partner)
    wait_for(read_bytes, "the first piece")
    killed = a if which == "source" else b
    killed.close()
    killed.serve()
    acked(a, 3, "b")
    assert b.replica("a", 3) == data


def test_a_partner_without_room_says_how_much_is_missing_and_is_unreachable(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = make("a"), make("b", limit=3 << 20)
    filled(a, 3, 2 << 20)
    a.replicate_to(b.partner)
    wait_for(lambda: a.acks(3).unreachable == ("b",), "the partner to be called unreachable")
    wait_for(lambda: a.told and a.told[-1].unreachable == ("b",), "the report")
    filled(a, 4, 1 << 10)
    acked(a, 4, "b")
    assert a.acks(4).unreachable == ()
    said = capfd.readouterr().err
    assert said.count("does not take replicas") == 1
    assert "two copies of a replica take 4325376 bytes" in said
    assert "3145728 are allowed: raise --memory-checkpoints there" in said
    assert "node b takes replicas again" in said


def test_a_partner_that_reads_both_slots_of_a_replica_is_asked_again(make: Make) -> None:
    """It is not out of reach: workers wait for it."""
    a, b = make("a"), make("b")
    for step in (3, 4):
        filled(a, step, 100)
        a.replicate_to(b.partner)
        acked(a, step, "b")
    replica = b.slots(origin="a")
    with contextlib.closing(replica), replica.hold("a"), replica.hold("b"):
        filled(a, 5, 100)
        order = a.server.replicator._orders[FOLDER.directory]
        wait_for(lambda: "b" in order._failing_since, "the refusal")
        assert a.acks(5).unreachable == ()
    acked(a, 5, "b")


def test_a_full_memory_is_a_refusal(make: Make, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    a, b = make("a"), make("b")
    filled(a, 3, 100)

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        a.replicate_to(b.partner)
        wait_for(lambda: a.acks(3).unreachable == ("b",), "the refusal")
    assert "no memory for a replica of 100 bytes: [Errno 28]" in capfd.readouterr().err
    acked(a, 3, "b")  # when there is room again


def test_a_partner_that_is_away_is_unreachable_after_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "UNREACHABLE_AFTER_S", 0.3)
    a, b, c = make("a"), make("b"), make("c")
    b.close()
    began = time.monotonic()
    filled(a, 3, 100)
    a.replicate_to(b.partner, c.partner)
    wait_for(lambda: a.acks(3).unreachable == ("b",), "the partner to be called unreachable")
    assert time.monotonic() - began >= 0.3
    assert a.acks(3).nodes == ("c",)
    filled(a, 4, 100)
    wait_for(lambda: a.acks(4).nodes == ("c",), "the other's ack")
    assert a.acks(4).unreachable == ("b",)  # at once
    b.serve()
    wait_for(lambda: a.acks(4).nodes == ("b", "c"), "its return")
    assert a.acks(4).unreachable == ()


def test_a_copy_that_cannot_be_opened_is_tried_again_after_a_pause(make: Make) -> None:
    """As where no descriptor is left: it is still listed."""
    a, b = make("a"), make("b")
    filled(a, 3, 100)
    tries = 0

    def fail(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise CopyGone("slot a has no copy now: [Errno 24] Too many open files")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replicator, "UNREACHABLE_AFTER_S", 0.1)
        patched.setattr(replicator, "CopyReader", fail)
        a.replicate_to(b.partner)
        wait_for(lambda: a.acks(3).unreachable == ("b",), "the partner to be called unreachable")
        assert tries < 20
    acked(a, 3, "b")


def test_a_twin_of_the_partner_s_own_is_as_good(make: Make) -> None:
    a, b, c = make("a"), make("b"), make("c")
    data = b"x" * 1000
    a.fill(header_of(3, 1000, rank=0), data)
    b.fill(header_of(3, 1000, rank=2), data)
    c.fill(header_of(3, 1000, rank=4, digest="other"), data)
    a.replicate_to(b.partner, c.partner)
    wait_for(lambda: a.acks(3).nodes == ("b", "c"), "the acks")
    assert b.replica("a", 3) is None
    assert c.replica("a", 3) == data


def test_who_has_a_copy_is_known_when_the_order_comes_again(make: Make) -> None:
    """As to a server that is started anew: a newer copy may take the place of the one that it would ask about."""
    a, b, c = make("a"), make("b"), make("c")
    filled(a, 3, 100)
    a.replicate_to(b.partner)
    acked(a, 3, "b")
    b.close()
    a.replicate_to(b.partner, c.partner)
    acked(a, 3, "b", "c")


def test_only_what_the_order_names_is_brought(make: Make) -> None:
    a, b = make("a"), make("b")
    a.fill(header_of(9, 100), b"x" * 100)  # of an abandoned line
    a.fill(header_of(7, 100), b"y" * 100, local_rank=1)
    a.fill(header_of(7, 100), b"z" * 100, local_rank=2)
    a.replicate_to(replace(b.partner, local_ranks=(0,), loaded_ranks=(1,)), generation=2, resumed=(1, 7))
    acked(a, 7, "b", ordered_by=2, local_rank=1)
    a.fill(header_of(8, 100, generation=2), b"v" * 100, local_rank=1)
    a.fill(header_of(8, 100, generation=2), b"w" * 100)
    acked(a, 8, "b", generation=2, ordered_by=2)
    assert b.replica("a", 9) is None
    assert b.replica("a", 7, local_rank=2) is None
    assert b.replica("a", 8, local_rank=1) is None


def test_a_replica_of_the_version_to_keep_is_not_overwritten(make: Make) -> None:
    """The newest may be of a save that did not wait: it takes the place of another one that is not settled."""
    a, b = make("a"), make("b")
    a.replicate_to(b.partner)
    for step in (3, 4, 5):
        slots = a.slots()
        opened = slots.begin(100, protected=(1, 3))
        opened.trim()
        slots.seal(opened, header_of(step, 100, keep=(1, 3)))
        slots.close()
        acked(a, step, "b")
        assert b.replica("a", 3)
    assert b.replica("a", 4) is None


def test_a_stale_line_is_not_taken(make: Make) -> None:
    """A node that stood still goes on to bring what the others have abandoned."""
    a, b = make("a"), make("b")
    b.replicate_to(generation=2, resumed=(1, 7))
    wait_for(lambda: b.server.replicator._orders, "the order")
    a.fill(header_of(9, 100), b"x" * 100)
    a.replicate_to(b.partner, generation=1)
    wait_for(lambda: a.acks(9).unreachable == ("b",), "the refusal")
    assert b.replica("a", 9) is None


def test_replicas_that_no_one_brings_any_more_are_dropped(make: Make) -> None:
    a, b, c = make("a"), make("b"), make("c")
    for node in (a, c):
        filled(node, 3, 100)
        node.replicate_to(b.partner)
        acked(node, 3, "b")
    a.replicate_to()
    orders = a.server.replicator._orders
    wait_for(lambda: (one := orders.get(FOLDER.directory)) and not one._order.partners, "the order")
    filled(a, 4, 100)
    filled(c, 4, 100)
    acked(c, 4, "b")
    b.order(Settled(DIRECTORY, 1, 3))  # a has brought this one
    b.order(Settled(DIRECTORY, 1, 4))
    gone = os.path.join(b.memory, FOLDER.replica_of("a").name)
    wait_for(lambda: not os.path.exists(gone), "a's to go")
    assert b.replica("c", 4)
    assert b.replica("c", 3)


def test_abandoned_replicas_are_dropped(make: Make) -> None:
    a, b = make("a"), make("b")
    a.replicate_to(b.partner)
    for step in (3, 4):
        filled(a, step, 100)
        acked(a, step, "b")
    b.order(AbandonNewer(DIRECTORY, 1, 3))
    wait_for(lambda: b.replica("a", 4) is None, "the newer one to go")
    assert b.replica("a", 3)


def test_what_a_new_generation_has_abandoned_is_dropped_with_its_order(make: Make) -> None:
    """A sealed replica as one that has come in part."""
    a, b = make("a", rate=8 * PIECE_BYTES), make("b")
    a.replicate_to(b.partner)
    for step in (3, 4):
        a.fill(header_of(step, 100), b"x" * 100, local_rank=1)
        acked(a, step, "b", local_rank=1)
    filled(a, 3, 100)
    acked(a, 3, "b")
    filled(a, 4, 4 * PIECE_BYTES)
    sent = read_bytes()
    wait_for(lambda: read_bytes() > sent, "the first piece")
    b.replicate_to(generation=2, resumed=(1, 3))
    wait_for(lambda: a.acks(4).unreachable == ("b",), "the refusal")
    assert b.replica("a", 4) is None
    assert b.replica("a", 4, local_rank=1) is None
    assert b.replica("a", 3)
    assert b.replica("a", 3, local_rank=1)


def test_without_the_kernel_s_word_copies_are_looked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.02)
    monkeypatch.setattr(copies_module, "IN_CLOEXEC", -1)  # refused, like one too many
    a, b = make("a"), make("b")
    assert a.server._seals.blind
    a.replicate_to(b.partner)
    filled(a, 3, 100)
    acked(a, 3, "b")


def test_orders_are_given_in_no_time_and_none_is_fatal(make: Make, tmp_path: Path) -> None:
    node = make("a")
    assert not order(str(tmp_path / "none"), Settled(DIRECTORY, 1, 1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as garbage:
        garbage.connect(node.orders)
        garbage.sendall(b"garbage\n")
    began = time.monotonic()
    for _ in range(20):
        node.order(Settled(DIRECTORY, 1, 1))
    assert time.monotonic() - began < 1.0
    node.replicate_to()
    wait_for(lambda: node.server.replicator._orders, "the order behind the garbage")


def test_copies_are_brought_to_partners_also_where_theirs_cannot_be_prepared_for(
    make: Make, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replicate(_: Receiver, order: Replicate) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    a, b = make("a"), make("b")
    monkeypatch.setattr(Receiver, "replicate", replicate)
    a.replicate_to(b.partner)
    filled(a, 3, 100)
    acked(a, 3, "b")
    assert "Replicate: [Errno 24] too many open files" in capfd.readouterr().err


def test_an_idle_server_does_nothing(make: Make) -> None:
    a, b = make("a"), make("b")
    a.replicate_to(b.partner)
    filled(a, 3, 100)
    acked(a, 3, "b")
    turns = []
    for node in (a, b):
        io, turn = node.server._io, node.server._io._turn
        io._turn = lambda turn=turn: turns.append(turn()) or None  # type: ignore[method-assign]
    time.sleep(0.5)
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.05
    assert len(turns) <= 4
