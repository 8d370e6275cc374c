"""Notices that this machine goes away: of its cloud's metadata server, or a file, polled by one thread.

EC2 (IMDSv2): a spot instance is interrupted, two minutes ahead at best; we poll each second, as a part of them may have
passed already. Compute Engine: a preempted machine is told to shut down 30 s before it is cut off; before a maintenance
that ends it there are 60 s, with GPUs an hour, and as no answer says which, the leave begins at once. Azure: the
scheduled events of all machines of a scale set. No event is confirmed early: other programs may need the time.

A file that is there is a notice. It holds how many seconds after it was written the machine ends, or the instant as
RFC 3339 has it. Anything else, or nothing, is 30 s: that a machine goes away matters more than how its end is written.
"""

from __future__ import annotations

import contextlib
import logging
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ...codec import Invalid, load_object
from ...rendezvous.records import Endpoint
from ...threads import Thread
from ..common.events import Event
from ..common.http_client import HttpReply, request
from ..configuration.parse import NoticeSource
from ..workers.processes.proc import read

log = logging.getLogger(__name__)

DEFAULT_S = 30.0
"""From a notice that names no instant to the end of the machine, where its source promises nothing else."""

MIN_LEFT_S = 2.0
"""An instant that has passed, or is about to, is the source's mistake or its clock's: this machine still lives."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine goes away."""

    text: str
    """Who says so, and what happens."""
    ends_at: float | None = None
    """Unix time; None: the source names no instant."""
    within_s: float = DEFAULT_S
    """Without an instant: so long after the notice was first read."""


# --- Clouds

HOST = "169.254.169.254"
"""Link-local, and the same in the three clouds: what answers there is this machine's host."""
MAX_BYTES = 256 * 1024
"""Of an answer: Azure's document names every machine of a scale set."""
TIMEOUT_S = 1.0


@dataclass
class MetadataServer:
    """Of the cloud whose function `says` reads its answers."""

    says: Callable[[MetadataServer], Notice | None]
    server: Endpoint = field(default_factory=lambda: Endpoint(HOST, 80))
    known: str = ""
    """What it has been asked before: a token, which it forgets when the machine was paused, or the machine's name."""
    interval_s = 1.0

    def poll(self) -> Notice | None:
        """What it says now. Raises Invalid, OSError, NoAnswer."""
        return self.says(self)

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> HttpReply:
        """Directly, and never through a proxy."""
        server = self.server, path, time.monotonic, TIMEOUT_S, MAX_BYTES
        return request(*server, method=method, headers=headers)


def _text(reply: HttpReply) -> str:
    """One word. Raises Invalid, and does not show what it is: it may be a secret."""
    text = reply.body.decode("latin-1").strip()
    if reply.status != 200 or not re.fullmatch(r"[!-~]{1,512}", text):
        raise Invalid(f"status {reply.status}, and no word in {len(reply.body)} bytes")
    return text


def _object(reply: HttpReply) -> dict[str, Any]:
    if reply.status != 200:
        raise Invalid(f"status {reply.status}, {quoted(reply.body)}")
    return load_object(reply.body, "the answer")


TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
TOKEN_HEADER = "X-aws-ec2-metadata-token"


def aws(server: MetadataServer) -> Notice | None:
    """EC2. A token is good for 6 hours."""
    reply = server.ask(ACTION_PATH, {TOKEN_HEADER: server.known}) if server.known else HttpReply(401)
    if reply.status == 401:
        server.known = _text(server.ask(TOKEN_PATH, {f"{TOKEN_HEADER}-ttl-seconds": "21600"}, "PUT"))
        reply = server.ask(ACTION_PATH, {TOKEN_HEADER: server.known})
    if reply.status == 404:  # it is not there until there is a notice
        return None
    answer = _object(reply)
    action, at = answer.get("action"), answer.get("time")
    if action is None:
        raise Invalid(f"not understood: {quoted(reply.body)}")
    return Notice(f"AWS interrupts this spot instance ({quoted(action)}) at {quoted(at)}", read_instant(at))


GOOGLES = {"Host": "metadata.google.internal", "Metadata-Flavor": "Google"}
"""The server's name is given, and not looked up."""
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"


def gcp(server: MetadataServer) -> Notice | None:
    """Compute Engine. A live migration only pauses the machine for a moment."""
    if _text(server.ask(PREEMPTED_PATH, GOOGLES)) == "TRUE":
        return Notice("Google preempts this machine", within_s=30.0)
    if _text(server.ask(MAINTENANCE_PATH, GOOGLES)) == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("Google ends this machine for the maintenance of its host", within_s=60.0)
    return None


EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""What ends the machine or what is in its memory, not before `NotBefore`, which an event that has begun has no more."""
BEGUN_S = 5.0
"""What may be left when an event has begun. One whose instant cannot be read counts as one that has."""


def azure(server: MetadataServer) -> Notice | None:
    """The event that ends this machine first. One that is not understood hides no other."""
    headers = {"Metadata": "true"}
    server.known = server.known or _text(server.ask(NAME_PATH, headers))
    events = _object(server.ask(EVENTS_PATH, headers)).get("Events")
    notices: list[Notice] = []
    if not isinstance(events, list):
        raise Invalid(f"not understood: events that are {quoted(events)}")
    for event in (event for event in events if isinstance(event, dict)):
        machines, kind, at = event.get("Resources"), event.get("EventType"), event.get("NotBefore")
        coming = event.get("EventStatus") in ("Scheduled", "Started")
        if coming and kind in ENDS and isinstance(machines, list) and server.known in machines:
            text = f"Azure has an event for this machine: {kind}, not before {quoted(at or 'now')}"
            notices.append(Notice(text, read_instant(at), BEGUN_S))
    # Those without an instant come first.
    return min(notices, key=lambda notice: notice.ends_at or 0.0, default=None)


CLOUDS: dict[str, tuple[Callable[[MetadataServer], Notice | None], tuple[tuple[str, str], ...]]] = {
    "aws": (aws, (("sys_vendor", "Amazon EC2"), ("bios_version", r".*\.amazon"))),
    "gcp": (gcp, (("product_name", "Google Compute Engine"),)),
    "azure": (azure, (("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),)),
}
"""What reads its server's answers, and how the firmware names it: files below `DMI`, each with a pattern of all that it
holds; one is enough."""
DMI = Path("/sys/class/dmi/id")
"""It needs no network, and any user may read it."""


# --- A file


@dataclass
class WatchedFile:
    """Looked at more often than a cloud: that costs a system call, and its notice may be short."""

    path: str
    interval_s = 0.25

    def poll(self) -> Notice | None:
        """Raises Invalid, OSError."""
        file = Path(self.path)
        try:
            found = file.stat()
            if not stat.S_ISREG(found.st_mode):  # to open a device may do something
                raise Invalid(f"{file} is no regular file")
            text, written_at = file.read_bytes()[:MAX_BYTES].decode("latin-1").strip(), found.st_mtime
        except FileNotFoundError:
            return None
        says = f"the file {file} says {quoted(text)}" if text else f"the file {file} is there"
        seconds = float(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text) else DEFAULT_S
        instant = read_instant(text)
        return Notice(f"{says}: this machine goes away", written_at + seconds if instant is None else instant)


# --- The source that is polled

NoticeReader: TypeAlias = MetadataServer | WatchedFile


def source_for(wanted: NoticeSource, dmi: Path = DMI) -> NoticeReader | None:
    """By --notice; None: there is nothing to look at, and no server is asked."""
    if wanted.kind == "file":
        return WatchedFile(wanted.path)
    kind = detect_cloud(dmi) if wanted.kind == "auto" else wanted.kind
    return MetadataServer(CLOUDS[kind][0]) if kind in CLOUDS else None


def detect_cloud(dmi: Path = DMI) -> str:
    """Empty: none of them."""
    for name, (_, firmware) in CLOUDS.items():
        if any(re.fullmatch(pattern, read(dmi / file)) for file, pattern in firmware):
            return name
    return ""


class NoticeWatch:
    """The thread that polls a source from `start` to `close`, and posts each notice that is new, moved or withdrawn.

    `clock` is monotonic, `wall_clock` counts as the source's instants do.
    """

    def __init__(
        self,
        source: NoticeReader,
        noticed: Callable[[str, float | None], object],
        post: Callable[[Event], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`noticed` is called in the main loop with the text, which says who says so, and the deadline; with no text
        and None when the notice is withdrawn."""
        self._source, self._noticed, self._post = source, noticed, post
        self._clock, self._wall_clock = clock, wall_clock
        self._known: Notice | None = None
        self._fails = False
        self._closed = threading.Event()
        self._thread = Thread(self._work, "notices")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        self.poll()
        while not self._closed.wait(self._source.interval_s):
            self.poll()

    def poll(self) -> None:
        """Once. No defect of the source ends the training."""
        try:
            notice = self._source.poll()
        except Exception as error:
            if not self._fails:
                why = error if isinstance(error, Invalid) else repr(error)
                log.warning("a notice that this machine goes away would not be seen: %s", why)
            self._fails = True
            return
        self._fails = False
        known, self._known = self._known, notice
        if notice == known:
            return
        if notice is None:
            self._post(partial(self._noticed, "", None))
            return
        left_s = notice.ends_at - self._wall_clock() if notice.ends_at is not None else notice.within_s
        self._post(partial(self._noticed, notice.text, self._clock() + max(MIN_LEFT_S, left_s)))


def read_instant(given: object) -> float | None:
    """Unix time, to the second before, of RFC 3339 or a date of HTTP, as in "Mon, 19 Sep 2016 18:29:47 GMT"; None for
    what is neither.

    >>> read_instant("2026-01-02T03:04:05Z") - read_instant("2026-01-02T03:04:05.9+01:00")
    3600.0
    """
    text = re.sub(r"\.\d+(?=[Zz+-])", "", str(given))  # Python 3.10 reads 3 or 6 digits of a second alone
    with contextlib.suppress(ValueError):
        found = datetime.fromisoformat(re.sub("[Zz]$", "+00:00", text))
        return found.timestamp() if found.tzinfo is not None else None
    with contextlib.suppress(TypeError, ValueError, OverflowError, IndexError):
        return parsedate_to_datetime(text).timestamp()
    return None


def quoted(raw: object) -> str:
    """A short, printable form for messages."""
    text = raw if isinstance(raw, bytes) else str(raw)
    return repr(text if len(text) <= 80 else text[:80])
