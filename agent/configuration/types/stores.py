"""The kinds of stores in which the nodes of a job can meet. A new kind is a folder in `rendezvous`, and a name here."""

from __future__ import annotations

from collections.abc import Iterable

from ....rendezvous.c10d.kind import C10D
from ....rendezvous.etcd.kind import ETCD
from ....rendezvous.local.kind import LOCAL
from ....rendezvous.store.memory import MEMORY

STORES = {kind.name: kind for kind in (C10D, ETCD, LOCAL, MEMORY)}

ALONE = MEMORY
"""Of a node that no other one can join, where none is chosen."""

DEFAULT = C10D
"""Else."""

SHARED = tuple(kind for kind in STORES.values() if kind.port is not None)
"""Nodes of several machines can meet there."""

CLUSTERS = tuple(kind for kind in STORES.values() if kind.cluster)


def in_words(kinds: Iterable[object]) -> str:
    """
    >>> in_words(["c10d", "etcd", "memory"])
    'c10d, etcd or memory'
    """
    *others, last = map(str, kinds)
    return f"{', '.join(others)} or {last}" if others else last
