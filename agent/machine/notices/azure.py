"""Notices of Azure's metadata server: the scheduled events of this virtual machine.

The document lists the events of all machines of a scale set or availability set; each names those that it concerns.
Preempt (30 s ahead), Terminate, Reboot and Redeploy (minutes ahead) end the machine or what is in its memory: not
before `NotBefore`, which an event that has begun no longer has. A Freeze pauses it for some seconds: only a hint.

No event is confirmed early (`StartRequests`): other programs on the machine may need the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....codec import Invalid, load_object
from ...common.http_client import Reply
from .notice import Ask, BadResponse, Hint, Notice, Question, quoted, read_http_date

HOST = "169.254.169.254"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}

ENDS = {
    "Preempt": "Azure takes this spot machine back",
    "Terminate": "Azure deletes this machine",
    "Reboot": "Azure restarts this machine",
    "Redeploy": "Azure moves this machine to another host, without its memory",
}
FREEZE = "Freeze"
_COMING = ("Scheduled", "Started")

BEGUN_S = 5.0
"""What may be left when an event has begun. One whose instant cannot be read counts as one that has."""


def read_name(reply: Reply) -> str:
    """Of `NAME_PATH`: this machine, as events name it. Raises BadResponse."""
    name = reply.body.decode("latin-1").strip()
    if reply.status != 200 or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
        raise BadResponse(f"{NAME_PATH}: status {reply.status}, {quoted(reply.body)}")
    return name


def read_events(reply: Reply, machine: str) -> Notice | Hint | None:
    """Of `EVENTS_PATH`: the event that ends this machine first, else a hint. Raises BadResponse."""
    try:
        if reply.status != 200:
            raise Invalid(f"status {reply.status}")
        found = list(_events(load_object(reply.body, "the answer"), machine))
    except Invalid as error:
        raise BadResponse(f"{EVENTS_PATH}: {error}, {quoted(reply.body)}") from None
    notices = [each for each in found if isinstance(each, Notice)]
    if notices:  # those without an instant come first
        return min(notices, key=lambda notice: notice.ends_at or 0.0)
    return found[0] if found else None


def _events(document: Mapping[str, Any], machine: str) -> Iterator[Notice | Hint]:
    """Of this machine. An event that is not understood hides no other. Raises Invalid."""
    events = document.get("Events")
    if not isinstance(events, list):
        raise Invalid("Events are no list")
    for event in events:
        fields = event if isinstance(event, dict) else {}
        resources, kind, at = fields.get("Resources"), fields.get("EventType"), fields.get("NotBefore") or ""
        ours = isinstance(resources, list) and machine in resources
        if not ours or fields.get("EventStatus") not in _COMING or not isinstance(kind, str):
            continue
        if kind == FREEZE:
            yield Hint(f"Azure lets this machine stand still for some seconds, {_when(at)}")
        elif kind in ENDS:
            yield Notice(f"{ENDS[kind]}, {_when(at)}", _instant(at), BEGUN_S)


def _when(at: object) -> str:
    return f"not before {quoted(str(at))}" if at else "now"


def _instant(at: object) -> float | None:
    """None: the event has begun, or does not say when it will."""
    try:
        return read_http_date(at) if isinstance(at, str) and at else None
    except ValueError:
        return None


@dataclass(slots=True)
class Azure:
    """A source."""

    ask: Ask
    interval_s: float = 1.0
    _machine: str = ""

    def poll(self) -> Notice | Hint | None:
        self._machine = self._machine or read_name(self.ask(Question(NAME_PATH, _HEADERS)))
        return read_events(self.ask(Question(EVENTS_PATH, _HEADERS)), self._machine)
