"""Loads gRPC and the messages of etcd's API, which come from `etcd3.etcdrpc`.

They were generated in 2020 and load only on the pure Python implementation of protobuf (`protobuf`), and gRPC reads two
choices from the environment while it loads. Loading takes a tenth of a second and 20 MB, so it is done when the first
etcd store is made. Nothing else of `etcd3` is used: its client blocks for ever, its watcher spins.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from ... import protobuf
from ..errors import StoreRefused

WHILE_LOADING = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # with it, starting a process may dead-lock
    "GRPC_VERBOSITY": "NONE",  # it writes to stderr what our own errors say
}

WAKES_S = 10.0
"""gRPC wakes a thread that waits for an answer now and then, so that Python can handle signals. Its own 0.1 s is for
Python 2, whose waits no signal interrupts, and was a fifth of an idle agent's cost. An answer wakes it at once."""


@dataclass(frozen=True, slots=True)
class Rpc:
    grpc: Any
    messages: Any


def load() -> Rpc:
    """Raises StoreRefused when protobuf was loaded before, with an implementation that cannot read the messages."""
    with protobuf.pure_python(WHILE_LOADING):
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
        return Rpc(grpc, etcdrpc)
