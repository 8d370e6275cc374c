"""The store of one machine: a file in a folder of its user's own."""

from __future__ import annotations

from ..store.interface import Store
from ..store.store_kind import Access, StoreKind

LOOKING_S = 3.0
"""For how long a process that only looks waits for the store: on one machine it is there, or about to be."""


def _connect(access: Access, *, make: bool = False) -> Store:
    from .store import LocalStore, store_file

    assert access.folder is not None, "the configuration names one"
    looks = access.lease_ttl_s is None and not make
    timeout_s = min(access.timeout_s, LOOKING_S) if looks else access.timeout_s
    return LocalStore.connect(
        store_file(access.folder, access.job), timeout_s, access.answer_timeout_s, make=make
    )


def _load() -> object:
    from . import store

    return store


LOCAL = StoreKind(
    "local",
    "that of a pool whose nodes are all on this machine: a file for this user alone, which outlives all daemons",
    _connect,
    _load,
    offer=lambda access: _connect(access, make=True),
    place="a folder, local:///FOLDER, of this user's own",
)
