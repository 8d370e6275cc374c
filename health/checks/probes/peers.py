"""Asks other nodes' agents over HTTP, as their peers do: do they reach each other over the network?"""

from __future__ import annotations

import http.client
from collections.abc import Sequence

from ..rules.recheck import PeerFacts

EACH_S = 2.0


def probe_peers(peers: Sequence[str]) -> PeerFacts:
    """`peers` are HOST:PORT, with an IPv6 address in brackets."""
    return PeerFacts(asked=len(peers), silent=tuple(peer for peer in peers if not _answers(peer)))


def _answers(peer: str) -> bool:
    connection = http.client.HTTPConnection(peer, timeout=EACH_S)
    try:
        connection.request("GET", "/node")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
