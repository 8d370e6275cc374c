"""The journal of this agent: the newest events of the job in memory, all of them in a file.

Any thread may note an event, and never waits for the disk. Secrets are masked before an event is kept: the folder of a
run is read where their values are not known. Events that come before the run has a folder are written to
the file once it has one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, takewhile
from pathlib import Path

from ....rendezvous.text import clean
from ...output.masking import masked
from .event_file import EventFile
from .events import EVENT, MAX_EVENT_TEXT, ROUTINE, JobEvent, Kind, rounded

KEPT_EVENTS = 2048
"""Events that are kept in memory, and a quarter as many of the `ROUTINE` kinds."""
_MOST_CAUSE = 64


class Journal:
    def __init__(
        self,
        node: str,
        wall_clock: Callable[[], float],
        file: EventFile | None = None,
        kept: int = KEPT_EVENTS,
        secrets: Collection[str] = (),
    ) -> None:
        """Without a `file` the events are in memory alone. `secrets` are known values, which no event has."""
        self.node = node
        self._secrets = secrets
        self._wall_clock = wall_clock
        self._file = file
        self._lock = threading.Lock()
        self._changes: deque[JobEvent] = deque(maxlen=kept)
        self._routine: deque[JobEvent] = deque(maxlen=max(1, kept // 4))
        """Events of `ROUTINE` kinds: a week of them must not push out the other events."""
        self._number = 0
        self._generation = 0
        self._folder: Path | None = None
        self._heard: tuple[Callable[[], None], ...] = ()

    def listen(self, heard: Callable[[], None]) -> None:
        """`heard` is called after each event, in the thread that notes it: it must not wait."""
        self._heard = (*self._heard, heard)

    def start(self) -> None:
        if self._file is not None:
            self._file.start()

    def close(self) -> None:
        if self._file is not None:
            self._file.end()

    def begin(self, folder: Path) -> None:
        """From now on events go to a file in this run's folder. A call with the same folder does nothing."""
        with self._lock:
            if self._file is None or folder == self._folder:
                return
            first, self._folder = self._folder is None, folder
            self._file.open(folder, self.node)
            known = sorted((*self._changes, *self._routine), key=_number) if first else ()
            for event in known:
                self._file.write(EVENT.encode(event))

    def note(
        self,
        kind: Kind,
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
            if kind is Kind.WORLD:
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
            if self._file is not None and self._folder is not None:
                self._file.write(EVENT.encode(event))
        for heard in self._heard:
            heard()

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

    def newest_of(self, changes: int, routine: int) -> tuple[JobEvent, ...]:
        """The newest events in memory, in order: at most `routine` of `ROUTINE` kinds and `changes` of the others."""
        with self._lock:
            kept = (list(self._changes)[-changes:], list(self._routine)[-routine:])
        return tuple(sorted(chain(*kept), key=_number))


def _number(event: JobEvent) -> int:
    return event.number


def _above(events: deque[JobEvent], number: int) -> Iterator[JobEvent]:
    """The events with a higher number, the newest first."""
    return takewhile(lambda event: event.number > number, reversed(events))
