"""What the processes of a job have printed on this node, piece by piece, for `elastic-agent logs`.

A piece of a file goes as one line of JSON, `Piece`, and the bytes behind it. A request names job, rank, stream and
generation; no path is made of anything else, and nothing is read but regular files in the folder of a job.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from ...codec import Count, Document
from ..output.job_folders import job_folder
from ..output.worker_logs import STREAMS

PATH = "/logs"
"""Of the page."""
MOST_BYTES = 256 * 1024
"""Of one piece."""
_MOST_HEAD = 1024
MOST_ANSWER = MOST_BYTES + _MOST_HEAD

_NUMBER = re.compile(r"[0-9]{1,18}")
_GENERATION = re.compile(r"gen([1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True)
class Piece:
    """The head of an answer."""

    start: Count
    """The first byte's place in its file."""
    size: Count
    """Of the whole file, as it is now; 0 when there is none."""
    newest: Count = 0
    """The newest generation of which this node has a file of the rank; 0: of none."""


_HEAD = Document(Piece, 1, _MOST_HEAD)


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Which piece of which file, as a query of the page."""

    job: str
    start: int = 0
    rank: int | None = None
    """None: what the job's agents print."""
    stream: str = STREAMS[0]
    generation: int = 0
    """Of the rank's file; 0: none of it, which tells the newest."""

    @property
    def target(self) -> str:
        """Path and query."""
        query: dict[str, object] = {"job": self.job, "start": self.start}
        if self.rank is not None:
            query |= {"rank": self.rank, "stream": self.stream, "generation": self.generation}
        return f"{PATH}?{urlencode(query)}"

    @classmethod
    def read(cls, query: Mapping[str, str]) -> LogRequest:
        """Raises ValueError."""
        stream = query.get("stream", STREAMS[0])
        if stream not in STREAMS:
            raise ValueError(f"stream: expected one of {', '.join(STREAMS)}")
        rank = _number(query, "rank") if "rank" in query else None
        return cls(query.get("job", ""), _number(query, "start"), rank, stream, _number(query, "generation"))


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{name}: expected a number")
    return int(text)


def read_piece(root: Path, node: str, wanted: LogRequest) -> bytes:
    """The answer. Raises FileNotFoundError when nothing of the job is on this node, and OSError."""
    folder = job_folder(root, wanted.job)
    if folder is None:
        raise FileNotFoundError(f"nothing of a job {wanted.job!r} is here")
    newest, file = 0, folder / f"{node}.log"
    if wanted.rank is not None:
        folders = dict(_folders_of(folder, wanted.job, wanted.rank))
        newest, chosen = max(folders, default=0), folders.get(wanted.generation)
        file = (chosen or folder) / f"{wanted.stream}.log"
        if chosen is None or not file.exists():
            return _answer(Piece(wanted.start, 0, newest), b"")
    size, data = _read(file, wanted.start)
    return _answer(Piece(wanted.start, size, newest), data)


def split_piece(answer: bytes) -> tuple[Piece, bytes]:
    """What `read_piece` has put together. Raises Invalid."""
    head, _, data = answer.partition(b"\n")
    return _HEAD.decode(head.decode(errors="replace")), data


def _answer(piece: Piece, data: bytes) -> bytes:
    return _HEAD.encode(piece).encode() + b"\n" + data


def _folders_of(folder: Path, job: str, rank: int) -> Iterator[tuple[int, Path]]:
    """By generation, which no other attempt of the job has again."""
    for run in folder.iterdir():
        if not run.name.startswith(f"{job}-") or run.is_symlink() or not run.is_dir():
            continue
        for generation in run.iterdir():
            found = _GENERATION.fullmatch(generation.name)
            of_rank = generation / f"rank{rank}"
            if found and any((of_rank / f"{stream}.log").exists() for stream in STREAMS):
                yield int(found[1]), of_rank


def _read(file: Path, start: int) -> tuple[int, bytes]:
    """The size, and what is from `start` on."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return 0, b""
        return found.st_size, os.pread(fd, MOST_BYTES, start)
    finally:
        os.close(fd)
