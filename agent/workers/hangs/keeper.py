"""Keeps evidence of workers that seem to hang: a thread looks at them, and writes files of the run.

    DIR/<job>-<run>/gen<generation>/evidence/<node>/<number>-<why>/{summary,rank<rank>}.txt

A look is begun at an inquiry, while the workers run on, or before they are ended, which waits for it for a bounded
time. The same thread writes the files after that; `where` says what became of them. Only this user can read them:
stacks show more of a program than its log does. They are deleted with the folder of the generation.

For the main thread. One look at a time: where the kernel holds one up, there is no second. Where a disk holds up the
files of one, the next ones have no files: what the workers do is known all the same.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ....health.hang_report import LOOK_S, RankState, Recorded
from ....threads import Thread
from ...output.log_files import run_folder
from ...output.masking import masked
from .facts import Target, look_at
from .flight_records import FlightRecords
from .testimony import one_line, rank_state, report

log = logging.getLogger(__name__)

MOST_LOOKS = 8
"""Of one generation, that are kept: a job whose suspicions are never confirmed fills no disk."""

READ_S = 0.1
"""So long before a look must be over it waits no more for the flight recorder's dumps."""

CLOSE_S = 1.0
"""At the end the last files have so long."""


@dataclass(slots=True, eq=False)
class Look:
    """One that was begun."""

    path: Path | None
    """Where its files are, or will be; None: there are none."""
    began_at: float
    states: tuple[RankState, ...] = ()
    """What the workers do; empty until it is over."""
    over: bool = False
    """The workers may be ended."""

    def end(self, states: tuple[RankState, ...] = ()) -> None:
        self.states, self.over = states, True


class EvidenceKeeper:
    def __init__(
        self,
        node: str,
        directory: Path | None,
        clock: Callable[[], float],
        secrets: Collection[str] = (),
    ) -> None:
        """Below `directory` are the folders of runs; None: there are no files. `secrets`: known values, which no file
        has."""
        self._node = node
        self._directory = directory
        self._clock = clock
        self._secrets = secrets
        self._run: Path | None = None
        self._generation = 0
        self._looks = 0
        self._thread: Thread | None = None
        """Of the newest look that has files: it writes them after that."""
        self._records: FlightRecords | None = None
        self._asking: Thread | None = None
        self._newest: Look | None = None
        self._failing = False

    def begin(self, job: str, run: str, generation: int) -> None:
        """A generation starts here."""
        self._run = run_folder(self._directory.absolute(), job, run) if self._directory is not None else None
        self._generation, self._looks = generation, 0
        folder = self.folder.parent if self.folder is not None else None
        self._records = FlightRecords(folder, self._clock, time.sleep) if folder is not None else None

    @property
    def folder(self) -> Path | None:
        """Of this generation, with a folder for each node whose disk this is; None: there are no files."""
        return self._run / f"gen{self._generation}" / "evidence" if self._run is not None else None

    def where(self) -> str:
        """The evidence of this generation, for people: its folder, if something was written there, or will be."""
        folder = self.folder
        return str(folder) if folder is not None and self._looks and not self._failing else ""

    def look(
        self,
        why: str,
        targets: Sequence[Target],
        then: Callable[[Look], None] = lambda look: None,
    ) -> Look:
        """Begins one at these workers; `why` is a part of its folder's name. In another thread, `then` is called when
        it is over."""
        writing = self._thread is not None and self._thread.is_alive()
        look = Look(None if writing else self._next_path(why), self._clock())
        if self._newest is not None and not self._newest.over:
            look.end()
            then(look)
            return look
        self._newest = look
        work = partial(self._look, look, tuple(targets), then, self._generation, self._records)
        thread = Thread(work, "evidence", otherwise=look.end)
        if not writing:
            self._thread = thread
        thread.start()
        return look

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _next_path(self, why: str) -> Path | None:
        folder = self.folder
        if folder is None or self._looks >= MOST_LOOKS:
            return None
        self._looks += 1
        return folder / self._node / f"{self._looks}-{why}"

    # All below is of the thread.

    def _look(
        self,
        look: Look,
        targets: tuple[Target, ...],
        then: Callable[[Look], None],
        generation: int,
        records: FlightRecords | None,
    ) -> None:
        seen = look_at(targets, self._clock, time.sleep)
        if records is not None:
            recorded = self._recorded(records, targets, look.began_at + LOOK_S - READ_S)
            seen = tuple(replace(one, recorded=recorded.get(one.target.rank)) for one in seen)
        states = tuple(map(rank_state, seen))
        look.end(states)
        then(look)
        texts = {
            f"rank{one.target.rank}.txt": report(one, state, self._node, generation)
            for one, state in zip(seen, states, strict=True)
        }
        texts["summary.txt"] = "".join(f"{one_line(state)}\n" for state in states)
        if targets and look.path is not None:
            self._write(look.path, texts)

    def _recorded(
        self, records: FlightRecords, targets: Sequence[Target], until: float
    ) -> dict[int, Recorded]:
        """Ordered only now, when all stacks are written; in a thread of its own, for a disk may stand still."""
        asked_at = self._clock()
        if self._asking is None or not self._asking.is_alive():
            order = partial(records.order, [one.rank for one in targets])
            self._asking = Thread(order, "evidence", lambda: None)
            self._asking.start()
            self._asking.join(max(0.0, until - self._clock()))
        return records.recorded(asked_at)

    def _write(self, path: Path, texts: dict[str, str]) -> None:
        try:
            _make_private(path)
            for name, text in texts.items():
                _write_private(path / name, masked(text, self._secrets).encode(errors="backslashreplace"))
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._failing = True
                log.warning(
                    "evidence is not kept in %s: %s; make room, or set another --log-dir", path, error
                )


def _make_private(path: Path) -> None:
    """The folders of the run and the generation are as the logs have them; the last three are this user's alone."""
    path.parents[2].mkdir(parents=True, exist_ok=True)
    for folder in (path.parents[1], path.parent, path):
        folder.mkdir(mode=0o700, exist_ok=True)


def _write_private(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as opened:
        opened.write(data)
