"""Notices that this machine goes away: of its cloud's metadata server, a file or a command, polled by one thread.

EC2 (IMDSv2): a spot instance is interrupted, two minutes ahead at best; we poll each second, as a part of them may have
passed already. A rebalance recommendation has no deadline, and may come for an instance that then lives on for days: it
counts only where the user has asked for that (`aws-rebalance`). Compute Engine: a preempted machine is told to shut
down 30 s before it is cut off; before a maintenance that ends it there are 60 s, with GPUs an hour, and as no answer
says which, the leave begins at once. Azure: the scheduled events of all machines of a scale set, each of which names
those that it concerns. No event is confirmed early (`StartRequests`): other programs may need the time.

A file that is there is a notice, and so is a command that ends with exit code 0, by what it has printed. The contents
are the deadline:

    (nothing)                 30 s from now on
    45                        so many seconds: of a file since it was written, of a command since it said so first
    1767323045                that instant (Unix time: ten digits)
    2026-01-02T03:04:05Z      that instant (RFC 3339)

Anything else counts as nothing: that a machine goes away matters more than how its end is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ...codec import Invalid, load_object
from ...rendezvous.records import Endpoint
from ...threads import Thread
from ..common.events import Event
from ..common.http_client import NoAnswer, Reply, request
from ..common.kernel_files import read
from ..configuration.values import NoticeSource

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
    within_s: float | None = DEFAULT_S
    """Without an instant: so long after the notice was first read; None: there is no deadline, and so no hurry."""

    def same(self, other: Notice) -> bool:
        if self.ends_at is None or other.ends_at is None:
            return self == other
        return abs(self.ends_at - other.ends_at) <= MAX_DIFFERENCE_S


class SourceFailed(Exception):
    """A source gives no answer; the text says why."""


class WrongAnswer(SourceFailed):
    """One that none of the source's answers looks like; the text quotes it."""


class Source(Protocol):
    """Of notices: a cloud, a file, a command."""

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
        """`noticed` is called in the main loop with the text, which says who says so, and the deadline, None where no
        instant is known; with None and None when the notice is withdrawn. `expected`: the user has named the source,
        and reads in the log that it gives no answer. A wrong answer is read there in any case."""
        self._source, self._noticed, self._post = source, noticed, post
        self._clock, self._wall_clock = clock, wall_clock
        self._expected = expected
        self._known: Notice | None = None
        self._logged = logging.NOTSET
        """The level at which the log has that the source fails."""
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
            self._warn(error)
        else:
            self._logged = logging.NOTSET
            self._see(notice)
        return self._source.interval_s

    def _see(self, notice: Notice | None) -> None:
        known, self._known = self._known, notice
        if notice is None:
            if known is not None:
                self._post(partial(self._noticed, None, None))
        elif known is None or not known.same(notice):
            left_s = notice.ends_at - self._wall_clock() if notice.ends_at is not None else notice.within_s
            deadline = self._clock() + max(MIN_LEFT_S, left_s) if left_s is not None else None
            self._post(partial(self._noticed, notice.text, deadline))

    def _warn(self, error: Exception) -> None:
        """Once for all troubles in a row, and again for one that more people are to read of."""
        defect = not isinstance(error, SourceFailed)
        wrong = defect or isinstance(error, WrongAnswer)
        level = logging.WARNING if self._expected or wrong else logging.DEBUG
        if level > self._logged:
            self._logged = level
            why = repr(error) if defect else error
            log.log(level, "a notice that this machine goes away would not be seen: %s", why, exc_info=defect)


# --- Which source

DMI = Path("/sys/class/dmi/id")
"""What the firmware says of this machine: it needs no network, and any user may read it."""
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Of each machine in Azure, and of no other one on Hyper-V."""

Tied: TypeAlias = Callable[[Sequence[str]], list[str]]
"""Makes of a command one that dies with this process."""


def detect_cloud(dmi: Path = DMI) -> str:
    """aws, gcp or azure; empty: none of them, and no server is asked."""
    vendor = read(dmi / "sys_vendor")
    if vendor == "Amazon EC2" or read(dmi / "bios_version").endswith(".amazon"):
        return "aws"
    if vendor == "Google" and read(dmi / "product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if read(dmi / "chassis_asset_tag") == AZURE_TAG else ""


def source_for(
    wanted: NoticeSource,
    environment: Mapping[str, str],
    tied: Tied,
    clock: Callable[[], float] = time.monotonic,
    dmi: Path = DMI,
) -> Source | None:
    """By --notice; None: there is nothing to look at. `environment` and `tied` are for a command."""
    kind = detect_cloud(dmi) if wanted.kind == "auto" else wanted.kind
    server = MetadataServer(clock)
    if kind in ("aws", "aws-rebalance"):
        return Aws(server, clock, leaves_on_rebalance=kind == "aws-rebalance")
    if kind == "gcp":
        return Gcp(server)
    if kind == "azure":
        return Azure(server)
    if kind == "file":
        return WatchedFile(wanted.path)
    return WatchedCommand(wanted.path, environment, tied) if kind == "command" else None


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


TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_TTL_S = 6 * 3600
TOKEN_HEADER = "X-aws-ec2-metadata-token"


@dataclass(slots=True)
class Aws:
    """A source. `clock` is monotonic."""

    server: MetadataServer
    clock: Callable[[], float]
    leaves_on_rebalance: bool = False
    interval_s: float = 1.0
    _token: str = ""
    _token_until: float = 0.0

    def poll(self) -> Notice | None:
        reply = self._get(ACTION_PATH)
        if reply.status != 404:  # it is not there until there is a notice
            action, at = _fields(reply, ACTION_PATH, "action", "time")
            if action not in ("terminate", "stop", "hibernate"):
                raise WrongAnswer(f"{ACTION_PATH}: action {quoted(action)}")
            return Notice(f"AWS interrupts this spot instance ({action}) at {at}", _instant(at, ACTION_PATH))
        if not self.leaves_on_rebalance or (reply := self._get(REBALANCE_PATH)).status == 404:
            return None
        (since,) = _fields(reply, REBALANCE_PATH, "noticeTime")
        _instant(since, REBALANCE_PATH)
        text = f"AWS recommends since {since} to replace this instance, which may be interrupted soon"
        return Notice(text, within_s=None)

    def _get(self, path: str) -> Reply:
        if self.clock() >= self._token_until:
            self._renew()
        reply = self.server.ask(path, {TOKEN_HEADER: self._token})
        if reply.status == 401:  # the server forgets tokens when the machine was paused
            self._renew()
            reply = self.server.ask(path, {TOKEN_HEADER: self._token})
        return reply

    def _renew(self) -> None:
        asked_at = self.clock()
        reply = self.server.ask(TOKEN_PATH, {f"{TOKEN_HEADER}-ttl-seconds": str(TOKEN_TTL_S)}, "PUT")
        token = reply.body.decode("latin-1").strip()
        if reply.status != 200 or not re.fullmatch(r"[!-~]{1,512}", token):  # it may be secret: not shown
            raise WrongAnswer(f"{TOKEN_PATH}: status {reply.status}, no token in {len(reply.body)} bytes")
        self._token, self._token_until = token, asked_at + TOKEN_TTL_S / 2


def _fields(reply: Reply, path: str, *names: str) -> list[str]:
    try:
        if reply.status != 200:
            raise Invalid(f"status {reply.status}")
        values = [load_object(reply.body, "the answer").get(name) for name in names]
    except Invalid as error:
        raise WrongAnswer(f"{path}: {error}, {quoted(reply.body)}") from None
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(names):
        raise WrongAnswer(f"{path}: texts {' and '.join(names)} are missing, {quoted(reply.body)}")
    return texts


def _instant(text: str, path: str) -> float:
    try:
        return read_rfc3339(text)
    except ValueError:
        raise WrongAnswer(f"{path}: {quoted(text)} is no instant") from None


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
        ours = (reply.headers or {}).get("metadata-flavor") == "Google"
        if reply.status != 200 or word not in expected or not ours:
            kind = "" if ours else " without Metadata-Flavor: Google"
            raise WrongAnswer(f"{path}: status {reply.status}{kind}, {quoted(reply.body)}")
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
        """The event that ends this machine first."""
        self._machine = self._machine or self._name()
        reply = self.server.ask(EVENTS_PATH, {"Metadata": "true"})
        try:
            if reply.status != 200:
                raise Invalid(f"status {reply.status}")
            notices = list(self._events(load_object(reply.body, "the answer")))
        except Invalid as error:
            raise WrongAnswer(f"{EVENTS_PATH}: {error}, {quoted(reply.body)}") from None
        # Those without an instant come first.
        return min(notices, key=lambda notice: notice.ends_at or 0.0, default=None)

    def _name(self) -> str:
        reply = self.server.ask(NAME_PATH, {"Metadata": "true"})
        name = reply.body.decode("latin-1").strip()
        if reply.status != 200 or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
            raise WrongAnswer(f"{NAME_PATH}: status {reply.status}, {quoted(reply.body)}")
        return name

    def _events(self, document: Mapping[str, Any]) -> Iterator[Notice]:
        """Of this machine. An event that is not understood hides no other. Raises Invalid."""
        events = document.get("Events")
        if not isinstance(events, list):
            raise Invalid("Events are no list")
        for event in events:
            fields = event if isinstance(event, dict) else {}
            resources, kind, at = fields.get("Resources"), fields.get("EventType"), fields.get("NotBefore")
            ours = isinstance(resources, list) and self._machine in resources
            coming = fields.get("EventStatus") in ("Scheduled", "Started")
            if ours and coming and isinstance(kind, str) and kind in ENDS:
                when = f"not before {quoted(str(at))}" if at else "now"
                yield Notice(f"{ENDS[kind]}, {when}", read_http_date(at), BEGUN_S)


# --- A file, a command

MAX_CONTENTS, FILE_INTERVAL_S = 4096, 0.25
SETTLED_S = 1.0
"""A shell's `tool > PATH` makes the file empty first, and the tool writes later."""
COMMAND_S, KILLED_S = 5.0, 1.0
"""A command that takes longer is killed, and has said nothing; and after SIGKILL, which one under sudo does not get."""


def read_end(text: str) -> tuple[str, float | None, float] | None:
    """In words, as Unix time and as a length of time; None: it is neither seconds nor an instant."""
    if re.fullmatch(r"[0-9]{1,10}(\.[0-9]{0,9})?", text):
        number = float(text)
        if number < 1e9:  # else it is Unix time
            return f"within {text} s", None, number
        instant = datetime.fromtimestamp(number, timezone.utc)
        return f"at {instant:%Y-%m-%dT%H:%M:%SZ}", number, DEFAULT_S
    try:
        return f"at {text}", read_rfc3339(text), DEFAULT_S
    except ValueError:
        return None


def read_contents(raw: bytes, said_by: str, since: float | None = None) -> Notice:
    """`since`: the Unix time from which seconds count; None: since the notice is first read."""
    text = raw.decode("latin-1").strip()
    reason = f", as {quoted(text)} is neither seconds nor an instant" if text else ""
    words, at, within_s = read_end(text) or (f"within {DEFAULT_S:g} s{reason}", None, DEFAULT_S)
    ends_at = since + within_s if at is None and since is not None else at
    return Notice(f"{said_by} says that this machine goes away {words}", ends_at, within_s)


@dataclass(slots=True)
class WatchedFile:
    """A source. `wall_clock` counts as the file's times do."""

    path: str
    wall_clock: Callable[[], float] = time.time
    interval_s: float = FILE_INTERVAL_S

    def poll(self) -> Notice | None:
        """Contents that name no end are no notice yet just after they were written: the rest may follow."""
        found = self._read()
        if found is None:
            return None
        raw, written_at = found
        fresh = 0.0 <= self.wall_clock() - written_at < SETTLED_S
        if fresh and read_end(raw.decode("latin-1").strip()) is None:
            return None
        return read_contents(raw, f"the file {self.path}", written_at)

    def _read(self) -> tuple[bytes, float] | None:
        """Its beginning, and when it was written. None: it is not there. Raises SourceFailed."""
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # to open a device may do something
                raise SourceFailed(f"{self.path} is no regular file")
            with open(self.path, "rb") as file:
                return file.read(MAX_CONTENTS), os.fstat(file.fileno()).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceFailed(f"{self.path}: {error.strerror}") from error


@dataclass(slots=True)
class WatchedCommand:
    """A source: a program without arguments."""

    program: str
    environment: Mapping[str, str]
    tied: Tied
    interval_s: float = 5.0
    _left: subprocess.Popen[bytes] | None = field(default=None, compare=False)
    """It could not be killed. No other is started beside it."""

    def poll(self) -> Notice | None:
        left, self._left = self._left, None
        if left is not None and left.poll() is None:
            self._left = left
            raise SourceFailed(f"{self.program} (pid {left.pid}) has not ended, and cannot be killed")
        code, printed = self._run()
        if code is None:
            raise SourceFailed(f"{self.program} has not ended within {COMMAND_S:g} s, or prints too much")
        if code in (126, 127):  # of the shim, as of shells
            raise SourceFailed(f"{self.program} cannot be started, or a command in it: exit code {code}")
        return read_contents(printed, f"the command {self.program}") if code == 0 else None

    def _run(self) -> tuple[int | None, bytes]:
        """Its exit code, None if it has not ended in time; and what is in the pipe then, without waiting for the end
        of the pipe, which a child of it may hold open. Raises SourceFailed."""
        try:
            process = subprocess.Popen(
                self.tied([self.program]),
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise SourceFailed(f"{self.program} cannot be started: {error.strerror}") from error
        assert process.stdout is not None
        with process.stdout as pipe:
            try:
                code = process.wait(COMMAND_S)
                os.set_blocking(pipe.fileno(), False)
                with contextlib.suppress(BlockingIOError):
                    return code, os.read(pipe.fileno(), MAX_CONTENTS)
                return code, b""
            except subprocess.TimeoutExpired:
                return None, b""
            finally:
                self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """And what it has left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            self._left = process


# --- How sources write an instant


def read_rfc3339(text: str) -> float:
    """Unix time, to the second before. Raises ValueError.

    >>> read_rfc3339("2026-01-02T03:04:05Z") - read_rfc3339("2026-01-02T03:04:05.9+01:00")
    3600.0
    """
    text = re.sub(r"\.\d+(?=[Zz+-])", "", text)  # Python 3.10 reads 3 or 6 digits of a second alone
    found = datetime.fromisoformat(re.sub("[Zz]$", "+00:00", text))
    if found.tzinfo is None:
        raise ValueError("no instant of RFC 3339")
    return found.timestamp()


def read_http_date(given: object) -> float | None:
    """Unix time of "Mon, 19 Sep 2016 18:29:47 GMT"; None for what is no date of HTTP."""
    try:
        return parsedate_to_datetime(given).timestamp() if isinstance(given, str) else None
    except (TypeError, ValueError, OverflowError, IndexError):
        return None


def quoted(raw: bytes | str) -> str:
    """A short, printable form for messages."""
    return repr(raw if len(raw) <= 80 else raw[:80])
