"""Calls to an etcd cluster: one member at a time, over to the next one at the first failure.

All threads share one *channel*, to one address. When a call on it runs into its deadline, or the member is
not there or has no leader, the channel is replaced: the first thread that saw the failure makes the next one and closes
the old one, which ends what the others still had under way on it. We do this ourselves because gRPC notices a member
that hangs only after seconds, and verifies all members of a list by one name.

A call has one deadline for everything it does. What cannot do harm twice (reads, keep-alives) is tried at each
member once within the first half of it; a write whose answer got lost is not, because it may have been done.

While a leader is dead or frozen, the other members may hold a keep-alive back for seconds: etcd waits in steps of an
election timeout, and for the dead one's answer. Asked again after the election they answer at once. So a keep-alive
goes from member to member, while its lease can still be saved.

Every answer says how far the cluster has come. One that goes back was restored from a snapshot: it is another store,
and what we hold of the first one, a lease or a place in a watch, means nothing in it (`History`). Other clients may
have written more since than was lost. So after a failure we ask once whether our newest entry is part of its history.

With a login, each call carries a token. A call that is refused for its token was not done: it is repeated
once with a new token, which the first thread gets for all.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import LeaseExpired, StoreClosed, StoreError, StoreRefused, StoreUnavailable
from ..store.store_kind import KEEP_ALIVES_PER_TTL, Access
from .access import Address, Addresses, credentials, following, handshake_problem, load, root_of

CHANNEL_LIFE_S = 0.25
"""Once every address has failed in turn, a channel is not replaced before this age: gRPC tries it again by itself."""

FIRST_SHARE = 0.5
"""Of a request's time: what a hedged call gives to a member that has answered so far, and may only be busy."""
NEXT_SHARE = 0.25
"""What it gives to each one after that."""
HEDGE_FOR = 3.0
"""Times of a request since the last answer; then nothing is left to save, and a far member needs all its time."""

REFUSED_PAUSE_S = 1.0
"""A password that was refused is not sent again before this has passed: checking one costs etcd a tenth of a second."""

MESSAGE_LIMIT_BYTES = 64 * 2**20
"""Beyond etcd's own limit for a value by far, so that any value reaches the code that can name its key."""

CHANNEL_OPTIONS = {
    "grpc.use_local_subchannel_pool": 1,  # else a new channel to the same address gets the old connection
    "grpc.enable_http_proxy": 0,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 1000,
    "grpc.max_reconnect_backoff_ms": 1000,
    # For a watch while nothing is called: etcd hangs up on those who ping more often than every 5 s.
    "grpc.keepalive_time_ms": 5500,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 1500,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_receive_message_length": MESSAGE_LIMIT_BYTES,
}

_UNREACHED = re.compile(r"failed to connect to all addresses; last error: \w+: \S+: (?:.*: )?(.+)")
"""gRPC's text for a call that was never sent."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    answer: str


TXN = Method("/etcdserverpb.KV/Txn", "TxnResponse")
LEASE_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", "LeaseGrantResponse")
LEASE_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", "LeaseRevokeResponse")
LEASE_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", "LeaseKeepAliveResponse")
"""A stream of requests in etcd's words; a stream of one is the same on the wire as a plain call."""
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", "AuthenticateResponse")
WATCH = Method("/etcdserverpb.Watch/Watch", "WatchResponse")


class Verdict(enum.Enum):
    """What an error means for the one who called."""

    FAILOVER = "another member may do better"
    STAY = "etcd itself is in difficulties"
    TOKEN = "get a new token"
    REFUSED = "we may not, or not like this"
    LEASE_GONE = "the lease is unknown"
    INVALID = "never, for any caller"


def classify(code: str, detail: str) -> Verdict:
    """From the name of gRPC's status code and the text that came with it."""
    if "requested lease not found" in detail:
        return Verdict.LEASE_GONE
    old_token = ("invalid auth token", "revision of auth store is old", "user name is empty")
    if code == "UNAUTHENTICATED" or any(text in detail for text in old_token):
        return Verdict.TOKEN
    if code in ("PERMISSION_DENIED", "UNIMPLEMENTED") or "authentication failed" in detail:
        return Verdict.REFUSED
    if code == "RESOURCE_EXHAUSTED":
        return Verdict.STAY
    if code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "NOT_FOUND", "ALREADY_EXISTS"):
        return Verdict.INVALID
    return Verdict.FAILOVER


class _TokenRefused(StoreRefused):
    """Its text is for a caller that has no other token to try."""


class Channel:
    """A gRPC channel to one address. A new one after each failure: it is never repaired."""

    def __init__(self, address: Address, grpc_channel: Any, messages: Any) -> None:
        self.address = address
        self.made_at = time.monotonic()
        self._grpc_channel = grpc_channel
        self._messages = messages

    def call(self, method: Method, request: Any, timeout_s: float, metadata: tuple[Any, ...]) -> Any:
        return self._grpc_channel.unary_unary(method.path, *self._coders(method))(
            request, timeout=timeout_s, metadata=metadata
        )

    def stream(self, method: Method, requests: Iterable[Any], metadata: tuple[Any, ...]) -> Any:
        return self._grpc_channel.stream_stream(method.path, *self._coders(method))(
            iter(requests), metadata=metadata
        )

    def close(self) -> None:
        self._grpc_channel.close()

    def _coders(self, method: Method) -> tuple[Any, Any]:
        return (lambda request: request.SerializeToString()), getattr(
            self._messages, method.answer
        ).FromString


@dataclass(frozen=True, slots=True)
class Seen:
    life: int = 0
    """How often the store has become another one under us."""
    cluster: int = 0
    revision: int = 0
    """The highest one of this life."""
    newest: tuple[bytes, int] = (b"", 0)
    """Of all entries seen in this life, the one with the highest mod_revision: its key, and that."""


class History:
    """How far the store has come, from the headers of its answers; for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seen = Seen()

    def saw(self, header: Any, asked: Seen) -> None:
        """In an answer for which a majority stands; `asked` is what had been seen when the question was sent."""
        with self._lock:
            seen = self.seen
            if asked.life != seen.life:
                return
            if seen.cluster in (0, header.cluster_id) and header.revision >= asked.revision:
                highest = max(seen.revision, header.revision)
                self.seen = replace(seen, cluster=header.cluster_id, revision=highest)
                return
        self.went_back(header, asked, asked.revision)

    def saw_entry(self, key: bytes, mod_revision: int) -> None:
        with self._lock:
            if mod_revision > self.seen.newest[1]:
                self.seen = replace(self.seen, newest=(key, mod_revision))

    def went_back(self, header: Any, asked: Seen, lost: int) -> None:
        """An answer proves that a revision, `lost`, of what had been seen is not part of the store any more."""
        with self._lock:
            seen = self.seen
            if asked.life != seen.life:
                return
            self.seen = Seen(seen.life + 1, header.cluster_id, header.revision)
        log.warning(
            "etcd has gone back to an older state: its data were restored. Revision %d of cluster %x is lost, it is at"
            " %d of %x. This process gives up its lease there and begins anew; nothing is to be done. If etcd was not"
            " restored: check that --rdzv-endpoint names members of one cluster only",
            *(lost, seen.cluster, header.revision, header.cluster_id),
        )


class Connection:
    """The channel in use, and what replaces it; for all threads."""

    def __init__(self, access: Access, rng: random.Random) -> None:
        # Of one that only looks a request may take a third of all the time there is.
        of_ttl_s = access.timeout_s * KEEP_ALIVES_PER_TTL / 3
        self.request_timeout_s = (access.lease_ttl_s or of_ttl_s) / KEEP_ALIVES_PER_TTL
        self.addresses = Addresses([(one.address, one.port) for one in access.endpoints])
        self.root = root_of(access)
        """Where we may read."""
        self._access = access
        self._rng = rng
        self.rpc = load()
        self.history = History()
        self._session = Session()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._failures = 0
        """Channels replaced since the last answer."""
        self._answered_at = -math.inf
        self._in_doubt = False
        """There was a failure after the last `_look_back`: the store may have been restored since."""
        self._closed = False

    def call(self, method: Method, request: Any, *, repeatable: bool = False, hedged: bool = False) -> Any:
        """Raises StoreUnavailable, StoreRefused, StoreClosed, LeaseExpired, and StoreError for a call that is wrong.

        `hedged` is for what is repeatable, small, and must not wait for one member alone.
        """
        deadline = time.monotonic() + self.request_timeout_s
        tokens = 0
        while True:
            channel = self.channel(deadline)
            try:
                return self._call_once(channel, method, request, deadline, hedged)
            except _TokenRefused:
                tokens += 1
                if self._access.login is None or tokens > 1:
                    raise
            except StoreRefused:
                raise
            except StoreUnavailable:
                gone_over = channel is not self._channel
                # With less time than this, a deadline would prove nothing about the next member.
                in_time = time.monotonic() + self.request_timeout_s / 2 < deadline
                if not ((repeatable or hedged) and gone_over and in_time):
                    raise

    def _call_once(
        self, channel: Channel, method: Method, request: Any, deadline: float, hedged: bool
    ) -> Any:
        token = self._token(channel, deadline)
        timeout_s = min(_left(deadline), self._hedge_timeout_s() if hedged else math.inf)
        asked = self.history.seen
        try:
            answer = channel.call(method, request, timeout_s, _metadata(token))
        except (self.rpc.grpc.RpcError, ValueError) as error:
            raise self.problem(channel, error, token) from error
        self._answered_at, self._failures = time.monotonic(), 0
        if method is LEASE_KEEP_ALIVE:
            self.look(answer.header)
        else:
            self.history.saw(answer.header, asked)
        return answer

    def look(self, header: Any) -> None:
        """A member has answered with this by itself. If less than was seen, it is behind, or all are: ask them."""
        seen = self.history.seen
        if header.cluster_id == seen.cluster and header.revision >= seen.revision:
            self.history.saw(header, seen)
            if self._in_doubt:
                self._look_back()
            return
        messages = self.rpc.messages
        key = messages.RangeRequest(key=self.root.encode(), count_only=True)
        with contextlib.suppress(StoreUnavailable):  # the next answer raises the same doubt
            self.call(TXN, messages.TxnRequest(success=[messages.RequestOp(request_range=key)]))

    def _look_back(self) -> None:
        """Ask whether the newest entry that was seen is in the store's history; it may have changed since."""
        self._in_doubt, seen = False, self.history.seen
        key, revision = seen.newest
        if not revision:
            return
        messages = self.rpc.messages
        mod, equal = messages.Compare.MOD, messages.Compare.EQUAL
        unchanged = messages.Compare(key=key, target=mod, result=equal, mod_revision=revision)
        then = messages.RangeRequest(key=key, revision=revision, keys_only=True)
        request = messages.TxnRequest(compare=[unchanged], failure=[messages.RequestOp(request_range=then)])
        try:
            answer = self.call(TXN, request, repeatable=True)
        except StoreUnavailable:
            self._in_doubt = True
        except StoreError:
            # The revision is compacted, which proves nothing, or one to come, which the next answer's header shows.
            pass
        else:
            pairs = (pair for found in answer.responses for pair in found.response_range.kvs)
            if not answer.succeeded and all(pair.mod_revision != revision for pair in pairs):
                self.history.went_back(answer.header, seen, revision)

    def _hedge_timeout_s(self) -> float:
        """Of a hedged call, with the member in use."""
        if self._failures == 0:
            return FIRST_SHARE * self.request_timeout_s
        hopeful = time.monotonic() < self._answered_at + HEDGE_FOR * self.request_timeout_s
        return (NEXT_SHARE if hopeful else 1.0) * self.request_timeout_s

    def stream(self, method: Method, requests: Iterable[Any]) -> tuple[Channel, Any, str | None]:
        """A call with answers without end; the reader passes its end to `problem`, with channel and token."""
        deadline = time.monotonic() + self.request_timeout_s
        channel = self.channel(deadline)
        token = self._token(channel, deadline)
        try:
            return channel, channel.stream(method, requests, _metadata(token)), token
        except ValueError as error:
            raise self.problem(channel, error, token) from error
        except (
            RuntimeError
        ) as error:  # gRPC could start no thread, and no stream of this channel has one from now on
            raise self.fail_over(channel, f"a watch of etcd cannot be started now: {error}") from error

    def _token(self, channel: Channel, deadline: float) -> str | None:
        if self._access.login is None:
            return None
        return self._session.token(lambda: self._authenticate(channel, deadline), deadline)

    def _authenticate(self, channel: Channel, deadline: float) -> str:
        login = self._access.login
        assert login is not None
        try:
            request = self.rpc.messages.AuthenticateRequest(name=login.user, password=login.password())
        except OSError as error:
            raise StoreRefused(f"cannot read the password of etcd's user {login.user!r}: {error}") from error
        try:
            return str(channel.call(AUTHENTICATE, request, _left(deadline), _metadata(None)).token)
        except (self.rpc.grpc.RpcError, ValueError) as error:
            if "authentication is not enabled" in str(error):
                return ""
            raise self.problem(channel, error, None) from error

    def channel(self, deadline: float) -> Channel:
        """The one in use. Raises StoreUnavailable while no address is known, StoreClosed after `close`."""
        channel = self._first_channel()
        if channel is None:
            self.addresses.refresh(_left(deadline))
            channel = self._first_channel()
        if channel is None:
            raise StoreUnavailable(
                f"no address of etcd is known: {self.addresses.problem or 'the name server does not answer'}"
            )
        return channel

    def _first_channel(self) -> Channel | None:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            ring = self.addresses.ring
            if self._channel is None and ring:
                # Anywhere, so that the nodes of a job are spread over the members.
                self._channel = self._made(self._rng.choice(ring))
            return self._channel

    def _made(self, address: Address) -> Channel:
        options = dict[str, int | str](CHANNEL_OPTIONS)
        if self._access.tls is None:
            grpc_channel = self.rpc.grpc.insecure_channel(address.target, list(options.items()))
        else:
            options["grpc.ssl_target_name_override"] = address.host
            secret = credentials(self.rpc, self._access.tls)
            grpc_channel = self.rpc.grpc.secure_channel(address.target, secret, list(options.items()))
        return Channel(address, grpc_channel, self.rpc.messages)

    def problem(self, channel: Channel, error: Exception, token: str | None) -> StoreError:
        """What to raise; and do what has to be done about it."""
        if self._closed:
            return self._closed_error()
        if isinstance(error, ValueError):
            if channel is self._channel:
                raise error
            return StoreUnavailable(
                f"another call found that etcd on {channel.address} does not answer; moved on"
            )
        code, detail = error.code().name, error.details() or ""  # type: ignore[attr-defined]
        text = f"etcd on {channel.address}: {detail or code} ({code})"
        verdict = classify(code, detail)
        if unreached := _UNREACHED.search(detail):
            text = f"etcd on {channel.address} cannot be reached ({unreached[1]})"
            return self.fail_over(channel, text, may_be_tls=True)
        if verdict is Verdict.LEASE_GONE:
            return LeaseExpired(text)
        if verdict is Verdict.INVALID:
            return StoreError(f"{text}; nothing was done")
        if verdict is Verdict.TOKEN:
            self._session.forget(token)
            return _TokenRefused(
                f"{text}: it wants a user and a password, or a certificate with a user's name"
            )
        if verdict is Verdict.REFUSED:
            return StoreRefused(f"{text}; {self._repair(detail)}")
        if verdict is Verdict.FAILOVER:
            text = f"{text}; what was asked may have been done: read before asking again"
            return self.fail_over(channel, text, may_be_tls=code == "UNAVAILABLE")
        if "database space exceeded" in detail:
            return StoreUnavailable(f"{text}; it takes no writes until etcdctl compact, defrag, alarm disarm")
        return StoreUnavailable(f"{text}; what was asked may have been done: read before asking again")

    def watch_refused(self, channel: Channel, reason: str, token: str | None) -> StoreRefused:
        """etcd calls it a missing permission, too, when it no longer knows the token."""
        self._session.forget(token)
        return StoreRefused(f"etcd on {channel.address} refuses a watch: {reason}; {self._repair(reason)}")

    def _repair(self, detail: str) -> str:
        if "permission denied" in detail:
            return "grant this user a role that may read and write everything that starts with our prefix"
        if "authentication failed" in detail:
            return "check the user and the password"
        return "is this etcd 3.4 or newer?"

    def fail_over(self, channel: Channel, text: str, *, may_be_tls: bool = False) -> StoreUnavailable:
        """Replace this channel, if no other thread has done so yet. Returns what to raise."""
        with self._lock:
            ring = self.addresses.ring
            young = time.monotonic() < channel.made_at + CHANNEL_LIFE_S
            if self._closed or self._channel is not channel or (young and self._failures >= len(ring)):
                replaced = False
            else:
                replaced, self._failures, self._in_doubt = True, self._failures + 1, True
                self._channel = self._made(following(channel.address, ring))
        if replaced:
            channel.close()
            self.addresses.refresh()
        if replaced and may_be_tls and self._answered_at == -math.inf:
            problem = handshake_problem(channel.address, self._access.tls, self.request_timeout_s)
            if problem is not None:
                return StoreRefused(f"etcd on {channel.address} cannot be talked to: {problem}")
        return StoreUnavailable(text)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"the etcd store on {self._access.where} was closed on this side")


class Session:
    """One token for all threads."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._token: str | None = None
        self._refused = ""
        self._ask_again_at = 0.0

    def token(self, authenticate: Callable[[], str], deadline: float) -> str:
        """The one in use, or else what `authenticate` returns: empty where etcd has no users."""
        if not self._asking.acquire(timeout=_left(deadline)):
            raise StoreUnavailable("etcd takes too long to check our password")
        try:
            if self._token is None:
                if time.monotonic() < self._ask_again_at:
                    raise StoreRefused(self._refused)
                try:
                    self._token = authenticate()
                except StoreRefused as error:
                    self._refused, self._ask_again_at = str(error), time.monotonic() + REFUSED_PAUSE_S
                    raise
            return self._token
        finally:
            self._asking.release()

    def forget(self, token: str | None) -> None:
        """It was refused: the next call gets a new one, unless another thread has it already."""
        if self._token == token:
            self._token = None


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0.0:
        raise StoreUnavailable("no time was left for the call; nothing was asked")
    return left_s


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    # With `hasleader`, etcd reports at once that it has no leader, and ends watches that would stay silent.
    leader = (("hasleader", "true"),)
    return (*leader, ("token", token)) if token else leader
