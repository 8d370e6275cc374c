"""All that torch.distributed offers on gloo, after meeting in each of its ways: a line for each thing that is right.

`conformance.py FOLDER PORT KILL`: rank 1 of generation 1 kills itself at the end if KILL is 1. Not a test.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from elastic_agent.worker import fresh_init_file

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RANKS = [float(rank + 1) for rank in range(WORLD)]
"""What each rank gives."""

OPERATIONS: dict[str, tuple[Any, Callable[[float, float], float]]] = {
    "sum": (dist.ReduceOp.SUM, lambda a, b: a + b),
    "product": (dist.ReduceOp.PRODUCT, lambda a, b: a * b),
    "min": (dist.ReduceOp.MIN, min),
    "max": (dist.ReduceOp.MAX, max),
}


def mine() -> torch.Tensor:
    return torch.tensor([RANK + 1.0])


def empty() -> list[torch.Tensor]:
    return [torch.zeros(1) for _ in range(WORLD)]


def told(what: str, right: bool) -> None:
    print(f"{'ok' if right else 'WRONG'}: {what}", flush=True)


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [tensor.item() for tensor in tensors]


def collectives(group: Any, asynchronous: bool) -> None:
    def done(work: Any) -> None:
        if asynchronous:
            work.wait()
            assert work.is_completed()

    how: dict[str, Any] = {"group": group, "async_op": asynchronous}
    name = "async" if asynchronous else "sync"
    for operation, (op, fold) in OPERATIONS.items():
        total = mine()
        done(dist.all_reduce(total, op, **how))
        told(f"{name} all_reduce {operation}", total.item() == reduce(fold, RANKS))
        total = mine()
        done(dist.reduce(total, 0, op, **how))
        told(f"{name} reduce {operation}", RANK != 0 or total.item() == reduce(fold, RANKS))
    shared = mine()
    done(dist.broadcast(shared, WORLD - 1, **how))
    told(f"{name} broadcast", shared.item() == WORLD)
    rows = empty()
    done(dist.all_gather(rows, mine(), **how))
    told(f"{name} all_gather", values(rows) == RANKS)
    rows = empty()
    done(dist.gather(mine(), rows if RANK == 0 else None, 0, **how))
    told(f"{name} gather", RANK != 0 or values(rows) == RANKS)
    part = torch.zeros(1)
    parts = [torch.tensor([rank]) for rank in RANKS]
    done(dist.scatter(part, parts if RANK == 0 else None, 0, **how))
    told(f"{name} scatter", part.item() == RANK + 1)
    done(dist.barrier(**how))
    told(f"{name} barrier", True)


def objects(group: Any) -> None:
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": RANK}, group)
    told("all_gather_object", gathered == [{"rank": rank} for rank in range(WORLD)])
    sent = [("from", 0)] if RANK == 0 else [None]
    dist.broadcast_object_list(sent, 0, group)
    told("broadcast_object_list", sent == [("from", 0)])
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(range(WORLD)) if RANK == 0 else None, 0, group)
    told("scatter_object_list", received == [RANK])


def point_to_point() -> None:
    following, former = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    received = torch.zeros(1)
    sending = dist.isend(mine(), following, tag=7)
    receiving = dist.irecv(received, former, tag=7)
    assert sending is not None
    assert receiving is not None
    sending.wait()
    receiving.wait()
    told("isend, irecv", received.item() == former + 1)
    if RANK == 0:
        senders = {dist.recv(received) for _ in range(WORLD - 1)}
        told("recv from any", senders == set(range(1, WORLD)))
    else:
        dist.send(mine(), 0)


def subgroups() -> None:
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=20), backend="gloo")
    if RANK < 2:
        total = mine()
        dist.all_reduce(total, group=pair)
        told("a subgroup", total.item() == 3 and dist.get_world_size(pair) == 2)
    told("a rank outside of it", RANK < 2 or dist.get_rank(pair) == -1)


def meet(how: str, port: str, folder: str) -> None:
    generation = int(os.environ["ELASTIC_AGENT_GENERATION"])
    if how == "store":
        address = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(address, int(port), WORLD, is_master=RANK == 0)
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)
    else:
        method = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": fresh_init_file(folder)}[how]
        dist.init_process_group("gloo", method, rank=RANK, world_size=WORLD)
    told(f"generation {generation} met by {how}", dist.get_rank() == RANK and dist.get_backend() == "gloo")


def print_table() -> None:
    """Which backend this build of torch has, and for which devices; MPI also where it is absent."""
    built = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    for name in sorted({*built, *dist.Backend.backend_list} - {"undefined"}):
        there = built.get(name, dist.is_backend_available(name))
        devices = ",".join(dist.Backend.backend_capability.get(name, ())) if there else "-"
        print(f"backend {name:8} {'built in' if there else 'absent':8} devices {devices or '-'}", flush=True)


def names() -> None:
    """What scripts ask of a group, and of torch."""
    told("get_rank, get_world_size", (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD))
    told("is_initialized", dist.is_initialized())
    told("get_backend", dist.Backend("GLOO") == dist.get_backend() == dist.Backend.GLOO)
    told("no *_multigpu", not any(name.endswith("_multigpu") for name in dir(dist)))


def main(folder: str, port: str, kill: str) -> None:
    if RANK == 0:
        print_table()
    for how in ("env", "tcp", "file", "store"):
        meet(how, port, folder)
        if how == "env":
            for asynchronous in (False, True):
                collectives(None, asynchronous)
            names()
            objects(None)
            point_to_point()
            subgroups()
        dist.barrier()
        dist.destroy_process_group()
    if kill == "1" and os.environ["ELASTIC_AGENT_GENERATION"] == "1" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {RANK} has done it all", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
