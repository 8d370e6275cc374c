"""Kinds of settings: how a written text becomes a value, and what to say when it does not.

All sources (command line, environment, file) hand over text, so one kind checks them all. `parse` raises
`ValueError` for a text it refuses; the error's own text is advice, or empty.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast, get_args

from .config import Backend, DevicePinning, Endpoint, NodeCounts, WorkerCount
from .ports import PortConfigError, PortRange

T_co = TypeVar("T_co", covariant=True)

MOST_NODES = 100_000
MOST_WORKERS = 4096
WEEK_S = 7 * 86_400.0
C10D_PORT = 29400  # torchrun's default for c10d, so that a host name alone means the same to both


@dataclass(frozen=True, slots=True)
class Kind(Generic[T_co]):
    """`parse` raises `ValueError` for a text it refuses; the error's own text is advice, or empty."""

    expects: str
    parse: Callable[[str], T_co]


def whole_number(least: int, most: int, unit: str) -> Kind[int]:
    def parse(text: str) -> int:
        # Nine digits are more than any limit here, and keep `int` cheap whatever the text.
        if re.fullmatch(r"[0-9]{1,9}", text) is None or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return Kind(f"a whole number of {unit} from {least} to {most}", parse)


_UNIT_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(least_s: float) -> Kind[float]:
    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}) ?(ms|s|m|h)?", text)
        if match is None:
            raise ValueError
        value_s = float(match[1]) * _UNIT_S[match[2] or ""]
        if not least_s <= value_s <= WEEK_S:
            raise ValueError
        return value_s

    return Kind(f"a duration from {least_s:g} s to 168 h, in seconds or like 500ms, 30s, 5m", parse)


def read_text(text: str) -> str:
    # A NUL byte cannot be passed to the system in any path, name or argument.
    if not text or "\0" in text:
        raise ValueError
    return text


def _identifier(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is None:
        raise ValueError
    return text


def read_job_id(text: str) -> str | None:
    # "none" is torchrun's default, found in scripts that never chose an id: jobs would meet by accident.
    return None if text == "none" else _identifier(text)


def _yes_or_no(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def read_node_counts(text: str) -> NodeCounts:
    least, colon, most = text.partition(":")
    parse = whole_number(1, MOST_NODES, "nodes").parse
    return NodeCounts(parse(least), parse(most if colon else least))


def read_worker_count(text: str) -> WorkerCount:
    if text in ("auto", "gpu", "cpu"):
        return cast(WorkerCount, text)
    return whole_number(1, MOST_WORKERS, "workers").parse(text)


def read_device_pinning(text: str) -> DevicePinning:
    if text not in get_args(DevicePinning):
        raise ValueError
    return cast(DevicePinning, text)


def read_backend(text: str) -> Backend:
    if text in get_args(Backend):
        return cast(Backend, text)
    if text.startswith("etcd"):
        raise ValueError("this version meets through c10d, or in memory on one node; use c10d")
    if text == "static":
        raise ValueError("static rendezvous cannot change the world; use c10d with --rdzv-endpoint")
    raise ValueError


def read_host(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) else _ipv6(text)


def _ipv6(text: str) -> str:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        raise ValueError("check the spelling of the host name or address") from None
    return text


def endpoint(default_port: int) -> Kind[Endpoint]:
    def parse(text: str) -> Endpoint:
        match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", text)
        if match is None:
            raise ValueError("write an IPv6 address in brackets: [::1]:29400")
        port = default_port if match[3] is None else int(match[3])
        if port > 65535:
            raise ValueError
        return Endpoint(_ipv6(match[1]) if match[1] else read_host(match[2]), port)

    return Kind(f"host or host:port, port 0 to 65535 (default {default_port})", parse)


def read_port_range(text: str) -> PortRange:
    try:
        return PortRange.parse(text)
    except PortConfigError as error:
        raise ValueError(str(error)) from error


def read_arguments(text: str) -> tuple[str, ...]:
    if "\0" in text:
        raise ValueError
    return tuple(shlex.split(text))


def read_restarts(text: str) -> int | None:
    return None if text == "auto" else whole_number(0, 1_000_000, "restarts").parse(text)


def read_conf(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(key and equals for key, equals, _ in pairs):
        raise ValueError
    return tuple((key.strip().replace("-", "_"), value.strip()) for key, _, value in pairs)


TEXT = Kind("a text that is not empty and holds no NUL byte", read_text)
IDENTIFIER = Kind("1 to 64 characters of A-Z a-z 0-9 . _ -", _identifier)
YES_OR_NO = Kind("true or false", _yes_or_no)
