"""The store on an etcd cluster."""

from __future__ import annotations

from ..store.interface import Store
from ..store.store_kind import Access, StoreKind

PORT = 2379
PREFIX = "/elastic-agent"


def _connect(access: Access) -> Store:
    from .store import EtcdStore

    return EtcdStore.connect(access)


def _load() -> object:
    from . import store

    return store


ETCD = StoreKind(
    "etcd",
    "an etcd 3 cluster, no node is special",
    _connect,
    _load,
    port=PORT,
    cluster=True,
    place=f"any members of the cluster, port {PORT} if none is given; the URL form stands for --rdzv-backend etcd, its"
    f" PREFIX begins the job's keys, PREFIX/JOB/... (default: {PREFIX})",
    aliases=("etcd-v3",),  # our name among torchrun's backends, where "etcd" is the old interface
)
