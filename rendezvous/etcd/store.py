"""The store on an etcd cluster (v3 API): no node of the job is special, and none hosts anything.

Everything is one request to etcd: a transaction compares, writes, and reads back what it compared; a read of several
scopes is one transaction, too, so that all of it is of one revision, and linearizable. Keys are stored under
`<prefix>/<job>/` and given out without it.

Requests are answered within a fifth of the lease's time to live or raise StoreUnavailable, so that several
keep-alives fit in while a lease counts as good. `channel` leaves a member in trouble for another.
"""

from __future__ import annotations

import logging
import math
import random
import time
from typing import Any

from ..errors import LeaseExpired, StoreError, StoreRefused, StoreUnavailable
from ..store.interface import (
    Change,
    Compare,
    Delete,
    Entry,
    LeaseId,
    Outcome,
    Put,
    Snapshot,
    Store,
    Watch,
    is_folder,
)
from ..store.retry_connect import retry_connect
from .access import EtcdAccess
from .channel import LEASE_GRANT, LEASE_KEEP_ALIVE, LEASE_REVOKE, TXN, Connection, Method
from .tls import context
from .watch import EtcdWatch

REQUESTS_PER_TTL = 5

log = logging.getLogger(__name__)


class EtcdStore(Store):
    """A job's keys on an etcd cluster. Made by `connect`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages = connection.rpc.messages
        self._root = connection.root
        self._granted_in: int | None = None
        """The life of the store in which it granted this client's newest lease."""

    @classmethod
    def connect(
        cls,
        access: EtcdAccess,
        job: str,
        *,
        lease_ttl_s: float,
        timeout_s: float,
        only_to_read: bool = False,
        rng: random.Random | None = None,
    ) -> EtcdStore:
        """Find a member that lets us read and write the job's keys, or only read them.

        Raises StoreRefused as soon as every address was tried and a person has to change something, and
        StoreUnavailable when `timeout_s` seconds of trying were not enough.
        """
        if access.tls is not None:
            context(access.tls)
        rng = rng or random.Random()
        deadline = time.monotonic() + timeout_s
        connection = Connection(access, access.root(job), lease_ttl_s / REQUESTS_PER_TTL, rng)
        store = cls(connection)
        refusals = 0

        def introduce() -> None:
            nonlocal refusals
            try:
                if only_to_read:
                    store.read(())
                else:
                    store._introduce()
            except StoreRefused as error:
                refusals += 1
                if refusals >= max(1, len(connection.addresses.ring)):
                    raise
                raise StoreUnavailable(str(error)) from error

        try:
            retry_connect(introduce, deadline, rng)
        except StoreRefused:
            store.close()
            raise
        except StoreUnavailable as error:
            store.close()
            raise StoreUnavailable(
                f"no etcd on {access} after {timeout_s:g} s: {error}. Check that it runs and has a leader, that "
                "--rdzv-endpoint names its client addresses, and that no firewall closes the ports"
            ) from error
        except StoreError:
            store.close()
            raise
        return store

    def _introduce(self) -> None:
        """A transaction that may do everything we ever do, under a comparison that never holds."""
        messages, key = self._messages, self._key("")
        never = messages.Compare(
            key=key, target=messages.Compare.MOD, result=messages.Compare.LESS, mod_revision=0
        )
        put = messages.RequestOp(request_put=messages.PutRequest(key=key))
        look = self._range(key, count_only=True)
        request = messages.TxnRequest(compare=[never], success=[put], failure=[look])
        self._connection.call(TXN, request, repeatable=True)

    def grant(self, ttl_s: float) -> LeaseId:
        """etcd counts in whole seconds and has a least time to live: the lease lives `ttl_s` or longer."""
        request = self._messages.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        life = self._connection.history.seen.life
        lease = int(self._connection.call(LEASE_GRANT, request).ID)
        self._granted_in = life
        return lease

    def keep_alive(self, lease: LeaseId) -> None:
        request = self._messages.LeaseKeepAliveRequest(ID=lease)
        if self._call(LEASE_KEEP_ALIVE, request, hedged=True).TTL <= 0:
            raise LeaseExpired(f"lease {lease:x} is unknown to etcd: it expired, or was revoked")

    def revoke(self, lease: LeaseId) -> None:
        try:
            self._connection.call(LEASE_REVOKE, self._messages.LeaseRevokeRequest(ID=lease))
        except LeaseExpired:
            pass

    def transact(self, compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> Outcome:
        messages = self._messages
        looks = [self._range(self._key(compare.key)) for compare in compares]
        request = messages.TxnRequest(
            compare=[
                messages.Compare(
                    key=self._key(compare.key),
                    target=messages.Compare.MOD,
                    result=messages.Compare.EQUAL,
                    mod_revision=compare.mod_revision,
                )
                for compare in compares
            ],
            success=[*(self._write(write) for write in writes), *looks],
            failure=looks,
        )
        answer = self._call(TXN, request)
        found = answer.responses[len(answer.responses) - len(compares) :]
        entries = (self._entries(response) for response in found)
        return Outcome(
            answer.succeeded, answer.header.revision, tuple(entry[0] if entry else None for entry in entries)
        )

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        looks = [self._range(*self._bounds(scope)) for scope in scopes]
        if oldest_under is not None:
            order = self._messages.RangeRequest
            how = {"sort_target": order.CREATE, "sort_order": order.ASCEND, "limit": 1}
            looks.append(self._range(*self._bounds(oldest_under), **how))
        # Without anything to read etcd would answer from what a member happens to know.
        looks = looks or [self._range(self._key(""), count_only=True)]
        answer = self._call(TXN, self._messages.TxnRequest(success=looks), repeatable=True)
        entries = {entry.key: entry for response in answer.responses for entry in self._entries(response)}
        return Snapshot(answer.header.revision, tuple(entries[key] for key in sorted(entries)))

    def watch(self, scopes: tuple[str, ...], after_revision: int) -> Watch:
        ranges = tuple(map(self._bounds, scopes))
        return EtcdWatch(self._connection, ranges, after_revision, self._change)

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: Method, request: Any, **how: bool) -> Any:
        """Raises LeaseExpired before and after: nothing of a lease of the store before counts in this one."""
        self._check_lease()
        answer = self._connection.call(method, request, **how)
        self._check_lease()
        return answer

    def _check_lease(self) -> None:
        if self._granted_in not in (None, self._connection.history.seen.life):
            raise LeaseExpired("etcd has gone back to an older state since it granted this lease")

    def _key(self, key: str) -> bytes:
        return (self._root + key).encode()

    def _bounds(self, scope: str) -> tuple[bytes, bytes]:
        """The first key, and the first one behind the last, as etcd wants them: nothing behind a single key."""
        first = self._key(scope)
        return first, first[:-1] + b"0" if is_folder(scope) else b""  # "0" follows "/"

    def _range(self, key: bytes, end: bytes = b"", **how: Any) -> Any:
        messages = self._messages
        return messages.RequestOp(request_range=messages.RangeRequest(key=key, range_end=end, **how))

    def _write(self, write: Put | Delete) -> Any:
        messages, key = self._messages, self._key(write.key)
        if isinstance(write, Delete):
            return messages.RequestOp(request_delete_range=messages.DeleteRangeRequest(key=key))
        put = messages.PutRequest(key=key, value=write.value.encode(), lease=write.lease or 0)
        return messages.RequestOp(request_put=put)

    def _entries(self, response: Any) -> list[Entry]:
        return [self._entry(pair) for pair in response.response_range.kvs]

    def _entry(self, pair: Any) -> Entry:
        self._connection.history.saw_entry(pair.key, pair.mod_revision)
        value = pair.value.decode(errors="replace")  # its reader names the key when it makes no sense
        return Entry(self._relative(pair), value, pair.create_revision, pair.mod_revision)

    def _change(self, event: Any) -> Change:
        pair = event.kv
        entry = self._entry(pair) if event.type == event.PUT else None
        return Change(pair.mod_revision, self._relative(pair), entry)

    def _relative(self, pair: Any) -> str:
        return str(pair.key.decode(errors="replace").removeprefix(self._root))
