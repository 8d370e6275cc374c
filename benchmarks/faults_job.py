"""A worker of `faults.py`: takes steps with all ranks. After some, in the first try, rank 1 does what FAULT says.

    faults_job.py FOLDER FAULT[,mute]

`mute`: it tells its agent nothing, as a script does that knows of no agent, and trains longer before. On the node
named `bad`, the fault `bad-node` ends the worker in every try.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

AT_STEP = 40
AT_MUTE_STEP = 600
"""Half a minute, in which an agent can see what is usual."""
STEP_S = 0.05
GUILTY_RANK = 1


def main(folder: Path, mode: str) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    fault, _, mute = mode.partition(",")
    note(folder, "start")
    record(train)(folder, fault, mute=bool(mute))


def note(folder: Path, what: str, **more: object) -> None:
    who = {name: os.environ[name] for name in ("NODE", "RANK", "WORLD_SIZE")}
    line = {"what": what, "at": time.monotonic(), "pid": os.getpid()} | who | more
    with open(folder / "history", "a") as file:
        file.write(json.dumps(line) + "\n")


def train(folder: Path, fault: str, *, mute: bool) -> None:
    if fault == "import-error":
        happen(folder, fault, again=True)
    import torch
    import torch.distributed as dist

    from elastic_agent.worker import step

    dist.init_process_group("gloo")
    weights = torch.nn.Linear(64, 64)
    model = torch.nn.parallel.DistributedDataParallel(weights)
    everyone = dist.new_group()
    done, at_step = 0, AT_MUTE_STEP if mute else AT_STEP
    while not (folder / "enough").exists():
        time.sleep(STEP_S)
        again = fault == "bad-node" and os.environ["NODE"] == "bad"
        if (done == at_step and dist.get_rank() == GUILTY_RANK and fault != "bad-node") or (
            again and done == 20
        ):
            happen(folder, fault, again=again, everyone=everyone)
        model(torch.ones(8, 64)).sum().backward()
        dist.all_reduce(torch.ones(1))
        done += 1
        if done == 1 or done % 20 == 0:
            note(folder, "step", step=done)
        if not mute:
            step(done)


def happen(folder: Path, fault: str, *, again: bool, everyone: object = None) -> None:
    if not again and (folder / "happened").exists():
        return
    (folder / "happened").touch()
    note(folder, "fault")
    if fault in COLLECTIVES:
        COLLECTIVES[fault](everyone)
    else:
        FAULTS[fault]()


# ---------------------------------------------------------------- ends


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def exception() -> None:
    raise ValueError("the data is not there")


def assertion() -> None:
    assert len([]) == 1, "the batch is empty"


def import_error() -> None:
    import a_module_that_no_one_wrote  # type: ignore  # noqa: F401


def cuda_memory() -> None:
    import torch

    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
    )


def port_taken() -> None:
    with socket.socket() as taken, socket.socket() as one:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        one.bind(taken.getsockname())


def disk_full() -> None:
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def silent_exit() -> None:
    os._exit(1)


# ---------------------------------------------------------------- hangs


def asleep() -> None:
    time.sleep(3600)


def holding_gil() -> None:
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(3600)


def busy() -> None:
    while True:
        pass


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def deadlock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def reading_socket() -> None:
    one, _other = socket.socketpair()
    one.recv(1)


def data_loader() -> None:
    import torch

    class Stuck(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, _: int) -> int:
            time.sleep(3600)
            return 0

    for _ in torch.utils.data.DataLoader(Stuck(), num_workers=1):
        pass


def extra_collective(_: object) -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.barrier()
    dist.barrier()


def other_group(everyone: object) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1), group=everyone)  # type: ignore[arg-type]


FAULTS: dict[str, Callable[[], None]] = {
    "killed": killed,
    "segfault": segfault,
    "exception": exception,
    "assertion": assertion,
    "import-error": import_error,
    "cuda-memory": cuda_memory,
    "port-taken": port_taken,
    "disk-full": disk_full,
    "silent-exit": silent_exit,
    "bad-node": silent_exit,
    "asleep": asleep,
    "holding-gil": holding_gil,
    "busy": busy,
    "stopped": stopped,
    "deadlock": deadlock,
    "reading-socket": reading_socket,
    "data-loader": data_loader,
}
COLLECTIVES: dict[str, Callable[[object], None]] = {
    "extra-collective": extra_collective,
    "other-group": other_group,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
