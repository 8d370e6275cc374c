"""A mesh of all ranks of the present world: its sizes are worked out anew in each generation.

    world = mesh(dp="auto", shard=4)            # 8 ranks: 2 x 4; 12 ranks: 3 x 4
    fully_shard(model, mesh=world["dp", "shard"])

The dimensions are, from the outside in, `dp` (replicas), `shard` and `tp`: ranks that differ only in the last one have
numbers beside each other, so that they share a node where it has that many workers.
"""

from __future__ import annotations

import math
import os
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..errors import MeshMismatch
from .process_group import chosen_timeout, init_process_group

Size: TypeAlias = int | Literal["auto"] | None


def mesh(dp: Size = "auto", shard: Size = None, tp: Size = None) -> DeviceMesh:
    """torch's DeviceMesh of all ranks, on the device of the default process group, which it creates if there is none.

    None leaves a dimension out; "auto", for one of them, makes it as large as the world allows. All ranks must call.
    The groups of its dimensions have twice the agent's --hang-timeout, where torch would give them its default.
    Raises MeshMismatch, on all ranks, where the number of ranks does not fit, and ValueError for other sizes.
    """
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
