"""What one node finds out about another one: does it answer, and how fast is an all-reduce with it.

Every wait has an end, whatever the other side does. What keeps a node from the other one is told apart by what the
kernel says: silence is a packet filter that drops, or a cable; a refusal comes from the machine itself. Any program may
connect to the server. One that does not begin with the check's token gets nothing and is cut off.

An all-reduce of two nodes is done as the workers of a job do it, by a process on each that imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from .finding import probe_command
from .pairs import NodeFacts, Obstacle

CONNECT_S = 3.0
"""The kernel sends SYN at once and after 1 s, and a third one just after this time."""
ANSWER_S = 2.0
AT_ONCE = 64

_BY_ERRNO = {
    errno.ECONNREFUSED: Obstacle.REFUSED,
    errno.ETIMEDOUT: Obstacle.DROPPED,
    errno.EHOSTUNREACH: Obstacle.NO_ROUTE,
    errno.ENETUNREACH: Obstacle.NO_ROUTE,
    errno.EPERM: Obstacle.NO_ROUTE,
    errno.EACCES: Obstacle.NO_ROUTE,
    errno.ECONNRESET: Obstacle.SILENT,
    errno.EPIPE: Obstacle.SILENT,
}


def reach(address: str, others: Sequence[NodeFacts]) -> dict[str, Obstacle]:
    """Those that do not answer, and why. `address` is this node's own. Never raises."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tried = pool.map(lambda other: obstacle_to(address, other), others)
        return {
            other.node: obstacle
            for other, obstacle in zip(others, tried, strict=True)
            if obstacle is not None
        }


def obstacle_to(address: str, other: NodeFacts) -> Obstacle | None:
    half = len(other.token) // 2
    family = socket.AF_INET6 if ":" in other.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(CONNECT_S)
            connection.bind((address, 0))
            connection.connect((other.address, other.port))
        except TimeoutError:
            return Obstacle.DROPPED
        except OSError as error:
            return _BY_ERRNO.get(error.errno or 0, Obstacle.OWN)
        try:
            connection.settimeout(ANSWER_S)
            connection.sendall(other.token[:half].encode())
            answer = connection.makefile("rb").read(half)
        except OSError:
            return Obstacle.SILENT
    return None if hmac.compare_digest(answer, other.token[half:].encode()) else Obstacle.STRANGER


def serve(listener: socket.socket, token: str) -> None:
    """Until the listener is shut down."""
    listener.settimeout(None)
    places = threading.Semaphore(AT_ONCE)  # so that a flood waits in the kernel
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="answer") as pool:
        while True:
            try:
                client, _ = listener.accept()
            except ConnectionError:  # the client's, already gone
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    return
                time.sleep(0.1)
                continue
            places.acquire()
            pool.submit(_answer, client, token).add_done_callback(lambda _: places.release())


def _answer(client: socket.socket, token: str) -> None:
    half = len(token) // 2
    with client, contextlib.suppress(OSError):
        client.settimeout(ANSWER_S)
        if hmac.compare_digest(client.makefile("rb").read(half), token[:half].encode()):
            client.sendall(token[half:].encode())
            client.recv(1)  # the other side closes first, so that no port here waits for what may still come


# --- An all-reduce

ELEMENTS = 1 << 20
"""Floats: 4 MiB."""
TIMES = 4
"""Of which the fastest one counts: the first sets up connections, and a machine may be busy for a moment."""
ALL_REDUCE_S = 30.0
"""For each step of the two."""
WITHIN_S = 75.0
"""With the import of torch, which takes long on a busy machine, or from a file system over the network."""


@dataclass(frozen=True, slots=True)
class AllReduceOrder:
    """`rank` is 0 where the store listens, at `address` and `port`, with the descriptor `listener`; else 1."""

    rank: int
    address: str
    port: int
    interface: str
    key: str
    backend: str
    listener: int | None = None


def all_reduce(order: AllReduceOrder, python: str, environ: Mapping[str, str]) -> tuple[float, str]:
    """Bytes per second, and what has gone wrong; empty: nothing. Never raises."""
    command = [*probe_command(python, __name__, "all_reduce_main"), json.dumps(asdict(order))]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            pass_fds=() if order.listener is None else (order.listener,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WITHIN_S,
        )
        rate = float(done.stdout)
    except subprocess.TimeoutExpired:
        return 0.0, f"it hangs: no result within {WITHIN_S:g} s"
    except OSError as error:
        return 0.0, f"{python}: {error.strerror}"
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return 0.0, (last or f"it ended with {done.returncode}")[:512]
    return rate, ""


def all_reduce_main() -> None:
    """In the process."""
    out = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard output: NCCL its version, where NCCL_DEBUG is set
    import torch
    import torch.distributed as dist

    order = AllReduceOrder(**json.loads(sys.argv[2]))
    os.environ["GLOO_SOCKET_IFNAME"] = order.interface
    os.environ["NCCL_SOCKET_IFNAME"] = f"={order.interface}"
    timeout = timedelta(seconds=ALL_REDUCE_S)
    own: dict[str, Any] = (
        {} if order.listener is None else {"is_master": True, "master_listen_fd": order.listener}
    )
    store = dist.TCPStore(order.address, order.port, wait_for_workers=False, timeout=timeout, **own)
    prefixed = dist.PrefixStore(order.key, store)
    dist.init_process_group(order.backend, store=prefixed, rank=order.rank, world_size=2, timeout=timeout)
    device, took = "cuda" if order.backend == "nccl" else "cpu", []
    for _ in range(TIMES):
        tensor = torch.full((ELEMENTS,), order.rank + 1.0, device=device)
        began = time.monotonic()
        dist.all_reduce(tensor)
        if not bool((tensor == 3.0).all()):  # waits for the device, too
            raise ArithmeticError("the sum is wrong: memory, a device or a network card changes data")
        took.append(time.monotonic() - began)
    dist.barrier()
    os.write(out, f"{4 * ELEMENTS / min(took)}\n".encode())
    # Torch may hang in its own end, when the other node is gone.
    os._exit(0)
