"""Notices that this machine goes away: of its cloud's metadata server, or a file, polled by one thread.

EC2 (IMDSv2): a spot instance is interrupted, two minutes ahead at best; we poll each second, as a part of them may have
passed already. Compute Engine: a preempted machine is told to shut down 30 s before it is cut off; before a maintenance
that ends it there are 60 s, with GPUs an hour, and as no answer says which, the leave begins at once. Azure: the
scheduled events of all machines of a scale set, each of which names those that it concerns. No event is confirmed early
(`StartRequests`): other programs may need the time.

A file that is there is a notice. It holds the deadline:

    (nothing)                 30 s after it was written
    45                        so many seconds after it was written
    1767323045                that instant (Unix time: ten digits)
    2026-01-02T03:04:05Z      that instant (RFC 3339)

Anything else counts as nothing: that a machine goes away matters more than how its end is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...codec import Invalid, load_object
from ...rendezvous.records import Endpoint
from ...threads import Thread
from ..common.events import Event
from ..common.http_client import NoAnswer, Reply, request
from ..configuration.values import NoticeSource
from ..workers.processes.proc import read

log = logging.getLogger(__name__)

DEFAULT_S = 30.0
"""From a notice that names no instant to the end of the machine, where its source promises nothing else."""

MIN_LEFT_S = 2.0
"""An instant that has passed, or is about to, is the source's mistake or its clock's: this machine still lives."""

MAX_DIFFERENCE_S = 1.0
"""Two notices whose instants differ by no more are one."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine goes away."""

    text: str
    """Who says so, and what happens."""
    ends_at: float | None = None
    """Unix time; None: the source names no instant."""
    within_s: float = DEFAULT_S
    """Without an instant: so long after the notice was first read."""

    def same(self, other: Notice) -> bool:
        if self.ends_at is None or other.ends_at is None:
            return self == other
        return abs(self.ends_at - other.ends_at) <= MAX_DIFFERENCE_S


class SourceFailed(Exception):
    """A source gives no answer, or none that can be read; the text says why."""


class Source(Protocol):
    """Of notices: a cloud, a file."""

    @property
    def interval_s(self) -> float:
        """Seconds between two polls."""

    def poll(self) -> Notice | None:
        """What it says now. Raises SourceFailed."""


class NoticeWatch:
    """The thread that polls a source from `start` to `close`, and posts each notice that is new, moved or withdrawn.

    `clock` is monotonic, `wall_clock` counts as the source's instants do.
    """

    def __init__(
        self,
        source: Source,
        noticed: Callable[[str | None, float | None], object],
        post: Callable[[Event], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        expected: bool,
    ) -> None:
        """`noticed` is called in the main loop with the text, which says who says so, and the deadline; with None and
        None when the notice is withdrawn. `expected`: the user has named the source."""
        self._source, self._noticed, self._post = source, noticed, post
        self._clock, self._wall_clock = clock, wall_clock
        self._level = logging.WARNING if expected else logging.INFO
        self._known: Notice | None = None
        self._fails = False
        self._closed = threading.Event()
        self._thread = Thread(self._work, "notices")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(self.turn()):
            pass

    def turn(self) -> float:
        """Poll once. Returns the seconds until the next poll. No defect of the source ends the training."""
        try:
            notice = self._source.poll()
        except Exception as error:
            defect = not isinstance(error, SourceFailed)
            if not self._fails:
                why = repr(error) if defect else error
                log.log(
                    self._level,
                    "a notice that this machine goes away would not be seen: %s",
                    why,
                    exc_info=defect,
                )
            self._fails = True
        else:
            self._fails = False
            self._see(notice)
        return self._source.interval_s

    def _see(self, notice: Notice | None) -> None:
        known, self._known = self._known, notice
        if notice is None:
            if known is not None:
                self._post(partial(self._noticed, None, None))
        elif known is None or not known.same(notice):
            left_s = notice.ends_at - self._wall_clock() if notice.ends_at is not None else notice.within_s
            self._post(partial(self._noticed, notice.text, self._clock() + max(MIN_LEFT_S, left_s)))


# --- Which source

DMI = Path("/sys/class/dmi/id")
"""What the firmware says of this machine: it needs no network, and any user may read it."""
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Of each machine in Azure, and of no other one on Hyper-V."""


def detect_cloud(dmi: Path = DMI) -> str:
    """aws, gcp or azure; empty: none of them, and no server is asked."""
    vendor = read(dmi / "sys_vendor")
    if vendor == "Amazon EC2" or read(dmi / "bios_version").endswith(".amazon"):
        return "aws"
    if vendor == "Google" and read(dmi / "product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if read(dmi / "chassis_asset_tag") == AZURE_TAG else ""


def source_for(
    wanted: NoticeSource, clock: Callable[[], float] = time.monotonic, dmi: Path = DMI
) -> Source | None:
    """By --notice; None: there is nothing to look at."""
    kind = detect_cloud(dmi) if wanted.kind == "auto" else wanted.kind
    server = MetadataServer(clock)
    if kind == "aws":
        return Aws(server, clock)
    if kind == "gcp":
        return Gcp(server)
    if kind == "azure":
        return Azure(server)
    return WatchedFile(wanted.path) if kind == "file" else None


# --- Clouds

HOST = "169.254.169.254"
"""Link-local, and the same in the three clouds: what answers there is this machine's host."""
MAX_BYTES = 256 * 1024
"""Of an answer: Azure's document names every machine of a scale set."""
TIMEOUT_S = 1.0


class MetadataServer:
    """A cloud's, asked directly and never through a proxy."""

    def __init__(self, clock: Callable[[], float], host: str = HOST, port: int = 80) -> None:
        self._server, self._clock = Endpoint(host, port), clock

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Reply:
        """Raises SourceFailed."""
        try:
            return request(
                self._server, path, self._clock, TIMEOUT_S, MAX_BYTES, method=method, headers=headers
            )
        except (OSError, NoAnswer) as error:
            raise SourceFailed(f"{path}: {error!r}") from error


def _wrong(path: str, reply: Reply) -> SourceFailed:
    return SourceFailed(f"{path}: status {reply.status}, {quoted(reply.body)}")


def _object(path: str, reply: Reply) -> dict[str, Any]:
    """Raises SourceFailed."""
    if reply.status == 200:
        with contextlib.suppress(Invalid):
            return load_object(reply.body, "the answer")
    raise _wrong(path, reply)


TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
TOKEN_TTL_S = 6 * 3600
TOKEN_HEADER = "X-aws-ec2-metadata-token"


@dataclass(slots=True)
class Aws:
    """A source. `clock` is monotonic."""

    server: MetadataServer
    clock: Callable[[], float]
    interval_s: float = 1.0
    _token: str = ""
    _token_until: float = 0.0

    def poll(self) -> Notice | None:
        if self.clock() >= self._token_until:
            self._renew()
        reply = self.server.ask(ACTION_PATH, {TOKEN_HEADER: self._token})
        if reply.status == 401:  # the server forgets tokens when the machine was paused
            self._renew()
            reply = self.server.ask(ACTION_PATH, {TOKEN_HEADER: self._token})
        if reply.status == 404:  # it is not there until there is a notice
            return None
        answer = _object(ACTION_PATH, reply)
        action, at = answer.get("action"), answer.get("time")
        if action not in ("terminate", "stop", "hibernate"):
            raise _wrong(ACTION_PATH, reply)
        return Notice(f"AWS interrupts this spot instance ({action}) at {quoted(str(at))}", read_instant(at))

    def _renew(self) -> None:
        asked_at = self.clock()
        reply = self.server.ask(TOKEN_PATH, {f"{TOKEN_HEADER}-ttl-seconds": str(TOKEN_TTL_S)}, "PUT")
        token = reply.body.decode("latin-1").strip()
        if reply.status != 200 or not re.fullmatch(r"[!-~]{1,512}", token):  # it may be secret: not shown
            raise SourceFailed(f"{TOKEN_PATH}: status {reply.status}, no token in {len(reply.body)} bytes")
        self._token, self._token_until = token, asked_at + TOKEN_TTL_S / 2


PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"


@dataclass(slots=True)
class Gcp:
    """A source. A live migration only pauses the machine for a moment."""

    server: MetadataServer
    interval_s: float = 1.0

    def poll(self) -> Notice | None:
        if self._ask(PREEMPTED_PATH, "TRUE", "FALSE") == "TRUE":
            return Notice("Google preempts this machine", within_s=30.0)
        ends = "TERMINATE_ON_HOST_MAINTENANCE"
        if self._ask(MAINTENANCE_PATH, "NONE", "MIGRATE_ON_HOST_MAINTENANCE", ends) != ends:
            return None
        return Notice("Google ends this machine for the maintenance of its host", within_s=60.0)

    def _ask(self, path: str, *expected: str) -> str:
        """The name is given, and not looked up."""
        reply = self.server.ask(path, {"Host": "metadata.google.internal", "Metadata-Flavor": "Google"})
        word = reply.body.decode("latin-1").strip()
        if reply.status != 200 or word not in expected:
            raise _wrong(path, reply)
        return word


EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
ENDS = {
    "Preempt": "Azure takes this spot machine back",
    "Terminate": "Azure deletes this machine",
    "Reboot": "Azure restarts this machine",
    "Redeploy": "Azure moves this machine to another host, without its memory",
}
"""What ends the machine or what is in its memory, not before `NotBefore`, which an event that has begun has no more."""
BEGUN_S = 5.0
"""What may be left when an event has begun. One whose instant cannot be read counts as one that has."""


@dataclass(slots=True)
class Azure:
    """A source."""

    server: MetadataServer
    interval_s: float = 1.0
    _machine: str = ""
    """Its name, as events have it."""

    def poll(self) -> Notice | None:
        """The event that ends this machine first. One that is not understood hides no other."""
        if not self._machine:
            reply = self.server.ask(NAME_PATH, {"Metadata": "true"})
            if reply.status != 200 or not (name := reply.body.decode("latin-1").strip()):
                raise _wrong(NAME_PATH, reply)
            self._machine = name
        reply = self.server.ask(EVENTS_PATH, {"Metadata": "true"})
        events = _object(EVENTS_PATH, reply).get("Events")
        if not isinstance(events, list):
            raise _wrong(EVENTS_PATH, reply)
        notices = [notice for event in events if (notice := self._notice(event)) is not None]
        # Those without an instant come first.
        return min(notices, key=lambda notice: notice.ends_at or 0.0, default=None)

    def _notice(self, event: object) -> Notice | None:
        fields = event if isinstance(event, dict) else {}
        resources, kind, at = fields.get("Resources"), fields.get("EventType"), fields.get("NotBefore")
        ours = isinstance(resources, list) and self._machine in resources
        coming = fields.get("EventStatus") in ("Scheduled", "Started")
        if not (ours and coming and isinstance(kind, str) and kind in ENDS):
            return None
        when = f"not before {quoted(str(at))}" if at else "now"
        return Notice(f"{ENDS[kind]}, {when}", read_instant(at), BEGUN_S)


# --- A file

MAX_CONTENTS, FILE_INTERVAL_S = 4096, 0.25


@dataclass(slots=True)
class WatchedFile:
    """A source."""

    path: str
    interval_s: float = FILE_INTERVAL_S

    def poll(self) -> Notice | None:
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # to open a device may do something
                raise SourceFailed(f"{self.path} is no regular file")
            with open(self.path, "rb") as file:
                return read_contents(file.read(MAX_CONTENTS), self.path, os.fstat(file.fileno()).st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceFailed(f"{self.path}: {error.strerror}") from error


def read_contents(raw: bytes, path: str, written_at: float) -> Notice:
    text = raw.decode("latin-1").strip()
    says = f"the file {path} says {quoted(text)}" if text else f"the file {path} is there"
    if re.fullmatch(r"[0-9]{1,10}(\.[0-9]{0,9})?", text):
        number = float(text)
        ends_at = written_at + number if number < 1e9 else number  # else it is Unix time
    else:
        found = read_instant(text)
        ends_at = written_at + DEFAULT_S if found is None else found
    return Notice(f"{says}: this machine goes away", ends_at)


# --- How sources write an instant


def read_instant(given: object) -> float | None:
    """Unix time, to the second before, of RFC 3339 or a date of HTTP, as in "Mon, 19 Sep 2016 18:29:47 GMT"; None for
    what is neither.

    >>> read_instant("2026-01-02T03:04:05Z") - read_instant("2026-01-02T03:04:05.9+01:00")
    3600.0
    """
    if not isinstance(given, str):
        return None
    text = re.sub(r"\.\d+(?=[Zz+-])", "", given)  # Python 3.10 reads 3 or 6 digits of a second alone
    with contextlib.suppress(ValueError):
        found = datetime.fromisoformat(re.sub("[Zz]$", "+00:00", text))
        return found.timestamp() if found.tzinfo is not None else None
    with contextlib.suppress(TypeError, ValueError, OverflowError, IndexError):
        return parsedate_to_datetime(given).timestamp()
    return None


def quoted(raw: bytes | str) -> str:
    """A short, printable form for messages."""
    return repr(raw if len(raw) <= 80 else raw[:80])
