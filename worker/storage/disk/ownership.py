"""Whose a checkpoint directory is: which run may write and delete there, and what of earlier runs it has taken over.

A run deletes its own checkpoints, and those of the runs that it comes from. It comes from the run whose checkpoint it
loaded here, and from the owner before it with all that this one had; without a load only if the lock shows that this
owner has ended. What any other run has left stays as it is, or is moved to a directory of that run (see `former_runs`).

A *run* is one job from its start to its end: all its generations and nodes have one name for it, and no other job has
the same. Two of them can come to share a directory: a job that was submitted twice, a pod that still terminates while
its successor starts. Each would take the other's checkpoints for a past of its own that was given up, and delete them.
So the directory says whose it is:

    owner.json    the run that loaded last; the runs before it, and the newest step of each that it has taken over
    owner.lock    locked (`flock`) by the owner's workers and agents while they live, where the file system can

A later run takes over, once it could load. An owner that was replaced changes nothing any more, and cannot come
back by loading again. While it lives it holds the lock, where there are locks, and no other run takes over.

    when run B comes to the directory                        what it has from then on, and deletes in time
    A has ended, cleanly or by a kill; B loads A's           A's, and all that A had
    A still terminates                                       B waits for the lock; then as above
    A and B at once                                          B is refused, A goes on
    the same, and no lock works; B loads A's                 A's until then; A is fenced
    B loads from memory or from another node's disk          what that state comes from; the rest is moved, or stays
    B saves, and has not loaded                              with the lock what A had, without it only its own
    B is `read_only`                                         nothing
    files without a run's name, no run was here before       those, once
    `owner.json` is lost or damaged; B loads A's             A's, and files without a name

Pure values and the lock; what is read and written when: see `directory_claim`.
"""

from __future__ import annotations

import fcntl
import operator
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from io import FileIO
from typing import Annotated, SupportsIndex

from ....codec import Checked, Within, from_plain
from ...errors import CheckpointError, OtherRun
from ...wire.messages import RunNameOrNone
from ...wire.run import Run
from ...wire.sealed import seal, unseal

OWNER_NAME = "owner.json"
LOCK_NAME = "owner.lock"

SCHEMA = 1
MAX_OWNER_BYTES = 64 << 10
MOST_STEPS = 2**63 - 1
MAX_BEFORE = 64
"""So many earlier runs are remembered beside those that have checkpoints here."""


def step_number(step: SupportsIndex) -> int:
    """What a script gives as the step to save. Raises ValueError."""
    if not (hasattr(step, "__index__") and 0 <= operator.index(step) <= MOST_STEPS):
        raise ValueError(
            f"step is {step!r}, expected the number of steps that the state holds, from 0 to 2**63 - 1"
        )
    return operator.index(step)


@dataclass(frozen=True, slots=True)
class Former(Checked):
    """An earlier run, empty for one whose files bear no name, and its newest step that was taken over; -1: none."""

    run: RunNameOrNone
    step: Annotated[int, Within(-1, MOST_STEPS)]

    def covers(self, run: str, step: int) -> bool:
        return run == self.run and step <= self.step


@dataclass(frozen=True, slots=True)
class Ownership(Checked):
    """The run that may write, and what of others counts as its own.

    `settled`: it has seen what was there when it came, and taken that over. Until then it has only fenced out those
    before it.
    """

    run: Run
    before: tuple[Former, ...] = ()
    settled: bool = False

    def has(self, run: str, step: int) -> bool:
        """Whether that run's checkpoint of `step` is the owner's: to load, and to delete."""
        return run == self.run.id or (self.settled and self._names(run, step))

    def follows(self, run: str, step: int, loaded: str | None) -> bool:
        """Whether that checkpoint, found on arrival, is what this run comes from; it loaded one of run `loaded` here.

        The last of `before` is the owner before this one.
        """
        return run in (self.run.id, loaded, self.before[-1].run) or self._names(run, step)

    def _names(self, run: str, step: int) -> bool:
        return any(one.covers(run, step) for one in self.before)

    def outlived(self, run: str) -> bool:
        """Whether that run was here before, and publishes nothing any more."""
        return any(run == one.run for one in self.before)

    def to_json(self) -> bytes:
        return seal(SCHEMA, self, indent=1)

    @classmethod
    def from_json(cls, raw: bytes) -> Ownership:
        """Raises Invalid."""
        return from_plain(cls, unseal(raw, "owner", SCHEMA)[1])


def successor(owner: Ownership | None, run: Run) -> Ownership:
    """The owner after `owner`. Where there was none, it comes after the run that wrote files without a name.

    An owner that has not settled had nothing yet: the one before it stays the last.
    """
    if owner is None:
        return Ownership(run, (Former("", -1),))
    gone = Former(owner.run.id, -1)
    return Ownership(run, (*owner.before, gone) if owner.settled else (gone, *owner.before))


def settle(owner: Ownership, found: Iterable[tuple[str, int]]) -> Ownership:
    """Take over these, checkpoints as run and step, and nothing else."""
    newest = {one.run: -1 for one in owner.before}
    for run, step in found:
        if run != owner.run.id:
            newest[run] = max(step, newest.get(run, -1))
    formers = [Former(run, step) for run, step in newest.items()]
    without = [one for one in formers if one.step < 0]
    forgotten = without[: max(0, len(without) - MAX_BEFORE)]
    return replace(owner, before=tuple(one for one in formers if one not in forgotten), settled=True)


# ---------------------------------------------------------------- errors


def replaced(directory: str, run: Run, owner: Ownership) -> OtherRun:
    return OtherRun(
        f"{directory} has been taken over by run {owner.run}, so this run {run} changes nothing there any more. Let "
        "this job end, or give it a directory of its own. To go on here instead, end the other job and start this one "
        "anew; where its agents were killed, and meet in etcd, after `elastic-agent forget`"
    )


def in_use(directory: str, run: Run, owner: Ownership | None) -> OtherRun:
    other = f"run {owner.run}" if owner is not None else "another run, which has just begun,"
    return OtherRun(
        f"{directory} is in use: {other} is alive and holds {LOCK_NAME}; this is run {run}. End one of the two, or "
        "give each a directory of its own. If the other has ended, and only a file server that lost its machine does "
        f"not know: delete {LOCK_NAME} there"
    )


def newer(directory: str, run: Run, step: int, other: str, ours: int) -> OtherRun:
    named = f"run {other}" if other else "a run without a name (an older version's)"
    return OtherRun(
        f"{directory} holds step {step} of {named}, which this run {run} at step {ours} does not come from: it is not "
        "overwritten. End one of the two, or give each a directory of its own. To go on from that step start a new "
        "job with this directory; to give it up delete its .json file"
    )


def overtaken(directory: str, run: Run, step: int, other: str, ours: int) -> CheckpointError:
    """Where there are no locks: the run before this one has saved once more before it was fenced out."""
    return CheckpointError(
        f"{directory}: run {other} saved step {step} while this run {run} loaded step {ours}: load again"
    )


# ---------------------------------------------------------------- the lock


class Lock:
    """`LOCK_NAME` in one directory, which the processes of one run share, on all of its nodes, and no other run.

    Each rank 0 lends its lock to its agent, which keeps it until it ends: a run that waits here would otherwise come in
    between two generations of the owner. The file holds the name of the run, by which others are known even
    where `owner.json` is lost. A process that was forked off does not hold the lock.
    """

    def __init__(self, run: str, lend: Callable[..., bool]) -> None:
        """`lend(run, *descriptors)` gives them to the agent; False when the agent did not get it."""
        self._run = run
        self._lend = lend
        self._lent = False
        self._file: FileIO | None = None
        _locks.add(self)

    def take(self, dir_fd: int) -> bool:
        """False: another run has it. True: this run has it, or the file system knows no locks."""
        if self._file is not None:
            return True
        file = self._open(dir_fd, os.O_CREAT)
        if file is None:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._share(file)
        except OSError:
            file.close()
            return True
        # No process of another run had it. One may get it in between: then that one's name is in the file.
        file.truncate()
        file.write(self._run.encode())
        return self._share(file)

    def join(self, dir_fd: int) -> None:
        """Share it where another process of this run has it."""
        if self._file is None and (file := self._open(dir_fd)) is not None:
            self._share(file)

    @property
    def is_held(self) -> bool:
        """For certain: no file system without locks."""
        return self._file is not None

    def lend(self) -> None:
        """Let the agent have it too."""
        if self._file is not None and not self._lent:
            self._lent = self._lend(self._run, self._file.fileno())

    def release_former(self) -> None:
        """Let the agent release the locks of a run that this job was before."""
        self._lend(self._run)

    def forget(self) -> None:
        """Close this process's descriptor. Another process that has one, as a fork's parent, keeps the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, dir_fd: int, more_flags: int = 0) -> FileIO | None:
        # Writable: NFS asks for that. Never replaced: what is locked is the file, not its name.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | more_flags
        try:
            return FileIO(os.open(LOCK_NAME, flags, 0o666, dir_fd=dir_fd), "r+")
        except OSError:
            return None

    def _share(self, file: FileIO) -> bool:
        """Whether this run's processes have it, of which this is one then."""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.pread(file.fileno(), MAX_OWNER_BYTES, 0) == self._run.encode():
                self._file, self._lent = file, False
                return True
        except OSError:
            pass
        file.close()
        return False


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_them_to_the_parent() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_leave_them_to_the_parent)
