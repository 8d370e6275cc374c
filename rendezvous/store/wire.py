"""What a client and the host of its store send each other: JSON only, checked as it comes in, never code.

A *call* is what a client asks, some of them a node's `requests` as they are, a *result* what comes back. Both travel
as the codec writes them. With a call travels its `Caller`, which names the client, its *link* (this client's first
connection, its second, ...) and the call's id on that link; with the result travels that id again, so that a late
answer is never taken for the answer to something else. What reaches the host can send anything: what does not decode
raises Invalid and goes no further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from ...codec import Codec, Count, Invalid, Text, from_plain, load_object, plain, shown
from ..errors import Compacted, LeaseExpired, StoreClosed, StoreError, StoreUnavailable
from .interface import Change, Compare, Delete, Grant, LeaseId, Outcome, Put, Read, Revision, Snapshot, Store

SCHEMA = 3
_PROGRAM = "elastic-agent"
REQUEST_LIMIT_BYTES = 2 * 1024 * 1024
"""A record (at most `records.MAX_RECORD_BYTES`) that has been escaped once more fits well."""

PENDING_S = 30.0
"""A `LongPoll` without a change is answered after this long, and so renewed by clients that still live."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Revoke:
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Transact:
    compares: tuple[Compare, ...]
    writes: tuple[Put | Delete, ...]


@dataclass(frozen=True, slots=True)
class LongPoll:
    """Answered with `Changes` once a key in `scopes` changes after that revision, or after a while without."""

    scopes: tuple[str, ...]
    after_revision: Revision


@dataclass(frozen=True, slots=True)
class Granted:
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Changes:
    """Every change up to `revision` in the scopes of the poll: the next one goes on from there."""

    revision: Revision
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    error: Annotated[str, Text(64)]
    """"LeaseExpired", "Compacted", "StoreUnavailable" or "StoreError"."""
    text: str


Call: TypeAlias = Grant | KeepAlive | Revoke | Transact | Read | LongPoll
Result: TypeAlias = Granted | Done | Outcome | Snapshot | Changes | Refused


@dataclass(frozen=True, slots=True)
class Caller:
    """Who waits for the answer, and to which of its calls."""

    client: Annotated[str, Text(32, re.compile(r"[0-9a-f]{32}"))]
    link: Count
    id: Count


@dataclass(frozen=True, slots=True)
class Request:
    caller: Caller
    call: Call


@dataclass(frozen=True, slots=True)
class Reply:
    id: int
    result: Result


@dataclass(frozen=True, slots=True)
class _Meta:
    """What a host publishes first of all. Every version has the first two fields."""

    program: str
    schema: Count
    job: str
    host: str


_CALLS: Codec[Call] = Codec((Grant, KeepAlive, Revoke, Transact, Read, LongPoll), SCHEMA, REQUEST_LIMIT_BYTES)
_RESULTS: Codec[Result] = Codec((Granted, Done, Outcome, Snapshot, Changes, Refused), SCHEMA, 2**31)


_REFUSALS: Mapping[str, type[StoreError]] = {
    kind.__name__: kind for kind in (LeaseExpired, Compacted, StoreUnavailable)
}


def carry_out(store: Store, call: Call) -> Result:
    """Do what a client asks. Raises StoreClosed."""
    try:
        match call:
            case Grant(ttl_s):
                return Granted(store.grant(ttl_s))
            case KeepAlive(lease):
                store.keep_alive(lease)
                return Done()
            case Revoke(lease):
                store.revoke(lease)
                return Done()
            case Transact(compares, writes):
                return store.transact(compares, writes)
            case Read(scopes, oldest_under):
                return store.read(scopes, oldest_under)
            case LongPoll(scopes, after_revision):
                changes = store.watch(scopes, after_revision).next(0.0)
                return Changes(changes[-1].revision if changes else after_revision, changes)
    except StoreClosed:
        raise
    except StoreError as error:
        return refusal(error)


def refusal(error: StoreError) -> Refused:
    return Refused(type(error).__name__, str(error))


def refused(refusal: Refused) -> StoreError:
    """The error that the client's caller gets."""
    return _REFUSALS.get(refusal.error, StoreError)(refusal.text)


def encode_request(request: Request) -> bytes:
    return _dump({**plain(request.caller), **_CALLS.pack(request.call)})


def decode_request(raw: bytes) -> Request:
    """Raises Invalid."""
    body = _CALLS.load(raw)
    caller = from_plain(Caller, {name: body.pop(name, None) for name in ("client", "link", "id")})
    return Request(caller, _CALLS.unpack(body))


def encode_reply(reply: Reply) -> bytes:
    return _dump({"id": reply.id, **_RESULTS.pack(reply.result)})


def decode_reply(raw: bytes) -> Reply:
    """Raises Invalid."""
    body = _RESULTS.load(raw)
    call = body.pop("id", None)
    if type(call) is not int:
        raise Invalid("reply without the id of a call")
    return Reply(call, _RESULTS.unpack(body))


def encode_meta(job: str, host: str) -> bytes:
    """What a host publishes about itself; `host` is new in every life of a host."""
    return _dump(plain(_Meta(_PROGRAM, SCHEMA, job, host)))


def check_of(job: str) -> str:
    """The job that checks the nodes of this one. Where it hosts the store, the store ends with the check, so the agents
    of the job wait for its end."""
    return f"{job[:120]}.check"


class CheckGoesOn(Invalid):
    """A check hosts the store, and is about to end."""


def decode_meta(raw: bytes, job: str) -> str:
    """The host's name for this life. Raises Invalid, with what was found, when it is not ours to join, and CheckGoesOn
    when it is not yet."""
    if len(raw) > REQUEST_LIMIT_BYTES:
        raise Invalid(f"{len(raw)} bytes that elastic-agent did not write")
    body = load_object(raw, "introduction")
    program, schema = body.get("program"), body.get("schema")
    if program != _PROGRAM:
        raise Invalid(f"program {shown(program)}, expected {_PROGRAM!r}")
    if type(schema) is not int or schema != SCHEMA:
        raise Invalid(f"schema {shown(schema)}, this version of elastic-agent speaks schema {SCHEMA}")
    meta = from_plain(_Meta, body)
    if meta.job == check_of(job):
        raise CheckGoesOn("the store of a check")
    if meta.job != job:
        raise Invalid(f"job {meta.job!r}, expected {job!r}")
    return meta.host


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
