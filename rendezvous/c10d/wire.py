"""What a c10d client and its host say to each other: JSON only, validated at the door, never code.

A *call* is what a client asks, a *result* what comes back. Both are frozen records that travel as JSON arrays, the
record's name first: `["read", ["nodes/"], null]` is answered by `["snapshot", 7, []]`. `_RECORDS` below is the whole
vocabulary with the check of every field; encoding and decoding use the same table, so they cannot drift apart.

A call travels in a `Request`, whose `Caller` names the client, its *link* (this client's first connection, its second,
...) and the call's id on that link; the `Reply` repeats the id, so that a late answer is never taken for the answer to
something else. Whoever can reach the port can push anything: what does not decode raises `WireInvalid` and goes no
further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from ..store.interface import Change, Compare, Delete, Entry, LeaseId, Outcome, Put, Snapshot

SCHEMA = 2
PROGRAM = "elastic-agent"
META_KEY = "elastic-agent/meta"
REQUEST_QUEUE = "elastic-agent/requests"
REQUEST_LIMIT_BYTES = 2 * 1024 * 1024
"""A record (at most `records.MAX_RECORD_BYTES`) that has been escaped once more fits well."""
REPLY_LIMIT_BYTES = 7 * 1024 * 1024
"""TCPStore itself cuts the connection above 8 MiB."""

PARKED_S = 30.0
"""An `Await` without a change is answered after this long, and so renewed by clients that still live."""

_CLIENT_NAME = re.compile(r"[0-9a-f]{32}")
_LARGEST_INTEGER = 2**53
_LONGEST_TTL_S = 86400.0


class WireInvalid(Exception):
    """A message that is not one of ours. `caller` is known when only the call inside was unusable."""

    def __init__(self, problem: str, caller: Caller | None = None) -> None:
        super().__init__(problem)
        self.caller = caller


@dataclass(frozen=True, slots=True)
class Grant:
    ttl_s: float


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
class Read:
    scopes: tuple[str, ...]
    oldest_under: str | None = None


@dataclass(frozen=True, slots=True)
class Await:
    """Answered with `Noticed` once a key in `scopes` changes after that revision, or after a while without."""

    scopes: tuple[str, ...]
    after_revision: int


@dataclass(frozen=True, slots=True)
class Granted:
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Noticed:
    """Every change up to `revision` that the awaiting side asked for: it goes on from there."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """`kind` is one of "LeaseExpired", "Compacted" and "StoreError"."""

    kind: str
    text: str


Call: TypeAlias = Grant | KeepAlive | Revoke | Transact | Read | Await
Result: TypeAlias = Granted | Done | Outcome | Snapshot | Noticed | Refused


@dataclass(frozen=True, slots=True)
class Caller:
    """Who waits for the answer, and to which of its calls."""

    client: str
    link: int
    id: int


@dataclass(frozen=True, slots=True)
class Request:
    caller: Caller
    call: Call


@dataclass(frozen=True, slots=True)
class Reply:
    id: int
    result: Result


def reply_queue(client: str, link: int) -> str:
    return f"elastic-agent/replies/{client}/{link}"


def encode_request(request: Request) -> bytes:
    return _dump({"schema": SCHEMA, **asdict(request.caller), "call": _pack(request.call)})


def decode_request(raw: bytes) -> Request:
    if len(raw) > REQUEST_LIMIT_BYTES:
        raise WireInvalid(f"request of {len(raw)} bytes, at most {REQUEST_LIMIT_BYTES} are taken")
    message = _load(raw)
    client = _text(message.get("client"))
    if not _CLIENT_NAME.fullmatch(client):
        raise WireInvalid(f"not a client's name: {client[:40]!r}")
    caller = Caller(client, _integer(message.get("link")), _integer(message.get("id")))
    try:
        _check_schema(message)
        return Request(caller, _CALL(message.get("call")))
    except WireInvalid as error:
        raise WireInvalid(str(error), caller) from error


def encode_reply(reply: Reply) -> bytes:
    return _dump({"schema": SCHEMA, "id": reply.id, "result": _pack(reply.result)})


def decode_reply(raw: bytes) -> Reply:
    message = _load(raw)
    _check_schema(message)
    return Reply(_integer(message.get("id")), _RESULT(message.get("result")))


def encode_meta(job: str, host: str) -> bytes:
    """What a host says about itself; `host` is new in every life of a host."""
    return _dump({"schema": SCHEMA, "program": PROGRAM, "job": job, "host": host})


def decode_meta(raw: bytes, job: str) -> str:
    """The host's name for this life. Raises WireInvalid, saying what was found, when it is not ours to join."""
    if len(raw) > REQUEST_LIMIT_BYTES:
        raise WireInvalid(f"{META_KEY!r} holds {len(raw)} bytes that elastic-agent did not write")
    message = _load(raw)
    if message.get("program") != PROGRAM:
        raise WireInvalid(f"program {message.get('program')!r}, expected {PROGRAM!r}")
    _check_schema(message)
    if message.get("job") != job:
        raise WireInvalid(f"job {message.get('job')!r}, expected {job!r}")
    return _text(message.get("host"))


def _check_schema(message: dict[str, Any]) -> None:
    if _integer(message.get("schema")) != SCHEMA:
        raise WireInvalid(f"schema {message['schema']}, this version of elastic-agent speaks schema {SCHEMA}")


def _dump(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")


def _load(raw: bytes) -> dict[str, Any]:
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireInvalid(f"not JSON ({type(error).__name__}): {raw[:40]!r}") from error
    if not isinstance(message, dict):
        raise WireInvalid(f"not a JSON object: {raw[:40]!r}")
    return message


Check: TypeAlias = Callable[[object], Any]


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise WireInvalid(f"expected text, got {type(raw).__name__}")
    return raw


def _integer(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw <= _LARGEST_INTEGER:
        raise WireInvalid(f"expected an integer from 0 to 2**53, got {str(raw)[:40]}")
    return raw


def _truth(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise WireInvalid(f"expected true or false, got {type(raw).__name__}")
    return raw


def _ttl(raw: object) -> float:
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not 0 < raw <= _LONGEST_TTL_S:
        raise WireInvalid(
            f"a lease lives above 0 and up to {_LONGEST_TTL_S:.0f} seconds, got {str(raw)[:40]}"
        )
    return float(raw)


def _optional(check: Check) -> Check:
    return lambda raw: None if raw is None else check(raw)


def _many(check: Check) -> Check:
    def sequence(raw: object) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise WireInvalid(f"expected a list, got {type(raw).__name__}")
        return tuple(check(item) for item in raw)

    return sequence


def _record(*names: str) -> Check:
    """One of the named records of the table below."""

    def record(raw: object) -> Any:
        if not isinstance(raw, list) or not raw or not isinstance(raw[0], str) or raw[0] not in names:
            raise WireInvalid(f"expected one of {', '.join(names)}, got {str(raw)[:40]!r}")
        kind, checks = _RECORDS[raw[0]]
        if len(raw) != 1 + len(checks):
            raise WireInvalid(f"{raw[0]} has {len(checks)} fields, got {len(raw) - 1}")
        return kind(*(check(field) for check, field in zip(checks, raw[1:], strict=True)))

    return record


_ENTRY = _optional(_record("entry"))
_RECORDS: dict[str, tuple[type, tuple[Check, ...]]] = {
    "compare": (Compare, (_text, _integer)),
    "put": (Put, (_text, _text, _optional(_integer))),
    "delete": (Delete, (_text,)),
    "entry": (Entry, (_text, _text, _integer, _integer)),
    "change": (Change, (_integer, _text, _ENTRY)),
    "grant": (Grant, (_ttl,)),
    "keep_alive": (KeepAlive, (_integer,)),
    "revoke": (Revoke, (_integer,)),
    "transact": (Transact, (_many(_record("compare")), _many(_record("put", "delete")))),
    "read": (Read, (_many(_text), _optional(_text))),
    "await": (Await, (_many(_text), _integer)),
    "granted": (Granted, (_integer,)),
    "done": (Done, ()),
    "outcome": (Outcome, (_truth, _integer, _many(_ENTRY))),
    "snapshot": (Snapshot, (_integer, _many(_record("entry")))),
    "noticed": (Noticed, (_integer, _many(_record("change")))),
    "refused": (Refused, (_text, _text)),
}
_NAMES = {kind: name for name, (kind, _) in _RECORDS.items()}
_CALL = _record("grant", "keep_alive", "revoke", "transact", "read", "await")
_RESULT = _record("granted", "done", "outcome", "snapshot", "noticed", "refused")


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_pack(item) for item in value]
    name = _NAMES.get(type(value))
    if name is None:
        return value
    return [name, *(_pack(getattr(value, field.name)) for field in fields(value))]
