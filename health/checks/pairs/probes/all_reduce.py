"""A small all-reduce of two nodes, as the workers of a job do it: one process on each, started for one pair.

It imports torch, then reads its order: the one that measures first lets torch be imported meanwhile. A collective that
hangs is killed by the one that has started it.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from ...processes import read_order, say

ELEMENTS = 1 << 20
"""Floats: 4 MiB."""
TRIES = 3
ANSWER_S = 30.0
"""For each step of the two. The node that measures comes later, by all that it measures."""


def main() -> None:
    try:
        import torch  # noqa: F401  before the order: it takes seconds
    except ImportError as error:
        answer: dict[str, Any] = {"missing": f"torch cannot be imported: {error}"}
    else:
        try:
            order = read_order()
            answer = {"seconds": all_reduce(**order)}
        except Exception as error:  # whatever torch raises is the answer
            first = str(error).strip().split("\n", 1)[0]
            answer = {"problem": f"{type(error).__name__}: {first}"[:400]}
    say(answer)
    # Torch may hang in its own end, when the other node is gone.
    os._exit(0)


def all_reduce(
    rank: int, address: str, port: int, interface: str, key: str, backend: str, listener: int | None
) -> float:
    """Seconds of the fastest. `listener` is the descriptor of the socket at `address` and `port`, on rank 0."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    timeout = timedelta(seconds=ANSWER_S)
    own: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener}
    store = dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout, **own)
    dist.init_process_group(
        backend, store=dist.PrefixStore(key, store), rank=rank, world_size=2, timeout=timeout
    )
    device = "cuda" if backend == "nccl" else "cpu"
    took = []
    for _ in range(TRIES):
        tensor = torch.full((ELEMENTS,), rank + 1.0, device=device)
        began = time.monotonic()
        dist.all_reduce(tensor)
        if not bool((tensor == 3.0).all()):  # waits for the device, too
            raise ArithmeticError("the sum is wrong: memory, a device or a network card changes data")
        took.append(time.monotonic() - began)
    dist.barrier()
    return min(took)
