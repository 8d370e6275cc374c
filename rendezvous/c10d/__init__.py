"""The store that one of the agents hosts behind a torch TCPStore, the way of torchrun's c10d backend."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ..records import World
from ..store.interface import Store
from ..store.store_kind import Access, StoreKind

PORT = 29400
"""torchrun's default for c10d, so that a host name alone means the same to both."""


def _connect(access: Access) -> Store:
    import torch.distributed  # noqa: F401  before the clock runs: it takes seconds

    from .store import C10dStore

    (endpoint,) = access.endpoints
    return C10dStore.connect(
        endpoint.address, endpoint.port, access.job, access.timeout_s, access.answer_timeout_s
    )


def _load() -> object:
    import torch.distributed

    from . import store

    return torch, store


def _host(listener: socket.socket, job: str, past: World | None, remember: Callable[[str], None]) -> Store:
    from .host import C10dHost

    return C10dHost(listener, listener.getsockname()[0], job, past=past, remember=remember)


C10D = StoreKind(
    "c10d",
    "a TCPStore hosted by one of the agents",
    _connect,
    _load,
    port=PORT,
    host=_host,
    aliases=(
        "static",
    ),  # torchrun's, with --master-addr and --master-port; the world may change here all the same
    place=f"one host, port {PORT} if none is given (default, also localhost:0: this agent hosts the store on a free"
    " port and prints the command for the other nodes)",
)
