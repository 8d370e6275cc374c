"""Notices that this machine goes away: of its cloud's metadata server, or a file, polled by one thread.

EC2 (IMDSv2): a spot instance is interrupted, two minutes ahead at best; we poll each second, as a part of them may have
passed already. Compute Engine: a preempted machine is told to shut down 30 s before it is cut off; before a maintenance
that ends it there are 60 s, with GPUs an hour, and as no answer says which, the leave begins at once. Azure: the
scheduled events of all machines of a scale set, each of which names those that it concerns. No event is confirmed early
(`StartRequests`): other programs may need the time.

A file that is there is a notice. It holds how many seconds after it was written the machine ends, or the instant as
RFC 3339 has it. Anything else, or nothing, is 30 s: that a machine goes away matters more than how its end is written.
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
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

from ...codec import Invalid, load_object
from ...rendezvous.records import Endpoint
from ...threads import Thread
from ..common.events import Event
from ..common.http_client import HttpReply, NoAnswer, request
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


class SourceFailed(Exception):
    """A source gives no answer, or none that can be read; the text says why."""


class NoticeReader:
    """Of notices: a cloud, a file."""

    interval_s = 1.0
    """Between two polls."""

    def poll(self) -> Notice | None:
        """What it says now. Raises SourceFailed."""
        raise NotImplementedError


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
                why = error if isinstance(error, SourceFailed) else repr(error)
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


def source_for(wanted: NoticeSource, dmi: Path = DMI) -> NoticeReader | None:
    """By --notice; None: there is nothing to look at."""
    kind = detect_cloud(dmi) if wanted.kind == "auto" else wanted.kind
    if kind == "file":
        return WatchedFile(wanted.path)
    clouds: dict[str, Callable[[], NoticeReader]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
    return clouds[kind]() if kind in clouds else None


# --- Clouds

HOST = "169.254.169.254"
"""Link-local, and the same in the three clouds: what answers there is this machine's host."""
MAX_BYTES = 256 * 1024
"""Of an answer: Azure's document names every machine of a scale set."""
TIMEOUT_S = 1.0


@dataclass
class _Cloud(NoticeReader):
    server: Endpoint = field(default_factory=lambda: Endpoint(HOST, 80))

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> HttpReply:
        """Directly, and never through a proxy. Raises SourceFailed."""
        try:
            return request(
                self.server, path, time.monotonic, TIMEOUT_S, MAX_BYTES, method=method, headers=headers
            )
        except (OSError, NoAnswer) as error:
            raise SourceFailed(f"{path}: {error!r}") from error


def _wrong(path: str, reply: HttpReply) -> SourceFailed:
    return SourceFailed(f"{path}: status {reply.status}, {quoted(reply.body)}")


def _object(path: str, reply: HttpReply) -> dict[str, Any]:
    """Raises SourceFailed."""
    if reply.status == 200:
        with contextlib.suppress(Invalid):
            return load_object(reply.body, "the answer")
    raise _wrong(path, reply)


def _text(path: str, reply: HttpReply) -> str:
    """Raises SourceFailed."""
    if reply.status != 200 or not (text := reply.body.decode("latin-1").strip()):
        raise _wrong(path, reply)
    return text


TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
TOKEN_HEADER = "X-aws-ec2-metadata-token"


@dataclass
class Aws(_Cloud):
    """EC2. A token is good for 6 hours; the server forgets it earlier when the machine was paused."""

    _token: str = ""

    def poll(self) -> Notice | None:
        reply = self.ask(ACTION_PATH, {TOKEN_HEADER: self._token}) if self._token else HttpReply(401)
        if reply.status == 401:
            token = self.ask(TOKEN_PATH, {f"{TOKEN_HEADER}-ttl-seconds": "21600"}, "PUT")
            text = token.body.decode("latin-1").strip()
            if token.status != 200 or not re.fullmatch(r"[!-~]{1,512}", text):  # it may be secret: not shown
                raise SourceFailed(
                    f"{TOKEN_PATH}: status {token.status}, no token in {len(token.body)} bytes"
                )
            self._token = text
            reply = self.ask(ACTION_PATH, {TOKEN_HEADER: self._token})
        if reply.status == 404:  # it is not there until there is a notice
            return None
        answer = _object(ACTION_PATH, reply)
        if "action" not in answer:
            raise _wrong(ACTION_PATH, reply)
        action, at = (quoted(str(answer.get(name))) for name in ("action", "time"))
        return Notice(
            f"AWS interrupts this spot instance ({action}) at {at}", read_instant(answer.get("time"))
        )


PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"


class Gcp(_Cloud):
    """Compute Engine. A live migration only pauses the machine for a moment."""

    def poll(self) -> Notice | None:
        if self._says(PREEMPTED_PATH, "TRUE", "FALSE"):
            return Notice("Google preempts this machine", within_s=30.0)
        ends = "TERMINATE_ON_HOST_MAINTENANCE"
        if self._says(MAINTENANCE_PATH, ends, "NONE", "MIGRATE_ON_HOST_MAINTENANCE"):
            return Notice("Google ends this machine for the maintenance of its host", within_s=60.0)
        return None

    def _says(self, path: str, word: str, *others: str) -> bool:
        """The server's name is given, and not looked up."""
        reply = self.ask(path, {"Host": "metadata.google.internal", "Metadata-Flavor": "Google"})
        if (said := _text(path, reply)) not in (word, *others):
            raise _wrong(path, reply)
        return said == word


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


@dataclass
class Azure(_Cloud):
    """`_machine` is its name, as events have it."""

    _machine: str = ""

    def poll(self) -> Notice | None:
        """The event that ends this machine first. One that is not understood hides no other."""
        headers = {"Metadata": "true"}
        if not self._machine:
            self._machine = _text(NAME_PATH, self.ask(NAME_PATH, headers))
        reply = self.ask(EVENTS_PATH, headers)
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

MAX_CONTENTS = 4096


@dataclass
class WatchedFile(NoticeReader):
    """Looked at more often than a cloud: that costs a system call, and its notice may be short."""

    path: str
    interval_s = 0.25

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
    seconds = float(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text) else DEFAULT_S
    instant = read_instant(text)
    return Notice(f"{says}: this machine goes away", written_at + seconds if instant is None else instant)


# --- How sources write an instant


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


def quoted(raw: bytes | str) -> str:
    """A short, printable form for messages."""
    return repr(raw if len(raw) <= 80 else raw[:80])
