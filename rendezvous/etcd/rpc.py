"""Loads gRPC and the messages of etcd's API, which come from `etcd3.etcdrpc`.

They were generated in 2020 and load only on the pure Python implementation of protobuf, which has to be chosen
before protobuf is first imported, in the environment. That choice, and two for gRPC, are in force while it loads and
not longer: processes that this one starts must not inherit them. Loading takes a tenth of a second and 20 MB,
so it is done when the first etcd store is made. Nothing else of `etcd3` is used: its client blocks for ever, its
watcher spins.
"""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass
from typing import Any

from ..errors import StoreRefused

WHILE_LOADING = {
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",
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
    """Raises StoreRefused when protobuf was loaded before, with an implementation that cannot read the messages."""
    with _loading:
        before = {name: os.environ.get(name) for name in WHILE_LOADING}
        os.environ.update(WHILE_LOADING)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                import grpc
                import grpc._common
                from etcd3 import etcdrpc

                grpc._common.MAXIMUM_WAIT_TIMEOUT = WAKES_S
                grpc.insecure_channel(
                    "ipv4:127.0.0.1:1"
                ).close()  # it reads its settings with the first channel
        except TypeError as error:
            raise StoreRefused(
                "the etcd store cannot be used in this process: google.protobuf was imported before it, with an "
                "implementation that does not load etcd3's messages; import it later, or start this process with "
                "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python in its environment"
            ) from error
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        return Rpc(grpc, etcdrpc)
