"""What each connection to an etcd cluster needs: where it is, how it lets us in, and gRPC with the messages of its API.

Every key of a job is under `<prefix>/<job>/`. The closing slash keeps `job1` out of `job10`, and a job's name
is one part of the path, whatever characters it has, so that one role of etcd can be granted one job.

One address is talked to at a time, the next one when it gives trouble. Names are resolved in a thread of their own,
because a dead name server blocks for longer than a lease lives. The last good answer stays in use until a better one
comes. gRPC reports "Socket closed" for most mistakes with TLS. So while no member has answered yet, a handshake with
the standard library finds out what an operator has to change.

`etcd.proto` declares the messages. They are in a pool of our own, so that they share a process with those of any other
client of etcd, and load with every implementation of protobuf. What etcd has besides is left out: a reader skips fields
that it does not know. gRPC reads two choices from the environment while it loads, which are set only meanwhile:
processes that this one starts must not inherit them. Loading takes a tenth of a second and 20 MB, so it is done when
the first etcd store is made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ...threads import Thread
from ..errors import StoreRefused
from ..store.store_kind import Access, Tls

if TYPE_CHECKING:
    import ssl

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
    """The classes by their names."""
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
    with _loading, _variables_for_grpc():
        import grpc
        import grpc._common

        grpc._common.MAXIMUM_WAIT_TIMEOUT = WAKES_S
        grpc.insecure_channel("ipv4:127.0.0.1:1").close()  # it reads its settings with the first channel
    return Rpc(grpc, _messages())


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


RESOLVE_PAUSE_S = 1.0
"""Trouble comes in bursts; names are not asked more often than this."""

log = logging.getLogger(__name__)


def root_of(access: Access) -> str:
    """What every key of the job begins with."""
    return f"{access.prefix.rstrip('/')}/{quote(access.job, safe='')}/"


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    """As it was given to us: what the member's certificate must hold."""
    ip: str
    port: int

    @property
    def target(self) -> str:
        """In gRPC's words."""
        return f"ipv6:[{self.ip}]:{self.port}" if ":" in self.ip else f"ipv4:{self.ip}:{self.port}"

    def __str__(self) -> str:
        if self.ip != self.host:
            return f"{self.host}:{self.port} ({self.ip})"
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def following(current: Address | None, ring: Sequence[Address]) -> Address:
    """The one after `current`; the first if it is no longer there."""
    if current not in ring:
        return ring[0]
    return ring[(ring.index(current) + 1) % len(ring)]


def is_ip(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


def resolve(host: str, port: int) -> tuple[str, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[4][0]) for address in found))


class Addresses:
    """The addresses of the members, and names looked up in a thread of their own."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        resolve: Callable[[str, int], tuple[str, ...]] = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._resolve = resolve
        self._clock = clock
        self._ips: dict[tuple[str, int], tuple[str, ...]] = {
            endpoint: (endpoint[0],) for endpoint in self._endpoints if is_ip(endpoint[0])
        }
        self._names = tuple(endpoint for endpoint in self._endpoints if not is_ip(endpoint[0]))
        self._asking: Thread | None = None
        self._ask_again_at = clock()
        self._lock = threading.Lock()
        self.problem = ""
        """Why a name could not be resolved, the last time that we asked."""

    @property
    def ring(self) -> tuple[Address, ...]:
        """Every address known now, in the order of the endpoints."""
        with self._lock:
            return tuple(
                dict.fromkeys(
                    Address(host, ip, port)
                    for host, port in self._endpoints
                    for ip in self._ips.get((host, port), ())
                )
            )

    def refresh(self, wait_s: float = 0.0) -> None:
        """Ask for the names again, without waiting for the answer longer than this."""
        with self._lock:
            if self._names and self._asking is None and self._clock() >= self._ask_again_at:
                self._ask_again_at = self._clock() + RESOLVE_PAUSE_S
                self._asking = Thread(self._ask, "etcd-names", self._asked)
                self._asking.start()
            asking = self._asking
        if asking is not None:
            asking.join(wait_s)

    def _ask(self) -> None:
        problem = ""
        for endpoint in self._names:
            try:
                ips = self._resolve(*endpoint)
            except OSError as error:
                problem = f"cannot resolve {endpoint[0]!r}: {error}"
                continue
            with self._lock:
                self._ips[endpoint] = ips
        if problem and problem != self.problem:
            log.warning("%s; known addresses stay in use", problem)
        with self._lock:
            self.problem = problem
            self._asked()

    def _asked(self) -> None:
        self._asking = None


ALERT_WAIT_S = 0.2
"""How long a member may take to refuse our certificate after a handshake that went well on our side (TLS 1.3)."""


def credentials(rpc: Rpc, tls: Tls) -> Any:
    """Raises StoreRefused when a file cannot be read."""
    return rpc.grpc.ssl_channel_credentials(_read(tls.ca), *(_read(file) for file in (tls.key, tls.cert)))


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreRefused(f"cannot read {path}: {error.strerror}; etcd is to be reached with it") from error


def context(tls: Tls) -> ssl.SSLContext:
    """Raises StoreRefused when the files are not what they should be."""
    import ssl

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.set_alpn_protocols(["h2"])
    what = f"{tls.ca} does not hold certificates of an authority"
    try:
        made.load_verify_locations(tls.ca)
        if tls.cert is not None:
            what = f"{tls.cert} and {tls.key} do not hold a certificate with its key"
            made.load_cert_chain(tls.cert, tls.key)
    except OSError as error:  # SSLError is one
        raise StoreRefused(f"{what}, in PEM format, that may be read: {error}") from error
    return made


def handshake_problem(address: Address, tls: Tls | None, timeout_s: float) -> str | None:
    """What keeps us and this member from understanding each other; None when it is not TLS, or nothing."""
    import ssl

    if tls is None:
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        try:
            _shake_hands(trusting, address, timeout_s)
        except ssl.SSLError as error:
            if "ALERT" not in (error.reason or ""):
                return None
        except OSError:
            return None
        return "it speaks TLS and we do not: give the certificate of its authority (--etcd-ca)"
    try:
        _shake_hands(context(tls), address, timeout_s)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not the one to expect: {error.verify_message}"
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError):  # up to OpenSSL, and to chance
        return "it ended the TLS handshake: does it speak plain text?"
    except ssl.SSLError as error:
        return (
            f"TLS with it fails: {error}; does it want another certificate of ours (--etcd-cert, --etcd-key)?"
        )
    except OSError:
        return None
    return None


def _shake_hands(context: ssl.SSLContext, address: Address, timeout_s: float) -> None:
    with (
        socket.create_connection((address.ip, address.port), timeout_s) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as secure,
    ):
        secure.settimeout(min(ALERT_WAIT_S, timeout_s))
        try:
            secure.recv(1)
        except TimeoutError:
            pass
