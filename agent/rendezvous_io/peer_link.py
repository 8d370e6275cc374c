"""Asks other nodes' agents who they are, over HTTP, one short-lived thread for each question.

What an answer means is decided elsewhere (`rendezvous/liveness/failure_detector.py`); here it only becomes a finding. A
machine refuses when no process listens on the port any more. Everything else that is no proper introduction counts as
silence: a timeout, a network that cannot be reached, another program's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...health.http import NODE_PATH
from ...rendezvous.errors import RecordInvalid
from ...rendezvous.liveness.failure_detector import Absence, Peer, ProbeResult
from ...rendezvous.records import Endpoint, Introduction
from ...threads import Thread
from ..common.events import Event
from ..common.http_client import NoAnswer, get

TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 8 * 1024


class PeerLink:
    """How many questions are open at once is bounded by the caller (`failure_detector.MOST_AT_ONCE`)."""

    def __init__(
        self,
        probed: Callable[[Peer, ProbeResult, float, float], object],
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """`probed` is the participant's: it gets each finding, in the main loop."""
        self._probed = probed
        self._post = post
        self._clock = clock

    def ask(self, peer: Peer) -> None:
        """`probed` follows."""
        asked_at = self._clock()
        silent = partial(self._found, peer, asked_at, Absence.SILENT)
        Thread(partial(self._ask, peer, asked_at), "peer", partial(self._post, silent)).start()

    def _ask(self, peer: Peer, asked_at: float) -> None:
        self._post(partial(self._found, peer, asked_at, find(peer.http, self._clock, TIMEOUT_S)))

    def _found(self, peer: Peer, asked_at: float, finding: ProbeResult) -> None:
        self._probed(peer, finding, asked_at, self._clock())


def find(http: Endpoint, clock: Callable[[], float], timeout_s: float) -> ProbeResult:
    """The introduction of the agent at `http`, or why there is none."""
    try:
        return Introduction.from_json(get(http, NODE_PATH, clock, timeout_s, MAX_ANSWER_BYTES))
    except ConnectionRefusedError:
        return Absence.REFUSED
    except (OSError, NoAnswer, RecordInvalid):
        return Absence.SILENT
