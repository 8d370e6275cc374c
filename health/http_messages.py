"""Requests and answers of the HTTP server, as bytes and back: pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl

REQUEST_LINE = re.compile(rb"([A-Z]+) (/[!-~]*) HTTP/1\.[0-9]")
METHODS = (b"GET", b"HEAD")
END_OF_HEAD = b"\r\n\r\n"
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

EVENT_STREAM = "text/event-stream"

_BEARER = re.compile(rb"(?i)authorization: *bearer +([!-~]+) *")
_LAST_EVENT = re.compile(rb"(?i)last-event-id: *([!-~]+) *")
_MOST_QUERY_FIELDS = 16

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\nX-Accel-Buffering: no\r\n"
    b"Connection: close\r\n\r\n"
)
BEAT = b":\n\n"
"""A comment, which browsers skip."""


class Page(NamedTuple):
    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that pages read."""

    query: Mapping[str, str]
    token: str = ""
    """The bearer token; empty without one."""
    last_event: str = ""
    """The id of the last event that a reconnecting client has received; empty without one."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a liveness or readiness check found: `ok` decides between 200 and 503, `detail` is the body."""

    ok: bool
    detail: str


def status_page(status: HTTPStatus, advice: str = "") -> Page:
    return Page(status, TEXT, f"{status.value} {status.phrase}{advice}\n".encode())


def probe_page(probe: Probe) -> Page:
    status = HTTPStatus.OK if probe.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Page(status, TEXT, f"{probe.detail}\n".encode(errors="replace"))


def asked(head: bytes | bytearray) -> tuple[bytes, bytes]:
    """Method and path; both empty if the first line is not a request line."""
    request = REQUEST_LINE.fullmatch(bytes(head).split(b"\r\n", 1)[0])
    return (request[1], request[2].split(b"?", 1)[0]) if request is not None else (b"", b"")


def request_of(head: bytes) -> Request:
    """The request in a head whose first line is a request line."""
    first, *fields = head.split(b"\r\n")
    target = first.split(b" ")[1].decode()
    try:
        query = dict(parse_qsl(target.partition("?")[2], max_num_fields=_MOST_QUERY_FIELDS))
    except ValueError:
        query = {}

    def of(pattern: re.Pattern[bytes]) -> str:
        return next((found[1].decode() for field in fields if (found := pattern.fullmatch(field))), "")

    return Request(query, token=of(_BEARER), last_event=of(_LAST_EVENT))


def json_page(render: Callable[[], str]) -> Callable[[Request], Page]:
    return lambda _: Page(HTTPStatus.OK, JSON, render().encode())


def answer_of(
    status: HTTPStatus,
    content_type: str,
    body: bytes,
    headers: tuple[str, ...] = (),
    *,
    with_body: bool = True,
) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    return "\r\n".join(lines).encode() + END_OF_HEAD + (body if with_body else b"")
