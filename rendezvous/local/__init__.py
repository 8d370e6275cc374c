"""The store of one machine: a file in a folder of its user's own."""

from __future__ import annotations

from pathlib import Path

from ..store.interface import Store
from ..store.store_kind import Access, StoreKind

LOOKING_S = 3.0
"""For how long a process that only looks waits for the store: on one machine it is there, or about to be."""


def _connect(access: Access) -> Store:
    from .store import LocalStore

    timeout_s = access.timeout_s if access.lease_ttl_s is not None else min(access.timeout_s, LOOKING_S)
    return LocalStore.connect(_file_of(access), timeout_s, access.answer_timeout_s)


def _load() -> object:
    from . import store

    return store


def _offer(access: Access) -> Store:
    from .store import LocalStore

    return LocalStore.connect(_file_of(access), access.timeout_s, access.answer_timeout_s, make=True)


def _file_of(access: Access) -> Path:
    from .store import store_file

    assert access.folder is not None, "the configuration names one"
    return store_file(access.folder, access.job)


LOCAL = StoreKind(
    "local",
    "that of a pool whose nodes are all on this machine: a file for this user alone, which outlives all daemons",
    _connect,
    _load,
    offer=_offer,
    place="a folder, local:///FOLDER, of this user's own",
)
