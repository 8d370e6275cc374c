"""Loads gRPC and the messages of etcd's API.

gRPC reads two choices from the environment while it loads, which are set only meanwhile: processes that this one starts
must not inherit them. Loading takes a tenth of a second and 20 MB, so it is done when the first etcd store is made.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import StoreRefused
from . import messages

WHILE_LOADING = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # with it, starting a process may dead-lock
    "GRPC_VERBOSITY": "NONE",  # it writes to stderr what our own errors say
}

WAKES_S = 10.0
"""gRPC wakes a thread that waits for an answer now and then, so that Python can handle signals. Its own 0.1 s is for
Python 2, whose waits no signal interrupts, and was a fifth of an idle agent's cost. An answer wakes it at once."""

_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Rpc:
    grpc: Any
    messages: Any


def load() -> Rpc:
    """Raises StoreRefused where the installed protobuf can neither make our messages nor read those of etcd3."""
    with _loading, _variables_for_grpc():
        import grpc
        import grpc._common

        grpc._common.MAXIMUM_WAIT_TIMEOUT = WAKES_S
        grpc.insecure_channel("ipv4:127.0.0.1:1").close()  # it reads its settings with the first channel
    try:
        return Rpc(grpc, messages.load())
    except ImportError:
        return Rpc(grpc, _of_etcd3())


@contextlib.contextmanager
def _variables_for_grpc() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in WHILE_LOADING}
    os.environ.update(WHILE_LOADING)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _of_etcd3() -> Any:
    """Generated in 2020, which loads on the protobuf of that time. Nothing else of etcd3 is used: its client blocks for
    ever, its watcher spins."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from etcd3 import etcdrpc
    except TypeError as error:
        raise StoreRefused(
            "the etcd store cannot be used with this version of protobuf: pip install 'protobuf>=4.22'"
        ) from error
    return etcdrpc
