"""Asks other nodes' agents who they are, over HTTP, one short-lived thread for each question.

What an answer means is decided elsewhere (`rendezvous/peers.py`); here it only becomes a finding. Refused is what a
machine says on whose port nobody listens any more. Everything else that is no proper introduction counts as silence: a
timeout, a network that cannot be reached, another program's answer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from ..health.http import NODE_PATH
from ..rendezvous.errors import RecordInvalid
from ..rendezvous.peers import Absence, Finding, Peer
from ..rendezvous.records import Endpoint, Introduction
from .events import Event, Probed

TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 8 * 1024


class PeerLink:
    """How many questions are open at once is bounded by whoever asks (`peers.MOST_AT_ONCE`)."""

    def __init__(self, post: Callable[[Event], None], clock: Callable[[], float]) -> None:
        self._post = post
        self._clock = clock

    def ask(self, peer: Peer) -> None:
        """`Probed` follows."""
        threading.Thread(target=self._ask, args=(peer, self._clock()), name="peer", daemon=True).start()

    def _ask(self, peer: Peer, asked_at: float) -> None:
        self._post(Probed(peer, find(peer.http, self._clock, TIMEOUT_S), asked_at))


def find(http: Endpoint, clock: Callable[[], float], timeout_s: float) -> Finding:
    """What the agent at `http` says of itself."""
    deadline = clock() + timeout_s
    try:
        with socket.create_connection((http.address, http.port), timeout_s) as connection:
            connection.sendall(f"GET {NODE_PATH} HTTP/1.0\r\n\r\n".encode())
            answer = b""
            while len(answer) <= MAX_ANSWER_BYTES:
                connection.settimeout(max(0.001, deadline - clock()))
                chunk = connection.recv(MAX_ANSWER_BYTES)
                if not chunk:
                    break
                answer += chunk
    except ConnectionRefusedError:
        return Absence.REFUSED
    except OSError:
        return Absence.SILENT
    head, _, body = answer.partition(b"\r\n\r\n")
    if len(answer) > MAX_ANSWER_BYTES or b" 200 " not in head.split(b"\r\n")[0]:
        return Absence.SILENT
    try:
        return Introduction.from_json(body.decode())
    except (UnicodeDecodeError, RecordInvalid):
        return Absence.SILENT
