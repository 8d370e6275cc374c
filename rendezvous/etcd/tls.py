"""TLS towards etcd: what gRPC needs, and what is wrong when it cannot connect.

gRPC reports "Socket closed" for most mistakes. So while no member has answered yet, a handshake with the standard
library finds out what an operator has to change.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import StoreRefused
from ..store.store_kind import Tls
from .addresses import Address
from .rpc import Rpc

if TYPE_CHECKING:
    import ssl

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
