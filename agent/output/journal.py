"""The journal of this agent: the newest events of the job in memory, all of them in a file.

An event is one JSON object a line, a published format that other programs read, too:

    {"schema":1,"number":7,"at":1790000000.1,"node":"b","generation":2,"kind":"failure","rank":3,"about":"b",
     "cause":"exit_code","text":"exit code 1: ValueError: lr < 0","seconds":{},"counts":{}}

A reader skips lines that it cannot read: of a kind or a schema that it does not know, or cut short by a full disk.

Any thread may note an event, and never waits for the disk. Secrets are masked before an event is kept: the folder of a
run is read where their values are not known. Events that come before the run has a folder are written to the file once
it has one.

The thread of `log_files` writes the file, `events-<node>.jsonl` in the folder of the run. While the disk is full or
does not answer, events that find no room in the queue are dropped and counted; nothing else suffers. The file is
bounded: when it is full, it is renamed to `events-<node>.jsonl.1` and replaces the older one of that name. Beside it
lie small files about this node's part in the run, such as its settings, for this user alone.
"""

from __future__ import annotations

import enum
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated

from ...codec import Count, Document, Invalid, Positive, Seconds, Within
from ...rendezvous.text import Name, clean, line
from .log_files import OLDER, LogFile, LogFiles
from .masking import masked

log = logging.getLogger(__name__)

EVENTS_PATH = "/events"
"""The path of an agent's newest events: `{"schema", "job", "node", "incarnation", "newest", "events"}`."""

SCHEMA = 1
MAX_EVENT_TEXT = 1000
MAX_EVENT_CHARS = 16 * 1024
"""The longest line."""


class EventKind(enum.Enum):
    AGENT_STARTED = "agent_started"
    """One life of this node's agent begins; numbers count from here."""
    WORLD = "world"
    """A generation is formed. `text` says why the one before ended, `cause` is the name of that reason."""
    FAILURE = "failure"
    """The failure that ends a generation; the agents of all members write it."""
    SUSPICION = "suspicion"
    """The workers of the node `about` seem to hang."""
    VERDICT = "verdict"
    """The result of an inquiry into a hang: `rank` and `about` are the guilty rank and its node, if one is found;
    `cause` is the finding."""
    EXCLUSION = "exclusion"
    """The node `about` is excluded from the next worlds, which `counts` has as its `times`-th exclusion. An agent that
    comes later notes those in force once more."""
    READMISSION = "readmission"
    STRAGGLER = "straggler"
    """The rank `rank` of the node `about` is slower than the others."""
    NOTICE = "notice"
    """The cloud or scheduler is about to take this machine away, or has withdrawn that notice."""
    DRAIN = "drain"
    """A planned change: workers end between two steps."""
    LOAD = "load"
    """`cause` is the tier; `counts` has the `step`."""
    RECOVERY = "recovery"
    """Training goes on. `seconds` by phase (`training_account.PHASES`)."""
    ACCOUNTING = "accounting"
    """Totals since the start of this agent, written each minute, whenever workers begin or cease to step, and at the
    end: `seconds` of each `training_account.Activity`, and those of them for which training stood still for saves
    (`blocked`); `counts` of `steps`, `steps_redone`, and of `saves` and `saves_failed` to disk."""
    JOB_ENDED = "job_ended"
    """`cause` is the result."""
    AGENT_ENDED = "agent_ended"
    """`counts` has the exit `code`."""


ROUTINE = frozenset({EventKind.LOAD, EventKind.ACCOUNTING})
"""Kinds that come again and again in a job that goes well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    number: Positive
    """Counts the events of one life of an agent from 1; a gap means that an event was dropped."""
    at: Annotated[float, Within(0, 2**40)]
    """Seconds since the epoch, by the wall clock of `node`. The clocks of two nodes may differ."""
    node: Name
    """The node whose agent writes."""
    generation: Count
    """0 before the first."""
    kind: EventKind
    rank: Count | None = None
    about: Annotated[str, line(128)] = ""
    """The node that the event is about; empty: none, or the job."""
    cause: Annotated[str, line(64)] = ""
    text: Annotated[str, line(MAX_EVENT_TEXT)]
    """A sentence for a person."""
    seconds: dict[Name, Seconds] = field(default_factory=dict)
    counts: dict[Name, Count] = field(default_factory=dict)


EVENT = Document(JobEvent, SCHEMA, MAX_EVENT_CHARS, version_key="schema")


def read_events(lines: Iterable[str]) -> Iterator[JobEvent]:
    """The events in these lines, without lines that cannot be read."""
    for text in lines:
        try:
            yield EVENT.decode(text)
        except Invalid:
            continue


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


MAX_FILE_BYTES = 8 * 1024 * 1024
_BESIDE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC

_NAME = re.compile(r"events-(.+)\.jsonl")


def file_name(node: str) -> str:
    return f"events-{node}.jsonl"


def journals(folder: Path) -> dict[str, tuple[Path, ...]]:
    """The files of each node in the folder of a run, the older part first. Raises OSError."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if match := _NAME.fullmatch(name):
            both = (folder / f"{name}{OLDER}", folder / name)
            if parts := tuple(part for part in both if part.is_file()):
                found[match[1]] = parts
    return found


def read_file(path: Path) -> Iterator[JobEvent]:
    """The events that can be read. Raises OSError."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from read_events(iter(lambda: file.readline(2 * MAX_EVENT_CHARS), ""))


KEPT_EVENTS = 2048
"""Events that are kept in memory, and a quarter as many of the `ROUTINE` kinds."""
_MOST_CAUSE = 64


class Journal:
    def __init__(
        self,
        node: str,
        wall_clock: Callable[[], float],
        files: LogFiles | None = None,
        kept: int = KEPT_EVENTS,
        secrets: Collection[str] = (),
        beside: Mapping[str, str] = {},
        count_lost: Callable[[], object] = lambda: None,
    ) -> None:
        """Without `files` the events are in memory alone. `secrets` are known values, which no event has. `beside`:
        names and texts of the other files. `count_lost` is called for each event that is not written."""
        self.node = node
        self._secrets = secrets
        self._wall_clock = wall_clock
        self._files = files
        self._file: LogFile | None = None
        self._beside = beside
        self._count_lost = count_lost
        self._lock = threading.Lock()
        self._changes: deque[JobEvent] = deque(maxlen=kept)
        self._routine: deque[JobEvent] = deque(maxlen=max(1, kept // 4))
        """Events of `ROUTINE` kinds: a week of them must not push out the other events."""
        self._number = 0
        self._generation = 0
        self.run = ""
        """The job's run, once it is known."""

    def begin(self, folder: Path) -> None:
        """From now on events go to a file in this run's folder. A call with the same folder does nothing."""
        files, path = self._files, folder / file_name(self.node)
        with self._lock:
            before = self._file
            if files is None or (before is not None and before.path == path):
                return
            files.begin(folder)
            if before is not None:
                files.finish(before)
            file = self._file = LogFile(
                path, lambda size: self._count_lost(), most_bytes=MAX_FILE_BYTES, by_lines=True
            )
            known = sorted((*self._changes, *self._routine), key=_number) if before is None else ()
            for event in known:
                self._write(file, event)
            files.do(partial(_write_beside, folder, self._beside))

    def _write(self, file: LogFile, event: JobEvent) -> None:
        if self._files is not None:
            self._files.save(file, EVENT.encode(event).encode(errors="replace") + b"\n")

    def note(
        self,
        kind: EventKind,
        text: str,
        *,
        generation: int | None = None,
        rank: int | None = None,
        about: str = "",
        cause: str = "",
        seconds: Mapping[str, float] = {},
        counts: Mapping[str, int] = {},
    ) -> None:
        """`generation` defaults to that of the newest world. `about`: the node that the event is about."""
        text = masked(clean(text), self._secrets)[:MAX_EVENT_TEXT]
        with self._lock:
            self._number += 1
            of = self._generation if generation is None else generation
            if kind is EventKind.WORLD:
                self._generation = of
            event = JobEvent(
                number=self._number,
                at=round(self._wall_clock(), 3),
                node=self.node,
                generation=of,
                kind=kind,
                rank=rank,
                about=clean(about)[:128],
                cause=clean(cause)[:_MOST_CAUSE],
                text=text,
                seconds=rounded(seconds),
                counts=dict(counts),
            )
            (self._routine if kind in ROUTINE else self._changes).append(event)
            if self._file is not None:
                self._write(self._file, event)

    @property
    def generation(self) -> int:
        """The generation of the newest world; 0 before the first."""
        return self._generation

    @property
    def newest(self) -> int:
        """The number of the newest event; 0 before the first."""
        return self._number

    def since(self, number: int, most: int) -> tuple[JobEvent, ...]:
        """The events in memory with a higher number, at most the `most` oldest of them."""
        with self._lock:
            return tuple(
                sorted((*_above(self._changes, number), *_above(self._routine, number)), key=_number)[:most]
            )


def _write_beside(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        with suppress(OSError):  # as of another user, from an earlier life: the events matter more
            fd = os.open(folder / name, _BESIDE, 0o600)
            with open(fd, "wb") as beside:
                beside.write(f"{text}\n".encode(errors="backslashreplace"))


def _number(event: JobEvent) -> int:
    return event.number


def _above(events: deque[JobEvent], number: int) -> Iterator[JobEvent]:
    """The events with a higher number, the newest first."""
    return takewhile(lambda event: event.number > number, reversed(events))
