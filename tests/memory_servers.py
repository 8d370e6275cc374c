"""Memory servers in a test's own process, each with a folder of its own, and copies that a test makes by hand."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_agent.agent.checkpoints.server import Server
from elastic_agent.worker.storage.memory.copy_header import Header, RankShards
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.storage.replication.acks import Acks, read_acks
from elastic_agent.worker.storage.replication.client import MemoryClient, order
from elastic_agent.worker.storage.replication.key_file import write_key
from elastic_agent.worker.storage.replication.messages import Order, Partner, Replicate
from elastic_agent.worker.wire.messages import ReplicationReport

KEY = bytes(range(32))
DIRECTORY = "/checkpoints"
PATIENCE_S = 20.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)
    return found


def header_of(
    step: int,
    size: int,
    *,
    generation: int = 1,
    rank: int = 0,
    digest: str = "d",
    keep: tuple[int, int] | None = None,
) -> Header:
    digest = hashlib.sha256(digest.encode()).hexdigest()[:16]
    shards = RankShards(rank, digest, rank == 0, keep=keep)
    return Header(step, generation, 0, 8, size, run="run-a", shards=shards, table=(0, min(8, size)))


class Node:
    """One node's memory, with a server in front of it; `serve` starts another after `close`."""

    def __init__(self, folder: Path, name: str, *, limit: int = 1 << 30, key: bytes = KEY) -> None:
        self.name = name
        self.memory = str(folder / name)
        self.limit = limit
        self.orders = str(folder / f"{name}.orders")
        self.told: list[ReplicationReport] = []
        os.mkdir(self.memory, 0o700)
        write_key(self.memory, key)
        self.port = 0
        self.serve()

    def serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        orders = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(self.orders).unlink(missing_ok=True)
        orders.bind(self.orders)
        orders.listen()
        self.server = Server(self.memory, self.limit, self.name, self.told.append)
        self.server.serve(listener, orders)

    def close(self) -> None:
        self.server.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def partner(self) -> Partner:
        """Of all workers' copies."""
        return Partner(self.name, self.address, tuple(range(8)), tuple(range(8)))

    def client(self, key: bytes = KEY, within_s: float = 5.0) -> MemoryClient:
        return MemoryClient(self.address, key, within_s)

    def order(self, message: Order) -> None:
        assert order(self.orders, message, PATIENCE_S)

    def replicate_to(
        self, *partners: Partner, generation: int = 1, resumed: tuple[int, int] = (0, 0)
    ) -> None:
        self.order(Replicate(DIRECTORY, generation, resumed, partners))

    def slots(self, local_rank: int = 0, origin: str = "") -> Slots:
        return Slots(self.memory, SlotFolder.of(DIRECTORY, local_rank, origin))

    def fill(self, header: Header, data: bytes, *, local_rank: int = 0) -> str:
        """What a worker does; the slot."""
        slots = self.slots(local_rank)
        opened = slots.begin(len(data))
        opened.trim()
        os.pwrite(opened.fd, data, 0)
        slots.seal(opened, header)
        slots.close()
        return opened.name

    def acks(self, step: int, *, generation: int = 1, ordered_by: int = 1, local_rank: int = 0) -> Acks:
        """Of the slot that has this version."""
        slots = self.slots(local_rank)
        slot = next(
            (name for name, found in slots.headers().items() if found.version == (generation, step)), "a"
        )
        slots.close()
        return read_acks(slots.folder, slot, (generation, step), ordered_by)

    def replica(self, of: str, step: int, *, local_rank: int = 0) -> bytes | None:
        """The bytes that are here of that node's copy."""
        folder = os.path.join(self.memory, SlotFolder.of(DIRECTORY, local_rank, of).name)
        if not os.path.isdir(folder):
            return None
        slots = self.slots(local_rank, of)
        try:
            for name, found in slots.headers().items():
                if found.step == step:
                    with contextlib.suppress(OSError, ValueError), slots.hold(name) as held:  # gone meanwhile
                        return held.stream.read()
        finally:
            slots.close()
        return None


class Proxy:
    """Between two nodes: cuts the first connections after so many bytes to the server, or changes one on its way."""

    def __init__(self, port: int, *, cut_after: tuple[int, ...] = (), corrupt_at: int | None = None) -> None:
        self._port = port
        self._cuts = list(cut_after)
        self._corrupt_at = corrupt_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.passed: list[int] = []
        """Bytes to the server, by connection."""
        threading.Thread(target=self._serve, name="proxy", daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                client.close()
                continue
            self.passed.append(0)
            number = len(self.passed) - 1
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            threading.Thread(target=self._forth, args=(client, server, number), daemon=True).start()

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
        self._end(server, client)

    def _forth(self, client: socket.socket, server: socket.socket, number: int) -> None:
        cut = self._cuts[number] if number < len(self._cuts) else None
        try:
            while data := client.recv(1 << 16):
                before = self.passed[number]
                if cut is not None and before + len(data) > cut:
                    server.sendall(data[: cut - before])
                    self.passed[number] = cut
                    break
                if (
                    number == 0
                    and self._corrupt_at is not None
                    and 0 <= self._corrupt_at - before < len(data)
                ):
                    changed = bytearray(data)
                    changed[self._corrupt_at - before] ^= 0x10
                    data = bytes(changed)
                server.sendall(data)
                self.passed[number] += len(data)
        except OSError:
            pass
        self._end(server, client)

    @staticmethod
    def _end(*connections: socket.socket) -> None:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()  # what still comes is refused, and does not fill up a buffer


class Recorder:
    """Between a client and a server: writes down what the client says, and can change a byte of the answers."""

    def __init__(self, port: int, corrupt_at: int | None = None) -> None:
        self._port = port
        self._corrupt_at = corrupt_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.said = b""
        self.connections = 0
        threading.Thread(target=self._serve, name="recorder", daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                client.close()  # the server is gone: its client sees what it would see without a recorder
                continue
            threading.Thread(target=self._back, args=(server, client, self.connections), daemon=True).start()
            threading.Thread(target=self._forth, args=(client, server), daemon=True).start()

    def _forth(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                self.said += data
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _back(self, server: socket.socket, client: socket.socket, number: int) -> None:
        count = 0
        while data := server.recv(1 << 16):
            if number == 1 and self._corrupt_at is not None and 0 <= self._corrupt_at - count < len(data):
                changed = bytearray(data)
                changed[self._corrupt_at - count] ^= 0x10
                data = bytes(changed)
            count += len(data)
            with contextlib.suppress(OSError):
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
