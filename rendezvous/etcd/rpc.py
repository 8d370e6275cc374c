"""Loads gRPC and the messages of etcd's API, as its `rpc.proto` and `kv.proto` (3.4 and newer) declare them.

The messages are declared in a pool of our own, so that they share a process with those of any other client of etcd, and
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
from types import SimpleNamespace
from typing import Any

from ..errors import StoreRefused

PACKAGE = "elastic_agent.etcd"
"""Names are no part of what is sent."""

PROTO = """
message KeyValue {
  bytes key = 1; int64 create_revision = 2; int64 mod_revision = 3; int64 version = 4; bytes value = 5; int64 lease = 6;
}
message Event {
  enum EventType { PUT = 0; DELETE = 1; }
  EventType type = 1; KeyValue kv = 2; KeyValue prev_kv = 3;
}
message ResponseHeader { uint64 cluster_id = 1; uint64 member_id = 2; int64 revision = 3; uint64 raft_term = 4; }
message RangeRequest {
  enum SortOrder { NONE = 0; ASCEND = 1; DESCEND = 2; }
  enum SortTarget { KEY = 0; VERSION = 1; CREATE = 2; MOD = 3; VALUE = 4; }
  bytes key = 1; bytes range_end = 2; int64 limit = 3; int64 revision = 4; SortOrder sort_order = 5;
  SortTarget sort_target = 6; bool serializable = 7; bool keys_only = 8; bool count_only = 9;
}
message RangeResponse { ResponseHeader header = 1; repeated KeyValue kvs = 2; bool more = 3; int64 count = 4; }
message PutRequest { bytes key = 1; bytes value = 2; int64 lease = 3; }
message PutResponse { ResponseHeader header = 1; KeyValue prev_kv = 2; }
message DeleteRangeRequest { bytes key = 1; bytes range_end = 2; }
message DeleteRangeResponse { ResponseHeader header = 1; int64 deleted = 2; }
message RequestOp {
  oneof request {
    RangeRequest request_range = 1; PutRequest request_put = 2; DeleteRangeRequest request_delete_range = 3;
  }
}
message ResponseOp {
  oneof response {
    RangeResponse response_range = 1; PutResponse response_put = 2; DeleteRangeResponse response_delete_range = 3;
  }
}
message Compare {
  enum CompareResult { EQUAL = 0; GREATER = 1; LESS = 2; NOT_EQUAL = 3; }
  enum CompareTarget { VERSION = 0; CREATE = 1; MOD = 2; VALUE = 3; LEASE = 4; }
  CompareResult result = 1; CompareTarget target = 2; bytes key = 3;
  oneof target_union { int64 version = 4; int64 create_revision = 5; int64 mod_revision = 6; bytes value = 7; }
}
message TxnRequest { repeated Compare compare = 1; repeated RequestOp success = 2; repeated RequestOp failure = 3; }
message TxnResponse { ResponseHeader header = 1; bool succeeded = 2; repeated ResponseOp responses = 3; }
message WatchCreateRequest {
  bytes key = 1; bytes range_end = 2; int64 start_revision = 3; bool progress_notify = 4;
}
message WatchRequest { oneof request_union { WatchCreateRequest create_request = 1; } }
message WatchResponse {
  ResponseHeader header = 1; int64 watch_id = 2; bool created = 3; bool canceled = 4; int64 compact_revision = 5;
  string cancel_reason = 6; repeated Event events = 11;
}
message LeaseGrantRequest { int64 TTL = 1; int64 ID = 2; }
message LeaseGrantResponse { ResponseHeader header = 1; int64 ID = 2; int64 TTL = 3; string error = 4; }
message LeaseRevokeRequest { int64 ID = 1; }
message LeaseRevokeResponse { ResponseHeader header = 1; }
message LeaseKeepAliveRequest { int64 ID = 1; }
message LeaseKeepAliveResponse { ResponseHeader header = 1; int64 ID = 2; int64 TTL = 3; }
message AuthenticateRequest { string name = 1; string password = 2; }
message AuthenticateResponse { ResponseHeader header = 1; string token = 2; }
"""

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
    """PROTO as protoc would describe it."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    field_type = descriptor_pb2.FieldDescriptorProto.Type
    label = descriptor_pb2.FieldDescriptorProto.Label
    message: Any = None
    enum: Any = None
    in_oneof = False
    for found in _TOKEN.finditer(PROTO):
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
