"""How the ranks of a world meet, wherever the script was started: in a process group, a mesh, at a file or a port.

torch takes the timeout of a group from no environment variable: here it is the one that was given to the agent.
Subgroups are not touched: `new_group` and torch's own `init_device_mesh` use torch's default unless they are given a
timeout, also where the default group has another.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from ..errors import ClusterEnvironmentError, MeshMismatch
from ..steps import torch_workarounds
from ..wire.environment import PROCESS_GROUP_TIMEOUT, WorkerEnv
from .cluster_environment import detect

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Size: TypeAlias = int | Literal["auto"] | None

INIT_FILE = "elastic-agent-init"

_calls = itertools.count()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    *args: Any,
    **more: Any,
) -> None:
    """`torch.distributed.init_process_group`, where no `timeout` means twice --hang-timeout, if given.

    No `backend` means `default_backend()`, or with a `device_id` the one of that device.
    Where neither rank, world size, store nor another method than `env://` is given, and no agent or torchrun has set
    RANK and WORLD_SIZE, the variables of Slurm, MPI or Kubeflow say which rank this is, and those of torch are set from
    them; without any it is a group of one. Other arguments go to torch as they are.
    Raises ClusterEnvironmentError where a launcher was found whose variables do not suffice, and where torch was built
    without torch.distributed.
    """
    if not dist.is_available():
        raise ClusterEnvironmentError("this build of torch has no torch.distributed: install another one")
    if timeout is None:
        timeout = chosen_timeout(os.environ)
    if init_method in (None, "env://") and not args and not more.keys() & {"rank", "world_size", "store"}:
        place = detect(os.environ)
        if place is not None and place.world_size == 1:
            init_method, more = None, more | {"rank": 0, "world_size": 1, "store": dist.HashStore()}
        elif place is not None:
            os.environ.update(place.variables())
    if backend is None and more.get("device_id") is None:
        backend = default_backend()
    torch_workarounds.install()
    dist.init_process_group(backend, init_method, timeout, *args, **more)


def chosen_timeout(environ: Mapping[str, str]) -> timedelta | None:
    """The agent's choice; None: it has made none."""
    chosen = environ.get(PROCESS_GROUP_TIMEOUT)
    return timedelta(seconds=float(chosen)) if chosen else None


def default_backend() -> str:
    """That of the accelerator which this process sees, such as nccl; gloo where it sees none, or torch lacks that one.

    torch itself goes by what it was built for: on a host without a GPU a build for CUDA takes nccl, and the first
    collective of a tensor on the CPU fails.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    backend = dist.get_default_backend_for_device(accelerator)
    return backend if dist.is_backend_available(backend) else "gloo"


# ---------------------------------------------------------------- a mesh of all ranks of the present world
#
# Its sizes are worked out anew in each generation:
#
#     world = mesh(dp="auto", shard=4)            # 8 ranks: 2 x 4; 12 ranks: 3 x 4
#     fully_shard(model, mesh=world["dp", "shard"])
#
# The dimensions are, from the outside in, `dp` (replicas), `shard` and `tp`: ranks that differ only in the last one
# have numbers beside each other, so that they share a node where it has that many workers.


def mesh(dp: Size = "auto", shard: Size = None, tp: Size = None) -> DeviceMesh:
    """torch's DeviceMesh of all ranks, on the device of the default process group, which it creates if there is none.

    None leaves a dimension out; "auto", for one of them, makes it as large as the world allows. All ranks must call.
    The groups of its dimensions have twice the agent's --hang-timeout, where torch would give them its default.
    Raises MeshMismatch, on all ranks, where the number of ranks does not fit, and ValueError for other sizes.
    """
    # A build of torch without torch.distributed has neither.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import _set_pg_timeout

    asked = {name: size for name, size in (("dp", dp), ("shard", shard), ("tp", tp)) if size is not None}
    if not dist.is_initialized():
        init_process_group()
    sizes = sizes_of(asked, dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    made = init_device_mesh(_device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if (timeout := chosen_timeout(os.environ)) is not None:
        for group in made.get_all_groups():
            _set_pg_timeout(timeout, group)
    return made


def sizes_of(asked: dict[str, int | Literal["auto"]], ranks: int, per_node: int) -> dict[str, int]:
    """Each dimension's size. `per_node`: how many ranks a node has, for the advice.

    >>> sizes_of({"dp": "auto", "shard": 4}, 8, 2)
    {'dp': 2, 'shard': 4}
    """
    given = {name: size for name, size in asked.items() if size != "auto"}
    wrong = [f"{name}={size!r}" for name, size in given.items() if type(size) is not int or size < 1]
    if wrong or not asked or len(asked) - len(given) > 1:
        called = ", ".join(f"{name}={size!r}" for name, size in asked.items())
        raise ValueError(f'mesh({called}): each size is a number from 1 or None, and one may be "auto"')
    fixed = math.prod(given.values())
    if ranks % fixed or (len(given) == len(asked) and ranks != fixed):
        raise MeshMismatch(_why_not(given, fixed, ranks, per_node, grows=len(given) < len(asked)))
    return {name: given.get(name, ranks // fixed) for name in asked}


def _why_not(given: dict[str, int], fixed: int, ranks: int, per_node: int, *, grows: bool) -> str:
    form = " x ".join(f"{name} {size}" for name, size in given.items())
    nodes = fixed // math.gcd(fixed, per_node)
    if not grows:
        told = (
            f"--min-nodes {nodes} --max-nodes {nodes}"
            if fixed % per_node == 0
            else "another --nproc-per-node"
        )
        return f"a mesh of {form} fits {fixed} ranks, and the world has {ranks}; start the agents with {told}"
    fitting = ", ".join(str(fixed * number) for number in (1, 2, 3))
    told = f"--nodes-multiple-of {nodes}, if all nodes have {per_node} workers as this one has"
    if nodes == 1:
        told = f"{per_node} workers on every node (--nproc-per-node), as this one has"
    return (
        f"a mesh of {form} fits {fitting}, ... ranks, and the world has {ranks}; start the agents with {told}"
    )


def _device_type() -> str:
    """gloo takes the tensors of all devices; a group that has another backend for the accelerator is there for it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
    return accelerator.type if backends.get(accelerator.type, "gloo") != "gloo" else "cpu"


# ---------------------------------------------------------------- a file or a port to meet at
#
# Such a file must be new for every process group: one that is left over from a generation that was killed lets the next
# one wait for ever. Under an agent no script needs a port: MASTER_PORT is bound beforehand.


def fresh_init_file(directory: str | os.PathLike[str]) -> str:
    """An `init_method` that no other generation or run uses, the same on all ranks: a file in `directory`.

    Each call names another file, so every rank must call it equally often. The directory must be on a file system that
    all nodes share, with working locks. Files of earlier generations of the run are removed, and each file when the
    process ends. Raises OSError, and ClusterEnvironmentError where no agent has started this process.
    """
    env = WorkerEnv.of(os.environ)
    if not env.run:
        raise ClusterEnvironmentError(
            "no agent has started this process, so no name is known that is new and the same on all ranks: pass an "
            "init_method of your own, or use env://"
        )
    folder = Path(directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    mine = re.compile(rf"{INIT_FILE}-{re.escape(env.run)}-(\d+)-\d+")
    for old in folder.iterdir():
        found = mine.fullmatch(old.name)
        if found is not None and int(found[1]) < env.generation:
            _remove(old)
    file = folder / f"{INIT_FILE}-{env.run}-{env.generation}-{next(_calls)}"
    atexit.register(_remove, file)
    return f"file://{file}"


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def find_free_network_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Another process may take it before it is used: `reserve_port` holds it."""
    with reserve_port(host) as port:
        return port


@contextlib.contextmanager
def reserve_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that is held until the block ends: the kernel gives it to no process that asks for any.

    Inside of the block only a socket with SO_REUSEPORT can bind it. For others, such as torch's TCPStore, leave the
    block right before they start. Raises OSError.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]
