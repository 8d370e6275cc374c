"""Training that hangs, in a way of its own for each kind: `hanging.py KIND`. Rank 1 is to blame. Not a test.

Each rank writes a line to the file `HANGING_MARKS` before it does what it never comes back from.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PR_SET_PDEATHSIG = 1
CULPRIT = 1
FOR_EVER_S = 3600.0
KINDS: dict[str, Callable[[], None]] = {}


def kind(function: Callable[[], None]) -> Callable[[], None]:
    KINDS[function.__name__] = function
    return function


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reduce() -> None:
    dist.all_reduce(torch.ones(4))


def broadcast() -> None:
    dist.broadcast(torch.ones(4), src=0)


# ---------------------------------------------------------------- what rank 1 does while the others are in all_reduce


@kind
def skipped_collective() -> None:
    dist.barrier()  # the end of its training


@kind
def other_order() -> None:
    broadcast()
    reduce()


@kind
def extra_collective() -> None:
    dist.all_gather([torch.ones(4) for _ in range(dist.get_world_size())], torch.ones(4))
    reduce()


@kind
def other_group() -> None:
    dist.all_reduce(torch.ones(4), group=GROUPS[0])


@kind
def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@kind
def asleep() -> None:
    time.sleep(FOR_EVER_S)


@kind
def lock_of_python() -> None:
    started = threading.Event()

    def work() -> None:
        started.set()
        while True:
            sum(range(1000))

    threading.Thread(target=work, daemon=True).start()
    started.wait()
    native = ctypes.PyDLL(None)
    while True:
        native.sleep(int(FOR_EVER_S))


@kind
def busy() -> None:
    number = 0
    while True:
        number += 1


@kind
def deadlock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


class Stuck(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 3:
            die_with_parent()
            mark()
            os.read(os.pipe()[0], 1)
        return torch.ones(2)


@kind
def data_loader() -> None:
    for _ in DataLoader(Stuck(), num_workers=1):
        pass


@kind
def data_loader_without_processes() -> None:
    for _ in DataLoader(Stuck()):
        pass


@kind
def read_of_a_pipe() -> None:
    os.read(os.pipe()[0], 1)


@kind
def read_of_a_socket() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).recv(1)


@kind
def child_that_does_not_end() -> None:
    if (child := os.fork()) == 0:
        die_with_parent()
        time.sleep(FOR_EVER_S)
        os._exit(0)
    os.waitpid(child, 0)


@kind
def exit_handler() -> None:
    atexit.register(threading.Event().wait)
    sys.exit()


@kind
def save() -> None:
    pipe = Path(os.environ["HANGING_MARKS"] + ".pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    torch.save(torch.zeros(2**20), pipe)
    os.close(reader)


@kind
def file_server() -> None:
    file = os.open(os.environ["HANGING_MOUNT"] + "/state", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"state")
    os.fsync(file)


@kind
def late_for_backward() -> None:
    time.sleep(FOR_EVER_S)


@kind
def late_for_rendezvous() -> None:
    time.sleep(FOR_EVER_S)


def backward() -> None:
    MODELS[0](torch.ones(2, 4)).sum().backward()


GROUPS: list[Any] = []
MODELS: list[Any] = []
OTHERS = {"late_for_backward": backward}


def mark() -> None:
    with open(os.environ["HANGING_MARKS"], "a") as file:
        file.write(f"{dist.get_rank() if dist.is_initialized() else os.environ['RANK']}\n")


def main(name: str) -> None:
    rank = int(os.environ["RANK"])
    if name == "late_for_rendezvous":
        mark()
        if rank == CULPRIT:
            KINDS[name]()
    place = os.environ.get("HANGING_STORE", "env://")
    dist.init_process_group("gloo", place, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    GROUPS.append(dist.new_group([0, CULPRIT]))
    if name == "late_for_backward":
        MODELS.append(DistributedDataParallel(torch.nn.Linear(4, 4)))
        backward()
    reduce()
    if rank == CULPRIT and not name.startswith("data_loader"):
        mark()
        KINDS[name]()
    elif rank == CULPRIT:
        KINDS[name]()
    else:
        mark()
        OTHERS.get(name, reduce)()


if __name__ == "__main__":
    main(sys.argv[1])
