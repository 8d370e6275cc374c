"""etcd as a kind of store."""

from __future__ import annotations

from ..store.interface import Store
from ..store.store_kind import Access, StoreKind
from .access import PREFIX, EtcdAccess

PORT = 2379


def _connect(access: Access) -> Store:
    from .store import REQUESTS_PER_TTL, EtcdStore

    members = tuple((endpoint.address, endpoint.port) for endpoint in access.endpoints)
    looks = access.lease_ttl_s is None
    return EtcdStore.connect(
        EtcdAccess(members, access.prefix, access.tls, access.login),
        access.job,
        # Of one that looks a request may take a third of all the time there is.
        lease_ttl_s=access.lease_ttl_s or access.timeout_s * REQUESTS_PER_TTL / 3,
        timeout_s=access.timeout_s,
        only_to_read=looks,
    )


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
