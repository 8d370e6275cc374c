"""The store that one of the agents hosts behind a torch TCPStore, the way of torchrun's c10d backend."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ..records import World
from ..store.interface import Store
from ..store.store_kind import KEEP_ALIVES_PER_TTL, Access, StoreKind

PORT = 29400
"""torchrun's default for c10d, so that a host name alone means the same to both."""

LEAST_ANSWER_TIMEOUT_S = 0.5
"""With a host that does not answer. A connection that was reset is found out only by asking again, and there must be
time for that before the lease is no proof any more."""


def _connect(access: Access) -> Store:
    import torch.distributed  # noqa: F401  before the clock runs: it takes seconds

    from .store import C10dStore

    (endpoint,) = access.endpoints
    answer_timeout_s = access.timeout_s
    if access.lease_ttl_s is not None:
        answer_timeout_s = max(LEAST_ANSWER_TIMEOUT_S, access.lease_ttl_s / KEEP_ALIVES_PER_TTL)
    return C10dStore.connect(endpoint.address, endpoint.port, access.job, access.timeout_s, answer_timeout_s)


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
