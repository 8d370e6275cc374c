"""The local store as a kind of store."""

from __future__ import annotations

import random
import time

from ..store.interface import Store
from ..store.retry_connect import retry_connect
from ..store.store_kind import KEEP_ALIVES_PER_TTL, Access, StoreKind
from .files import HostedAlready, StoreFiles

LEAST_ANSWER_TIMEOUT_S = 0.5
LOOKING_S = 3.0
"""For how long a process that only looks waits for a host: on one machine it is there, or about to be."""

_TRY_S = 1.0
"""To connect to a host, before it is tried to take its place."""


def _connect(access: Access) -> Store:
    from .store import REQUEST_TIMEOUT_S, LocalStore

    if access.lease_ttl_s is None:
        timeout_s = min(access.timeout_s, LOOKING_S)
        return LocalStore.connect(_files_of(access), timeout_s, max(access.timeout_s, REQUEST_TIMEOUT_S))
    answer_timeout_s = max(LEAST_ANSWER_TIMEOUT_S, access.lease_ttl_s / KEEP_ALIVES_PER_TTL)
    return LocalStore.connect(_files_of(access), access.timeout_s, answer_timeout_s)


def _load() -> object:
    from . import store

    return store


def _offer(access: Access) -> Store:
    from .host import LocalHost
    from .store import LocalStore

    files, found = _files_of(access), list[Store]()
    answer_timeout_s = max(LEAST_ANSWER_TIMEOUT_S, (access.lease_ttl_s or 0.0) / KEEP_ALIVES_PER_TTL)
    deadline = time.monotonic() + access.timeout_s

    def find() -> None:
        try:
            found.append(LocalHost(files))
        except HostedAlready:
            store = LocalStore.connect(files, _TRY_S, answer_timeout_s, take_over=lambda: LocalHost(files))
            found.append(store)

    retry_connect(find, deadline, random.Random())
    return found[0]


def _files_of(access: Access) -> StoreFiles:
    assert access.folder is not None, "the configuration names one"
    return StoreFiles(access.folder, access.job, access.lasting_folder)


LOCAL = StoreKind(
    "local",
    "that of a pool whose nodes are all on this machine; one of its daemons hosts it, over a UNIX socket for this user"
    " alone, and its queue outlives that daemon",
    _connect,
    _load,
    offer=_offer,
    place="a folder, local:///FOLDER, of this user's own",
)
