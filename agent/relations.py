"""What must hold between settings that are each right, and between them and this machine's files."""

from __future__ import annotations

import os
from typing import cast

from .config import Problem
from .layers import Setting
from .options import (
    BACKEND,
    ENDPOINT,
    JOIN_TIMEOUT,
    LAST_CALL,
    LEASE_TTL,
    MAX_NODES,
    MIN_NODES,
    SCRIPT,
    Option,
)
from .settings import Settings


def check_relations(settings: Settings) -> list[tuple[set[str], Problem]]:
    """What is wrong between settings that are each right, and with the script; with the options each involves."""
    found: list[tuple[set[str], Problem]] = []

    def expect(
        holds: bool, option: Option[object], expected: str, advice: str, *others: Option[object]
    ) -> None:
        if not holds:
            setting = settings[option]
            origin = f"{option.name} (default)" if setting.origin.startswith("default") else setting.origin
            involved = {option.name, *(other.name for other in others)}
            found.append((involved, Problem(origin, setting.text, expected, advice)))

    least, most = settings[MIN_NODES], cast("Setting[int]", settings[MAX_NODES])
    expect(
        least.value <= most.value,
        MIN_NODES,
        f"at most max-nodes, which is {most.value} ({most.origin})",
        "lower --min-nodes or raise --max-nodes",
        MAX_NODES,
    )
    join, last_call, lease = settings[JOIN_TIMEOUT], settings[LAST_CALL], settings[LEASE_TTL]
    expect(
        join.value > lease.value,
        JOIN_TIMEOUT,
        f"more than lease-ttl, which is {lease.value:g} s ({lease.origin})",
        "raise --join-timeout or lower --lease-ttl",
        LEASE_TTL,
    )
    expect(
        join.value > last_call.value,
        LAST_CALL,
        f"less than join-timeout, which is {join.value:g} s ({join.origin})",
        "lower --last-call or raise --join-timeout",
        JOIN_TIMEOUT,
    )
    backend, endpoint = settings[BACKEND], settings[ENDPOINT]
    expect(
        backend.value != "memory" or most.value == 1,
        BACKEND,
        f"c10d, because max-nodes is {most.value} ({most.origin}) and no other node can join a memory store",
        "use --rdzv-backend c10d or --max-nodes 1",
        MAX_NODES,
        MIN_NODES,
    )
    expect(
        backend.value != "memory" or endpoint.value is None,
        BACKEND,
        f"c10d, because an endpoint is given ({endpoint.origin}) and a memory store has none",
        "leave out --rdzv-endpoint or --rdzv-backend",
        ENDPOINT,
    )
    expect(
        endpoint.value is None or endpoint.value.port != 0,
        ENDPOINT,
        "a port from 1 to 65535, or localhost:0",
        "choose one port for all nodes, or leave the endpoint out and this agent hosts the store",
    )
    script = settings[SCRIPT]
    if script.value is not None:
        expect(
            os.path.isfile(script.value) and os.access(script.value, os.R_OK),
            SCRIPT,
            "a Python file that exists and can be read",
            f"check the path, seen from {os.getcwd()}, and its permissions",
        )
    return found
