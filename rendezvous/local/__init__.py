"""The store of one machine: a file in a folder of its user's own."""

from __future__ import annotations

from pathlib import Path

from ..store.interface import Store
from ..store.store_kind import KEEP_ALIVES_PER_TTL, Access, StoreKind

LEAST_ANSWER_TIMEOUT_S = 0.5
LOOKING_S = 3.0
"""For how long a process that only looks waits for the store: on one machine it is there, or about to be."""


def _connect(access: Access) -> Store:
    from .store import REQUEST_TIMEOUT_S, LocalStore

    if access.lease_ttl_s is None:
        timeout_s = min(access.timeout_s, LOOKING_S)
        return LocalStore.connect(_file_of(access), timeout_s, max(access.timeout_s, REQUEST_TIMEOUT_S))
    return LocalStore.connect(_file_of(access), access.timeout_s, _answer_timeout_s(access))


def _load() -> object:
    from . import store

    return store


def _offer(access: Access) -> Store:
    from .store import LocalStore

    return LocalStore.offer(_file_of(access), access.timeout_s, _answer_timeout_s(access))


def _answer_timeout_s(access: Access) -> float:
    return max(LEAST_ANSWER_TIMEOUT_S, (access.lease_ttl_s or 0.0) / KEEP_ALIVES_PER_TTL)


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
