"""Below the log directory of a pool's daemon: a folder for each job that has run here, and which of them are kept.

    DIR/<job>/<node>.log                    what the job's agents print on this node
    DIR/<job>/<job>-<run>/gen<generation>/  what its workers print (`log_files`)

The folders of jobs that the pool's store still knows are kept, and the newest few of others: a store may have lost all.
What is deleted bears our mark with the same pool's name, and no process has the job's output open. What people have
put into such a folder stays, and the folder with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from ..agent.output.log_files import delete_run
from ..agent.output.worker_logs import STREAMS
from ..codec import Count, Document
from ..threads import Thread

KEPT_BEYOND = 10
"""Folders of jobs that the store does not know any more."""

MARK = ".elastic-agent-job"
_MARK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_NAME = 4096
_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def job_folder(root: Path, job: str) -> Path | None:
    """The folder of this job, whose name may come from anywhere; None when there is none."""
    if _JOB.fullmatch(job) is None:
        return None
    folder = root / job
    return folder if _marked(folder) is not None else None


class JobFolders:
    """One daemon's part in these folders. For its main thread."""

    def __init__(self, root: Path, pool: str, node: str) -> None:
        """`pool` is its name among all pools, in words."""
        self._root, self._pool, self._node = root, pool, node
        self._tidying: Thread | None = None
        self._unfinished: tuple[str, ...] | None = None

    def unfinished(self) -> tuple[str, ...]:
        """Jobs of an earlier daemon of this node that have processes here still. Those that the first call has not
        found are not looked for again."""
        if self._unfinished is None:
            with contextlib.suppress(OSError):
                self._unfinished = tuple(sorted(os.listdir(self._root)))
        named = (job for job in self._unfinished or () if _JOB.fullmatch(job))
        self._unfinished = tuple(job for job in named if _is_held(self._root / job / f"{self._node}.log"))
        return self._unfinished

    def begin(self, job: str) -> Path:
        """Returns the file for what the job's agents print here, in a folder that is there. Raises OSError."""
        if _JOB.fullmatch(job) is None:
            raise OSError(f"{job!r} is no name for a folder: submit the job anew")
        folder = self._root / job
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(folder / MARK, _MARK_FLAGS | os.O_CREAT | os.O_TRUNC, 0o640), "wb") as mark:
            mark.write(os.fsencode(self._pool))
        return folder / f"{self._node}.log"

    def tidy(self, known: Collection[str]) -> None:
        """Deletes what is not kept while the store knows these jobs, in a thread of its own."""
        if self._tidying is None or not self._tidying.is_alive():
            work = partial(prune, self._root, self._pool, known)
            self._tidying = Thread(work, "job-folders", lambda: None)
            self._tidying.start()


def hold(output: int) -> None:
    """What a job's agents print goes to this open file. As long as a process that was started with it lives,
    `unfinished` finds it, and its folder is not deleted. A disk without locks has none to find."""
    with contextlib.suppress(OSError):
        fcntl.flock(output, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _is_held(output: Path, *, unknown: bool = False) -> bool:
    """`unknown`: the answer where the disk has none. NFS gives this lock only on a file that is open for writing, and
    that of `hold` only on one that is open for reading."""
    try:
        file = os.open(output, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return unknown
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return unknown
    finally:
        os.close(file)


def prune(root: Path, pool: str, known: Collection[str]) -> None:
    """Deletes the folders of the pool's jobs that are not `known`, but for the newest. May take as long as the disk
    does; one that fails here fails the next job, too, where it is logged."""
    found = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if folder.name not in known and (mark := _marked(folder)) is not None and mark[1] == pool:
                found.append((mark[0], folder))
    for _, folder in sorted(found, reverse=True)[KEPT_BEYOND:]:
        _delete(folder)


def _marked(folder: Path) -> tuple[float, str] | None:
    """When a job began to run there, and for which pool; None if it is none of our folders."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            return None
        mark = os.open(folder / MARK, _MARK_FLAGS)
        try:
            return os.fstat(mark).st_mtime, os.fsdecode(os.read(mark, _MOST_NAME))
        finally:
            os.close(mark)
    return None


def _delete(folder: Path) -> None:
    """If it is known that no process of the job is left. The mark goes last, so that what could not be deleted is tried
    again."""
    with contextlib.suppress(OSError):
        printed = [each for each in folder.iterdir() if each.name.endswith(".log") and not each.is_dir()]
        if any(_is_held(each, unknown=True) for each in printed):
            return
        for each in printed:
            each.unlink()
        for each in folder.iterdir():
            if each.name.startswith(f"{folder.name}-"):
                delete_run(each)
        if os.listdir(folder) == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()


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
