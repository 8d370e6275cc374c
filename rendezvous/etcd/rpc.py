"""Loads gRPC and the messages of etcd's API, which `etcd.proto` declares.

The messages are in a pool of our own, so that they share a process with those of any other client of etcd, and
load with every implementation of protobuf. What etcd has besides is left out: a reader skips fields that it does not
know.

gRPC reads two choices from the environment while it loads, which are set only meanwhile: processes that this one starts
must not inherit them. Loading takes a tenth of a second and 20 MB, so it is done when the first etcd store is made.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import StoreRefused

PACKAGE = "elastic_agent.etcd"
"""Names are no part of what is sent."""

PROTO = Path(__file__).with_name("etcd.proto")

_TOKEN = re.compile(
    r"(?P<block>message|enum|oneof) (?P<name>\w+) \{"
    r"|(?P<repeated>repeated )?(?P<type>\w+) (?P<field>\w+) = (?P<number>\d+);"
    r"|(?P<value>\w+) = (?P<of>\d+);"
    r"|(?P<end>\})"
)


def _messages() -> Any:
    """The classes by their names. Raises ImportError where protobuf is older than 4.22."""
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.message_factory import GetMessageClass

    pool = descriptor_pool.DescriptorPool()
    declared = _declared(descriptor_pb2)
    pool.AddSerializedFile(declared.SerializeToString())
    names = [message.name for message in declared.message_type]
    classes = {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in names}
    return SimpleNamespace(**classes)


def _declared(descriptor_pb2: Any) -> Any:
    """`PROTO` as protoc would describe it."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    field_type = descriptor_pb2.FieldDescriptorProto.Type
    label = descriptor_pb2.FieldDescriptorProto.Label
    message: Any = None
    enum: Any = None
    in_oneof = False
    for found in _TOKEN.finditer(PROTO.read_text()):
        if found["block"] == "message":
            message = file.message_type.add(name=found["name"])
        elif found["block"] == "enum":
            enum = message.enum_type.add(name=found["name"])
        elif found["block"] == "oneof":
            message.oneof_decl.add(name=found["name"])
            in_oneof = True
        elif found["end"]:
            enum, in_oneof = None, False
        elif found["value"]:
            enum.value.add(name=found["value"], number=int(found["of"]))
        else:
            field = message.field.add(name=found["field"], number=int(found["number"]))
            field.label = label.Value("LABEL_REPEATED" if found["repeated"] else "LABEL_OPTIONAL")
            if found["type"].islower():
                field.type = field_type.Value(f"TYPE_{found['type'].upper()}")
            else:  # a message, or an enum of this message
                nested = found["type"] in (one.name for one in message.enum_type)
                field.type = field_type.Value("TYPE_ENUM" if nested else "TYPE_MESSAGE")
                within = f"{PACKAGE}.{message.name}" if nested else PACKAGE
                field.type_name = f".{within}.{found['type']}"
            if in_oneof:
                field.oneof_index = 0
    return file


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
        return Rpc(grpc, _messages())
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
