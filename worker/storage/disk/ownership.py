"""Whose a checkpoint directory is: which run may write and delete there.

A *run* is one job from its start to its end: all its generations and nodes have one name for it, and no other job has
the same. Manifests, data and temporary files bear the name of the run that wrote them. Beside them lie

    owner.lock    locked by the run's workers and agents while they live, see `Lock`
    owner.json    the run that loaded last, and the newest step of each run that it has taken over

    1 One run at a time has the directory. Another that comes waits for the lock, `LOCK_WAIT_S` at most: a pod may
      still be terminating. Then it is refused on all ranks, with the name of the one that has it.
    2 A run changes its own checkpoints, and those of the run whose state it has loaded, as they are at that time, with
      what that one had taken over. So a job that is started again goes on, and `keep` holds for all of them together.
    3 What any other run wrote is neither changed nor moved. Where it is not older than what this run goes on from,
      which would have to overwrite it in time, this run is refused.
    4 Who only reads changes nothing, not even these two files.

Where no lock works (NFS without one, Lustre mounted without `flock`, some FUSE) no run waits, and what holds instead is
this. Who has loaded takes over, up to the step that it loaded, and says so in `owner.json` before it changes anything.
The run that was replaced looks there right before each rename and each deletion, and is refused from then on. What that
one could still save bears its name: the new owner deletes none of it, and is refused where it is newer. Within a run
generations are fenced (`commit_permission`). What remains is a process that stands still in the microseconds between
such a look and its rename, and a file server that shows one machine an old `owner.json` for some seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO

from ....codec import Checked, Count, from_plain
from ...errors import OtherRun
from ...wire.environment import PROCESS_GROUP_TIMEOUT, Run, RunName
from ...wire.files import open_directory, read_whole, remove, seal, unseal
from .durable import make_directory, write_durably
from .manifests import SCHEMA, SCHEMAS, TEMPORARY_NAME, Manifest, readable_manifests

logger = logging.getLogger(__name__)

OWNER_NAME = "owner.json"
LOCK_NAME = "owner.lock"
MOST_FORMER_RUNS = 64
"""Of which the newest steps count: what more of them have left stays."""
_MOST_BYTES = 64 << 10
_MOST_NAME_BYTES = 4096

LOCK_WAIT_S = 120.0
"""A job that is told to stop may take 80 s by default, and an NFS server has a lock 90 s after its machine has gone."""
SHARE_OF_TIMEOUT = 0.8
"""And of the process group's timeout: the other ranks wait for it in a collective, which must not end first."""
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Ownership(Checked):
    """The run that may write, and by run the newest step that it has taken over."""

    run: Run
    took_over: dict[RunName, Count] = field(default_factory=dict)

    def has(self, run: str, step: int) -> bool:
        """Whether that run's checkpoint of `step` is the owner's: to load, and to delete."""
        return run == self.run.id or step <= self.took_over.get(run, -1)

    def to_json(self) -> bytes:
        return seal(SCHEMA, self, indent=1)

    @classmethod
    def from_json(cls, raw: bytes) -> Ownership:
        """Raises Invalid."""
        return from_plain(cls, unseal(raw, "owner", *SCHEMAS)[1])


class Claim:
    """One run's claim of one directory. `lend` gives the descriptor of its lock to the agent (see `Lock`)."""

    def __init__(self, directory: str, run: Run, lend: Callable[..., bool]) -> None:
        self.run = run
        self.bad_steps: set[int] = set()
        """Steps that did not verify, or were given up for an older one: no run goes on from them."""
        self.mark = uuid.uuid4().hex[:8]
        """No two writers, not even of one generation, have a name for a file in common."""
        self._directory = directory
        self._lock = Lock(run, lend)
        self._taken = False
        self._loaded: str | None = None
        """The run whose state this one goes on from."""

    # ---------------------------------------------------------------- before and after a load, and before a save

    def await_former_run(
        self,
        wait_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Before a load of rank 0: wait until no other run that lives has the directory.

        Raises OtherRun when one still has it after `wait_s`, and when this run was replaced; never OSError.
        """
        if wait_s is None:
            timeout_s = float(os.environ.get(PROCESS_GROUP_TIMEOUT) or "inf")
            wait_s = min(LOCK_WAIT_S, SHARE_OF_TIMEOUT * timeout_s)
        ends_at, has_warned = clock() + wait_s, False
        while True:
            try:
                with open_directory(self._directory) as dir_fd:
                    if self._may_own(dir_fd, self.read_owner(dir_fd)):
                        return
                    other = self._lock.holder(dir_fd)
            except OSError:
                return  # there is none yet, or it cannot be read: then the load fails, and says why
            if clock() >= ends_at:
                raise _in_use(self._directory, self.run, other)
            if not has_warned:
                has_warned = True
                logger.warning(
                    "another run has the checkpoint directory, waiting for its end: directory=%s run=%s owner=%s",
                    self._directory,
                    self.run,
                    other,
                )
            sleep(_LOOK_S)

    def take(self, step: int, loaded: str | None = None, *, again: bool = False) -> bool:
        """From here on the directory is this run's, which goes on from `step`: rank 0, once all have loaded.

        `loaded` is the run whose state that is, None where there was none. Raises OtherRun (see the module's
        docstring). Where nothing can be written nothing is taken: the next `uphold` tries again.

        False, if `again`: that run has saved more meanwhile, as where no lock shows whether it lives. Load once more.
        """
        self._loaded = loaded or self._loaded
        try:
            make_directory(self._directory)
            with open_directory(self._directory) as dir_fd:
                owner = self.read_owner(dir_fd)
                if not self._may_own(dir_fd, owner):
                    raise _in_use(self._directory, self.run, self._lock.holder(dir_fd))
                if self.is_owner(owner):
                    self._refuse_newer(dir_fd, owner, step + 1, step)
                else:
                    heir = self._heir(dir_fd, owner, step)
                    newer = self._newer_of_others(dir_fd, heir, step)
                    if newer is not None:
                        if again and newer.run in heir.took_over:
                            return False
                        raise _newer(self._directory, self.run, newer, step)
                    self._put_owner(dir_fd, heir)
                    # From here on those before can begin nothing, and without these files they can end nothing.
                    self.remove_abandoned(dir_fd, heir, -1, also=owner.run.id if owner is not None else None)
            self._taken = True
            self._lock.lend()
        except OSError as error:
            logger.warning(
                "the checkpoint directory cannot be made this run's: directory=%s reason=%s",
                self._directory,
                error,
            )
        return True

    def uphold(self, step: int, loaded: str | None = None) -> None:
        """Before a save of rank 0, which has come to `step`: the directory is this run's, or becomes it now.

        `loaded`: as for `take`, which was not called. Raises OtherRun. Where the disk refuses, the write that follows
        raises.
        """
        try:
            with open_directory(self._directory) as dir_fd:
                owner = self.read_owner(dir_fd)
                if self._taken:
                    self._refuse_replaced(owner)
                if self.is_owner(owner):
                    self._lock.take(dir_fd)  # an earlier generation may have had it until now
                    self._lock.lend()
                    return
        except OSError:
            pass
        if not self._taken:
            # What waits for the lock needs a directory: another process of this run may make both just now.
            with contextlib.suppress(OSError):
                make_directory(self._directory)
            self.await_former_run()
        self.take(step, loaded)

    def release_former_locks(self) -> None:
        """On each node, before a load: the agent holds none of a run that this job was before."""
        self._lock.release_former()

    def share_lock(self) -> None:
        """On a node without rank 0, after a load: its agent holds the lock as well, in case that rank 0's is lost."""
        with contextlib.suppress(OSError), open_directory(self._directory) as dir_fd:
            self._lock.join(dir_fd)
            self._lock.lend()

    def release_lock(self) -> None:
        """After a load that failed: let others have the lock."""
        if not self._taken:
            self._lock.forget()

    def _heir(self, dir_fd: int, owner: Ownership | None, step: int) -> Ownership:
        """This run, which goes on from `step`, and what it takes over from `owner` and from the run that it loaded."""
        found: dict[str, int] = {}
        if self._loaded is not None and self._loaded != self.run.id:
            # The owner may itself have come from what was loaded: then its own were given up for that.
            comes_from = owner is not None and owner.has(self._loaded, 0)
            new = {self._loaded, owner.run.id} if owner is not None and comes_from else {self._loaded}
            found = dict(owner.took_over) if owner is not None and comes_from else {}
            found.update(dict.fromkeys(new, step))
            for one in readable_manifests(dir_fd):
                # Only the lock shows that what they have saved beyond that step is no living run's.
                if one.run in new and (self._lock.is_held or one.step in self.bad_steps):
                    found[one.run] = max(found[one.run], one.step)
        newest = sorted(found.items(), key=lambda one: -one[1])[:MOST_FORMER_RUNS]
        return Ownership(self.run, dict(newest))

    def _may_own(self, dir_fd: int, owner: Ownership | None) -> bool:
        """False: another run lives. Raises OtherRun when this one was replaced."""
        if owner is not None and self.run.id in owner.took_over:
            raise _replaced(self._directory, self.run, owner)
        return self._lock.take(dir_fd)

    # ---------------------------------------------------------------- whose is it

    def is_owner(self, owner: Ownership | None) -> bool:
        return owner is not None and owner.run.id == self.run.id

    def has(self, owner: Ownership | None, run: str, step: int) -> bool:
        """Whether that run's checkpoint of `step` is this run's: to load, and to delete."""
        return run == self.run.id or (owner is not None and self.is_owner(owner) and owner.has(run, step))

    def inherits(self, owner: Ownership | None, run: str) -> bool:
        """Whether what that run has not published is this one's to remove."""
        return run == self.run.id or (owner is not None and self.is_owner(owner) and run in owner.took_over)

    def is_ours(self, manifest: Manifest) -> bool:
        """Whether this run has written it or taken it over."""
        with contextlib.suppress(OSError), open_directory(self._directory) as dir_fd:
            return self.has(self.read_owner(dir_fd), manifest.run, manifest.step)
        return manifest.run == self.run.id

    def check(self, dir_fd: int, least: int | None = None) -> Ownership | None:
        """Return if the directory is this run's, and holds nothing of others from step `least` on. Raises OtherRun."""
        owner = self.read_owner(dir_fd)
        self._refuse_replaced(owner)
        if least is not None:
            self._refuse_newer(dir_fd, owner, least, least - 1)
        return owner

    def _refuse_replaced(self, owner: Ownership | None) -> None:
        if owner is not None and not self.is_owner(owner):
            raise _replaced(self._directory, self.run, owner)

    def _refuse_newer(self, dir_fd: int, owner: Ownership | None, least: int, ours: int) -> None:
        """Raise if there are checkpoints from the step `least` on that are not this run's, which has come to `ours`."""
        newer = self._newer_of_others(dir_fd, owner, least)
        if newer is not None:
            raise _newer(self._directory, self.run, newer, ours)

    def _newer_of_others(self, dir_fd: int, owner: Ownership | None, least: int) -> Manifest | None:
        for one in readable_manifests(dir_fd):
            known = one.step < least or one.step in self.bad_steps or self.has(owner, one.run, one.step)
            if not known:
                return one
        return None

    # ---------------------------------------------------------------- files

    def read_owner(self, dir_fd: int) -> Ownership | None:
        try:
            return Ownership.from_json(read_whole(dir_fd, OWNER_NAME, _MOST_BYTES))
        except FileNotFoundError:
            return None
        except ValueError as error:
            logger.warning("left aside: file=%s reason=%s", os.path.join(self._directory, OWNER_NAME), error)
            return None

    def _put_owner(self, dir_fd: int, owner: Ownership) -> None:
        raw = owner.to_json()
        temporary = self.temporary_name(0, 0)
        write_durably(dir_fd, temporary, lambda sink: sink.write(raw))
        os.rename(temporary, OWNER_NAME, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.fsync(dir_fd)

    @contextlib.contextmanager
    def blaming(self, dir_fd: int) -> Iterator[None]:
        """A file of ours that is gone was removed by the run that has taken over: raises OtherRun then."""
        try:
            yield
        except FileNotFoundError:
            self._refuse_replaced(self.read_owner(dir_fd))
            raise

    def remove_abandoned(
        self, dir_fd: int, owner: Ownership | None, generation: int, *, also: str | None = None
    ) -> None:
        """Remove what writers died over, but not a newer generation's: its writer may live, and we be the past.

        `also`: of that run, too.
        """
        for name in os.listdir(dir_fd):
            match = TEMPORARY_NAME.fullmatch(name)
            if not match or not (self.inherits(owner, match["run"]) or match["run"] == also):
                continue
            if match["run"] != self.run.id or int(match["generation"]) <= generation:
                remove(dir_fd, name)

    def temporary_name(self, generation: int, step: int) -> str:
        return f"tmp-{generation:08d}-{step:012d}-{self.run.id}-{self.mark}.json"


# ---------------------------------------------------------------- the lock


class Lock:
    """`owner.lock`: held by the processes of one run, on all of its nodes, and of no other run.

    Rank 0 takes it before it loads, and lends it to its agent (an open file over a socket), which keeps it until it
    ends: a run that waits here would otherwise come in between two generations of the owner. The file holds the run's
    name, by which its other processes know that they may share the lock, and which one that is refused is told. A
    process that was forked off does not hold it.
    """

    def __init__(self, run: Run, lend: Callable[..., bool]) -> None:
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
        file.write(str(self._run).encode())
        return self._share(file)

    def join(self, dir_fd: int) -> None:
        """Share it where another process of this run has it."""
        if self._file is None and (file := self._open(dir_fd)) is not None:
            self._share(file)

    def holder(self, dir_fd: int) -> str:
        """The name of the run that took it last; empty where none is known."""
        with contextlib.suppress(OSError), os.fdopen(_open_lock(dir_fd, os.O_RDONLY), "rb") as file:
            return file.read(_MOST_NAME_BYTES).decode(errors="replace")
        return ""

    @property
    def is_held(self) -> bool:
        """For certain: no file system without locks."""
        return self._file is not None

    def lend(self) -> None:
        """Let the agent have it too."""
        if self._file is not None and not self._lent:
            self._lent = self._lend(self._run.id, self._file.fileno())

    def release_former(self) -> None:
        """Let the agent release the locks of a run that this job was before."""
        self._lend(self._run.id)

    def forget(self) -> None:
        """Close this process's descriptor. Another process that has one, as a fork's parent, keeps the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, dir_fd: int, more_flags: int = 0) -> FileIO | None:
        # Writable: NFS asks for that. Never replaced: what is locked is the file, not its name.
        try:
            return FileIO(_open_lock(dir_fd, os.O_RDWR | more_flags), "r+")
        except OSError:
            return None

    def _share(self, file: FileIO) -> bool:
        """Whether this run's processes have it, of which this is one then."""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.pread(file.fileno(), _MOST_NAME_BYTES, 0).partition(b" ")[0] == self._run.id.encode():
                self._file, self._lent = file, False
                return True
        except OSError:
            pass
        file.close()
        return False


def _open_lock(dir_fd: int, flags: int) -> int:
    return os.open(LOCK_NAME, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=dir_fd)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_them_to_the_parent() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_leave_them_to_the_parent)


# ---------------------------------------------------------------- errors


def _replaced(directory: str, run: Run, owner: Ownership) -> OtherRun:
    return OtherRun(
        f"{directory} has been taken over by run {owner.run}, so this run {run} changes nothing there any more. Let "
        "this job end, or give it a directory of its own. To go on here instead, end the other job and start this one "
        "anew; where its agents were killed, and meet in etcd, once the job's keys there are deleted"
    )


def _in_use(directory: str, run: Run, other: str) -> OtherRun:
    return OtherRun(
        f"{directory} is in use: run {other or '(which has just begun)'} is alive and holds {LOCK_NAME}; this is run "
        f"{run}. End one of the two, or give each a directory of its own. If the other has ended, and only a file "
        f"server that lost its machine does not know: delete {LOCK_NAME} there"
    )


def _newer(directory: str, run: Run, other: Manifest, ours: int) -> OtherRun:
    return OtherRun(
        f"{directory} holds step {other.step} of run {other.run}, which this run {run} at step {ours} does not come "
        "from: it is not overwritten. End one of the two, or give each a directory of its own. To go on from that step "
        "start a new job with this directory; to give it up delete its .json file"
    )
