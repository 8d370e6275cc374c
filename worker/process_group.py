"""A process group with the timeout that the agent was told.

torch takes it from no environment variable. Subgroups are not touched: `new_group` and `init_device_mesh` use torch's
default unless they are given a timeout, also where the default group has another.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .wire.environment import PROCESS_GROUP_TIMEOUT


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    *args: Any,
    **more: Any,
) -> None:
    """`torch.distributed.init_process_group`, where no `timeout` means that of --process-group-timeout.

    Whatever else is passed goes to torch as it is. Without an agent, or when it was told of no timeout, this is
    torch's own function.
    """
    chosen = os.environ.get(PROCESS_GROUP_TIMEOUT)
    if timeout is None and chosen:
        timeout = timedelta(seconds=float(chosen))
    dist.init_process_group(backend, init_method, timeout, *args, **more)
