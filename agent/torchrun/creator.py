"""Our rendezvous under stock torchrun: `torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=h1:2379,h2:2379 ...`.

This is the entry point (`torchrun.handlers` in pyproject.toml). torch loads it whenever its rendezvous package is
imported, for whichever backend, so nothing more is imported here before ours is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torch calls once, to learn how handlers are made."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Raises ValueError with everything that is wrong in `params`. Contacts no store yet."""
    from .handler import EtcdV3Handler, read_parameters

    return EtcdV3Handler(read_parameters(params))
