"""Notices of Compute Engine's metadata server: preemption, and the end of a machine for its host's maintenance.

Neither names an instant. A preempted machine is told to shut down 30 s before it is cut off. Before a maintenance that
ends it there are 60 s, with GPUs an hour; as no answer says which, nor for how long the event has stood, the leave
begins at once. A live migration pauses the machine for a moment, and is only a hint.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...common.http_client import Reply
from .notice import Ask, BadResponse, Hint, Notice, Question, quoted

HOST = "169.254.169.254"
"""Of metadata.google.internal, without a question to a name server."""

NAME = "metadata.google.internal"
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"
FLAVOR_HEADER, FLAVOR = "Metadata-Flavor", "Google"
_HEADERS = {"Host": NAME, FLAVOR_HEADER: FLAVOR}

PREEMPTION_S = 30.0
MAINTENANCE_S = 60.0


def read_preempted(reply: Reply) -> Notice | None:
    """Of `PREEMPTED_PATH`. Raises BadResponse."""
    if _word(reply, PREEMPTED_PATH, "TRUE", "FALSE") == "FALSE":
        return None
    return Notice("Google preempts this machine", within_s=PREEMPTION_S)


def read_maintenance(reply: Reply) -> Notice | Hint | None:
    """Of `MAINTENANCE_PATH`. Raises BadResponse."""
    words = "NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"
    word = _word(reply, MAINTENANCE_PATH, *words)
    if word == "NONE":
        return None
    if word.startswith("MIGRATE"):
        return Hint("Google migrates this machine to another host: it stands still for a moment")
    return Notice("Google ends this machine for the maintenance of its host", within_s=MAINTENANCE_S)


def _word(reply: Reply, path: str, *expected: str) -> str:
    word = reply.body.decode("latin-1").strip()
    ours = (reply.headers or {}).get(FLAVOR_HEADER.lower()) == FLAVOR
    if reply.status != 200 or word not in expected or not ours:
        kind = "" if ours else f" without {FLAVOR_HEADER}: {FLAVOR}"
        raise BadResponse(f"{path}: status {reply.status}{kind}, {quoted(reply.body)}")
    return word


@dataclass(slots=True)
class Gcp:
    """A source."""

    ask: Ask
    interval_s: float = 1.0

    def poll(self) -> Notice | Hint | None:
        preempted = read_preempted(self.ask(Question(PREEMPTED_PATH, _HEADERS)))
        return preempted or read_maintenance(self.ask(Question(MAINTENANCE_PATH, _HEADERS)))
