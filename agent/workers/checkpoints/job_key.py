"""The key by which the memory servers of one job know each other: in the job's store, made by the first agent."""

from __future__ import annotations

import secrets

from ....rendezvous.store.interface import Compare, Put, Store
from ....worker.storage.replication.key_file import KEY_BYTES

KEY = "memory-key"
"""In the store, beside the job's other keys: 64 hexadecimal digits."""


class NoKey(Exception):
    """What the store holds is no key; the text does not show it."""


def key_of_job(store: Store, own: bytes | None = None) -> bytes:
    """Puts `own`, or a new one, where there is none: of agents that come at the same time one is first.

    Raises StoreError, NoKey.
    """
    entries = store.read((KEY,)).entries
    if not entries:
        made = own or secrets.token_bytes(KEY_BYTES)
        outcome = store.transact((Compare(KEY, 0),), (Put(KEY, made.hex()),))
        if outcome.succeeded:
            return made
        entries = tuple(entry for entry in outcome.entries if entry is not None)
    try:
        key = bytes.fromhex(entries[0].value)
    except (IndexError, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise NoKey(f"what the store holds under {KEY!r} is no key of this version: delete it")
    return key
