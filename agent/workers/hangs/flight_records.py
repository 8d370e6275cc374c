"""Asks torch's flight recorder for its dumps, and reads from them which collective each rank has entered last.

For NCCL torch makes a pipe for each rank, and a byte in it is the order: a thread of torch reads the pipe once a
second, and writes the dump beside it, also while the main thread waits. The first dump takes a second more. On gloo
there is no pipe: its records can be read by the process itself alone.

torch needs Python's lock for a dump, and a thread that takes it while faulthandler writes the stacks of all threads may
end the process: so the order comes when the stacks of a look are written.

A dump is a pickle that a worker has written: only plain values are read from it, and what is not as torch writes it is
refused.
It lists the rank's newest operations, each with its process group, the number that all ranks of the group count alike,
and its state.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....codec import Invalid
from ....health.hang_report import LABEL, MAX_GROUPS, InGroup, Recorded
from ...output.log_files import FLIGHT_RECORDS
from ..processes.proc import open_here

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
