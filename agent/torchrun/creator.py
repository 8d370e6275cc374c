"""Our rendezvous under stock torchrun: `torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=h1:2379,h2:2379 ...`.

This is the entry point (`torchrun.handlers` in pyproject.toml). torch loads it whenever its rendezvous package is
imported, for whichever backend, so nothing more is imported here before ours is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


PASSWORD = "ELASTIC_AGENT_ETCD_PASSWORD"
"""A variable of earlier versions: every worker of torchrun would inherit it."""


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torch calls once, to learn how handlers are made."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Raises ValueError with everything that is wrong in `params`. Contacts no store yet."""
    if PASSWORD in os.environ:
        raise ValueError(
            f"{PASSWORD} is not used any more, and every worker would get it: unset it, write the password into a file"
            " of mode 600, and --rdzv-conf password_file=FILE"
        )
    from .handler import EtcdV3Handler, read_parameters

    return EtcdV3Handler(read_parameters(params))
