"""Keeps evidence of workers that seem to hang: a thread looks at them, and writes files of the run.

    DIR/<job>-<run>/gen<generation>/evidence/<node>/<number>-<why>/{summary,rank<rank>}.txt

A look is begun at an inquiry, while the workers run on, or before they are ended, which waits for it for a bounded
time. The same thread writes the files after that; `where` says what became of them. Only this user can read them:
stacks show more of a program than its log does. They are deleted with the folder of the generation.

For the main thread. One look at a time: where the kernel holds one up, there is no second. Where a disk holds up the
files of one, the next ones have no files: what the workers do is known all the same.

A part of a look are the dumps of torch's flight recorder: which collective each rank has entered last. For NCCL torch
makes a pipe for each rank, and a byte in it is the order: a thread of torch reads the pipe once a second, and writes
the dump beside it, also while the main thread waits. The first dump takes a second more. On gloo there is no pipe: its
records can be read by the process itself alone. torch needs Python's lock for a dump, and a thread that takes it while
faulthandler writes the stacks of all threads may end the process: so the order comes when the stacks of a look are
written. A dump is a pickle that a worker has written: only plain values are read from it, and what is not as torch
writes it is refused. It lists the rank's newest operations, each with its process group, the number that all ranks of
the group count alike, and its state.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...codec import Invalid
from ...health.hang_report import LABEL, LOOK_S, MAX_GROUPS, InGroup, RankReport, Recorded
from ...threads import Thread
from ..output.log_files import FLIGHT_RECORDS, run_folder
from ..output.masking import masked
from .processes.proc import open_here
from .rank_activity import Target, look_at, one_line, rank_state, report

log = logging.getLogger(__name__)

MOST_LOOKS = 8
"""Of one generation, that are kept: a job whose suspicions are never confirmed fills no disk."""

READ_S = 0.1
"""So long before a look must be over it waits no more for the flight recorder's dumps."""

CLOSE_S = 1.0
"""At the end the last files have so long."""


@dataclass(slots=True, eq=False)
class Evidence:
    """One that was begun."""

    path: Path | None
    """Where its files are, or will be; None: there are none."""
    began_at: float
    states: tuple[RankReport, ...] = ()
    """What the workers do; empty until it is over."""
    over: bool = False
    """The workers may be ended."""

    def end(self, states: tuple[RankReport, ...] = ()) -> None:
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
        self._newest: Evidence | None = None
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
        then: Callable[[Evidence], None] = lambda look: None,
    ) -> Evidence:
        """Begins one at these workers; `why` is a part of its folder's name. In another thread, `then` is called when
        it is over."""
        writing = self._thread is not None and self._thread.is_alive()
        look = Evidence(None if writing else self._next_path(why), self._clock())
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
        look: Evidence,
        targets: tuple[Target, ...],
        then: Callable[[Evidence], None],
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


COMES_WITHIN_S = 4.0
"""A dump that comes later is not read; less than the shortest pause between two inquiries."""
NEWEST_S = 60.0
"""What a recorder showed longer ago is not told of its rank any more."""
PAUSE_S = 0.05
"""Between two looks at the folder."""
MOST_BYTES = 16 * 2**20
"""Of one dump."""

_VERSION = re.compile(r"2\.\d+")
_RANKS = re.compile(r"\[[0-9]+(, ?[0-9]+)*\]")
_WORLD = "default_pg"
"""torch's description of the group of all ranks."""
_NO_LABEL = re.compile(r"[^ !#-\[\]-~]")
_MOST_NUMBER = 2**63 - 1
_MOST_NAME = 200


def ask(generation: Path, rank: int) -> bool:
    """Whether the recorder of this rank takes the order. `generation` is its folder."""
    try:
        pipe = open_here(f"{generation}/{FLIGHT_RECORDS}/pipe_{rank}.pipe", os.O_WRONLY)
    except OSError:
        return False  # no rank of NCCL, or one that has ended
    try:
        return os.write(pipe, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(pipe)


# --- What a dump says


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise Invalid(f"a flight record that names {module}.{name}, which is no plain value")


def read_pickle(data: bytes) -> Any:
    """Numbers, texts, lists, tuples and dicts. Nothing is imported or called. Raises Invalid, never anything else."""
    if len(data) > MOST_BYTES:
        raise Invalid(f"a flight record of {len(data)} bytes, at most {MOST_BYTES} are read")
    try:
        return _Plain(io.BytesIO(data)).load()
    except Exception as error:  # whatever a broken pickle makes the reader raise
        raise Invalid(f"a flight record that is no pickle of plain values: {error}") from error


@dataclass(slots=True)
class _Group:
    """The operations of one group, in the order in which the rank has called them."""

    label: str
    size: int | None
    entered: int = 0
    name: str = ""
    """Of the newest."""
    waits_in: tuple[int, str] | None = None
    """The first that has not ended of those behind the newest that has: a group's operations end in their order. What
    torch has only noted, such as the parts of a batch, never ends by itself."""

    def add(self, number: int, name: str, *, ended: bool) -> None:
        self.entered, self.name = max(self.entered, number), name
        self.waits_in = None if ended else self.waits_in or (number, name)

    @property
    def told(self) -> InGroup:
        number, name = self.waits_in or (None, self.name)
        return InGroup(self.label, self.size, self.entered, number, name)


def groups_of(dump: Any) -> tuple[InGroup, ...]:
    """What a dump shows of its rank. Groups of which it shows no operation are left out: the recorder keeps the newest
    operations only. So are those that cannot be compared between ranks, unless the rank waits there. Raises Invalid."""
    if not _VERSION.fullmatch(_of(dump, "version", str)):
        raise Invalid(f"a flight record of version {dump['version']!r:.40}, expected 2.x")
    config = _of(dump, "pg_config", dict)
    found: dict[tuple[str, bool], _Group] = {}
    for entry in _of(dump, "entries", list):
        group = _of(entry, "process_group", tuple)
        if len(group) != 2 or not all(isinstance(text, str) for text in group):
            raise Invalid("a flight record with a process group that is no pair of texts")
        between_two = _of(entry, "is_p2p", bool)
        number = _of(entry, "p2p_seq_id" if between_two else "collective_seq_id", int)
        if not 0 <= number <= _MOST_NUMBER:
            raise Invalid(f"a flight record with an operation of number {number}")
        ended = _of(entry, "state", str) == "completed" or _of(entry, "retired", bool)
        key = group[0], between_two
        known = found.pop(key, None) or _group(group, config, between_two=between_two)
        found[key] = known  # the last is the one that was used last
        name = _of(entry, "profiling_name", str)[:_MOST_NAME]  # all entries may share one of many megabytes
        known.add(number, _label(name.rpartition(":")[2]), ended=ended)
    newest_first = [known.told for known in reversed(found.values()) if known.size != 0 or known.waits_in]
    return tuple(sorted(newest_first, key=lambda one: one.waits_in is None)[:MAX_GROUPS])


def _group(group: tuple[str, str], config: Mapping[Any, Any], *, between_two: bool) -> _Group:
    """Of size 0 also if its ranks are not known: groups of other ranks may have the same name."""
    name, description = (text[:_MOST_NAME] for text in group)
    if between_two:
        return _Group(_label(f"{name} (send, recv)"), 0)
    if description == _WORLD:
        return _Group(_WORLD, None)
    told = config.get(group[0])
    ranks = told.get("ranks") if isinstance(told, dict) else None
    if not isinstance(ranks, str) or not _RANKS.fullmatch(ranks):
        return _Group(_label(f"{name} (ranks not known)"), 0)
    members = ranks.replace(" ", "")
    shown = name if description == "undefined" else f"{description} {name}"
    # Of a long description the name is not in what is shown.
    known_by = zlib.crc32(f"{name} {description} {members}".encode())
    return _Group(f"{_label(shown)[:32]} #{known_by:08x}", members.count(",") + 1)


def _of(mapping: Any, key: str, kind: type) -> Any:
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if type(value) is not kind:
        raise Invalid(f"a flight record whose {key} is a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _label(text: str) -> str:
    label = _NO_LABEL.sub("?", text[:48]) or "?"
    assert LABEL.fullmatch(label)
    return label


# --- From the order to the dump


@dataclass(frozen=True, slots=True)
class _Shown:
    """The newest that is known of one rank. Instants are monotonic."""

    groups: tuple[InGroup, ...]
    noticed_at: float
    """When it was first seen to be just this."""
    asked_at: float
    """The newest order that had this answer: so it was still this later than then."""


class FlightRecords:
    """Of one generation. Who orders is one thread at a time; who reads what has come, any."""

    def __init__(self, generation: Path, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """`generation` is its folder."""
        self._generation = generation
        self._clock = clock
        self._sleep = sleep
        self._shown: Mapping[int, _Shown] = {}

    def recorded(self, since: float) -> dict[int, Recorded]:
        """By rank, what has come lately: fresh is what was ordered since that instant."""
        now = self._clock()
        return {
            rank: Recorded(max(0.0, one.asked_at - one.noticed_at), one.asked_at >= since, one.groups)
            for rank, one in self._shown.items()
            if now - one.asked_at <= NEWEST_S and one.groups
        }

    def order(self, ranks: Sequence[int]) -> None:
        """Ask these ranks, and wait for the dumps of those that take the order. In a thread of its own: a disk may
        stand still."""
        asked_at = self._clock()
        seen = {rank: self._version(rank) for rank in ranks}
        missing = {rank for rank in ranks if ask(self._generation, rank)}
        while missing and self._clock() < asked_at + COMES_WITHIN_S:
            self._sleep(PAUSE_S)
            for rank in sorted(missing):
                before, seen[rank] = seen[rank], self._version(rank)
                if seen[rank] in (None, before):
                    continue
                try:
                    with open(self._path(rank), "rb", opener=open_here) as file:
                        groups = groups_of(read_pickle(file.read(MOST_BYTES + 1)))
                except (Invalid, OSError):
                    continue  # torch may still be writing it
                known = self._shown.get(rank)
                noticed_at = known.noticed_at if known and known.groups == groups else self._clock()
                self._shown = {**self._shown, rank: _Shown(groups, noticed_at, asked_at)}
                missing.remove(rank)

    def _path(self, rank: int) -> Path:
        return self._generation / FLIGHT_RECORDS / f"rank_{rank}"

    def _version(self, rank: int) -> tuple[int, int, int] | None:
        try:
            found = self._path(rank).lstat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
