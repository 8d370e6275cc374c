"""A process group wherever the script was started, with the timeout that was given to the agent.

torch takes the timeout from no environment variable. Subgroups are not touched: `new_group` and torch's own
`init_device_mesh` use torch's default unless they are given a timeout, also where the default group has another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ClusterEnvironmentError
from ..steps import torch_workarounds
from ..wire.environment import PROCESS_GROUP_TIMEOUT
from .cluster_environment import detect


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
