"""The stores of the scale benchmark, each in a process of its own on a free loopback port; and that process itself.

`store` starts one and ends it. For etcd that is one member with its data in memory where there is such a file system;
for c10d this file is the program: it hosts our store or torchrun's until its standard input ends.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"
JOB = "scale"
SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def store(system: str) -> Iterator[int]:
    """The port of a new and empty store for this system."""
    with etcd() if system == "etcd" else c10d(system) as port:
        yield port


@contextlib.contextmanager
def etcd() -> Iterator[int]:
    """Whoever connects waits until it is ready. Raises FileNotFoundError where etcd is not installed."""
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="scale-etcd-", dir=root))
    port, peer_port = free_ports(2)
    mine, peer = f"http://{HOST}:{port}", f"http://{HOST}:{peer_port}"
    words = ["etcd", "--name", "one", "--data-dir", str(folder / "data")]
    words += ["--listen-client-urls", mine, "--advertise-client-urls", mine]
    words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    words += ["--initial-cluster", f"one={peer}"]
    try:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        with _ended_after(process):
            yield port
            if process.poll() is not None:
                said = (folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"etcd ended with code {process.returncode}:\n{said}")
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def c10d(system: str) -> Iterator[int]:
    words = [sys.executable, __file__, system]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with _ended_after(process):
        assert process.stdout is not None, "it is a pipe"
        yield int(process.stdout.readline())


@contextlib.contextmanager
def _ended_after(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Taken meanwhile, etcd ends, and says so."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def main() -> None:
    server: object
    if sys.argv[1] == "c10d":
        from elastic_agent.rendezvous.c10d.host import C10dHost

        listener = socket.create_server((HOST, 0), backlog=1024)
        port = listener.getsockname()[1]
        server = C10dHost(listener, HOST, JOB)
    else:
        from torch.distributed import TCPStore

        server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        port = server.port
    print(port, flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
