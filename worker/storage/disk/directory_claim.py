"""A run's claim of a checkpoint directory: made by rank 0 when it loads, confirmed before each change, see `ownership`.

A run that takes over says so in `owner.json` first, and then removes the temporary files of those before. So the rename
of a writer that was given leave a moment too early fails: what it would rename is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator

from ...wire.environment import PROCESS_GROUP_TIMEOUT
from ...wire.files import open_directory, read_whole, remove
from ...wire.run import Run
from .durable import make_directory, write_durably
from .former_runs import move_aside
from .manifests import TEMPORARY_NAME, Manifest, manifest_of, readable_manifests
from .ownership import (
    MAX_OWNER_BYTES,
    OWNER_NAME,
    Former,
    Lock,
    Ownership,
    in_use,
    newer,
    overtaken,
    replaced,
    settle,
    successor,
)

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 300.0
"""How long a load waits for another run to end. Its agents hold the lock while they bring the last state to disk, and a
file server may take 90 s to notice that a machine is gone."""
SHARE_OF_TIMEOUT = 0.8
"""And of the process group's timeout: the other ranks wait for it in a collective, which must not end first."""
_LOOK_S = 0.2
_CLAIM = f"tmp-{0:08d}-{0:012d}-"
"""How the temporary name of an owner begins."""


class Claim:
    """One run's claim of one directory. `lend` gives the descriptor of a lock to the agent (see `Lock`)."""

    def __init__(self, directory: str, run: Run, lend: Callable[..., bool]) -> None:
        self.run = run
        self.bad_steps: set[int] = set()
        """Steps that did not verify, or were given up for an older one: no run goes on from them."""
        self.mark = uuid.uuid4().hex[:8]
        """No two writers, not even of one generation, have a name for a file in common."""
        self._directory = directory
        self._lock = Lock(run.id, lend)
        self._taken = False
        self._elsewhere: bool | None = None
        """The state that this run goes on from was not loaded from this directory. None: nothing was loaded."""
        self._related: Collection[Former] = ()
        """Runs that this one comes from, as other nodes report them."""

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
                    owner = self.read_owner(dir_fd)
                    if self._may_own(dir_fd, owner):
                        return
            except OSError:
                return  # there is none yet, or it cannot be read: then the load fails, and says why
            if clock() >= ends_at:
                raise in_use(self._directory, self.run, owner)
            if not has_warned:
                has_warned = True
                logger.warning(
                    "another run has the checkpoint directory, waiting for its end: directory=%s run=%s owner=%s",
                    self._directory,
                    self.run,
                    owner.run if owner is not None else "not known yet",
                )
            sleep(_LOOK_S)

    def take(self, step: int, related: Collection[Former] = (), *, elsewhere: bool = False) -> None:
        """From here on the directory is this run's, which goes on from `step`: rank 0, once all have loaded.

        What this run comes from (see `ownership`) is its own too, and what does not verify; `related` is what other
        nodes' disks and memories add to that. Newer ones of other runs raise OtherRun, as does an owner that lives or
        has replaced this run. A run that comes here for the first time with a state from `elsewhere` moves
        what other runs have left to a directory below this one, if the lock shows that the run before it has ended.
        Where nothing can be written nothing is taken: the next `uphold` tries again.
        """
        self._elsewhere, self._related = elsewhere, related
        self._take_at(step)

    def _take_at(self, step: int) -> None:
        try:
            make_directory(self._directory)
            with open_directory(self._directory) as dir_fd:
                owner = self.read_owner(dir_fd)
                if not self._may_own(dir_fd, owner):
                    raise in_use(self._directory, self.run, owner)
                if self.is_settled(owner):
                    self._refuse_newer(dir_fd, owner, step + 1, step)
                else:
                    moves = bool(self._elsewhere) and self._is_first_here(dir_fd)
                    if not moves:
                        self._heir(dir_fd, owner, step)
                    with self.blaming(dir_fd):
                        self._take(dir_fd, owner, step, moves=moves)
            self._taken = True
            self._lock.lend()
        except OSError as error:
            logger.warning(
                "the checkpoint directory cannot be made this run's: directory=%s reason=%s",
                self._directory,
                error,
            )

    def uphold(self, step: int, *, loaded_here: bool = False) -> None:
        """Before a save of rank 0, which has come to `step`: the directory is this run's, or becomes it now.

        `loaded_here`: that step was loaded from this directory, and `take` was not asked for it.
        Raises OtherRun. Where the disk refuses, the write that follows raises.
        """
        if loaded_here:
            self._elsewhere = False
        try:
            with open_directory(self._directory) as dir_fd:
                owner = self.read_owner(dir_fd)
                if self._taken:
                    self._refuse_replaced(owner)
                if self.is_settled(owner):
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
        self._take_at(step)

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

    def _is_first_here(self, dir_fd: int) -> bool:
        """Whether this run has left nothing here, and no other run can be alive."""
        return self._lock.is_held and all(one.run != self.run.id for one in readable_manifests(dir_fd))

    def _heir(self, dir_fd: int, owner: Ownership | None, step: int, *, moves: bool = False) -> Ownership:
        """This run, which comes after `owner` at `step`, with what it comes from of all that is here.

        Moves the rest, or raises if some of that is not older: OtherRun, or CheckpointError where another load helps.
        """
        mine = owner if owner is not None and owner.run.id == self.run.id else successor(owner, self.run)
        loaded = manifest_of(dir_fd, step) if self._elsewhere is False else None
        follows = self._lock.is_held if self._elsewhere is None else not self._elsewhere
        found = readable_manifests(dir_fd)

        def comes_from(one: Manifest) -> bool:
            return follows and mine.follows(one.run, one.step, loaded.run if loaded is not None else None)

        def has(one: Manifest) -> bool:
            is_related = any(former.covers(one.run, one.step) for former in self._related)
            return one.step in self.bad_steps or is_related or (one.step <= step and comes_from(one))

        known = [(former.run, min(former.step, step)) for former in self._related]
        heir = settle(mine, [*known, *((one.run, one.step) for one in found if has(one))])
        for one in found:
            if heir.has(one.run, one.step):
                continue
            if moves:
                logger.warning(
                    "another run's checkpoint is kept apart: directory=%s step=%d run=%s to=%s",
                    self._directory, one.step, one.run, move_aside(dir_fd, one),
                )  # fmt: skip
            elif one.step >= step:
                raise (overtaken if comes_from(one) else newer)(
                    self._directory, self.run, one.step, one.run, step
                )
        return heir

    def _take(self, dir_fd: int, owner: Ownership | None, step: int, *, moves: bool) -> None:
        if owner is None or owner.run.id != self.run.id:
            owner = successor(owner, self.run)
            self._put_owner(dir_fd, owner)
        # From here on those before can begin nothing, and without these files they can end nothing.
        self.remove_abandoned(dir_fd, owner, generation=-1)
        heir = self._heir(dir_fd, owner, step, moves=moves)
        self._refuse_replaced(self.read_owner(dir_fd))
        self._put_owner(dir_fd, heir)

    def is_settled(self, owner: Ownership | None) -> bool:
        return owner is not None and owner.run.id == self.run.id and owner.settled

    def owner(self) -> Ownership | None:
        """None when there is none, or it cannot be read."""
        with contextlib.suppress(OSError), open_directory(self._directory) as dir_fd:
            return self.read_owner(dir_fd)
        return None

    def is_ours(self, manifest: Manifest) -> bool:
        """Whether this run has written it or taken it over."""
        with contextlib.suppress(OSError), open_directory(self._directory) as dir_fd:
            return self.has(self.read_owner(dir_fd), manifest.run, manifest.step)
        return manifest.run == self.run.id

    def _may_own(self, dir_fd: int, owner: Ownership | None) -> bool:
        """False: another run lives. Raises OtherRun when this one was replaced."""
        if owner is not None and owner.outlived(self.run.id):
            raise replaced(self._directory, self.run, owner)
        return self._lock.take(dir_fd)

    def has(self, owner: Ownership | None, run: str, step: int) -> bool:
        return run == self.run.id or (
            owner is not None and owner.run.id == self.run.id and owner.has(run, step)
        )

    def _refuse_replaced(self, owner: Ownership | None) -> None:
        if owner is not None and owner.run.id != self.run.id:
            raise replaced(self._directory, self.run, owner)

    def check(self, dir_fd: int, least: int | None = None) -> Ownership | None:
        """Return if the directory is this run's, and holds nothing of others from step `least` on. Raises OtherRun."""
        owner = self.read_owner(dir_fd)
        self._refuse_replaced(owner)
        if least is not None:
            self._refuse_newer(dir_fd, owner, least, least - 1)
        return owner

    def _refuse_newer(self, dir_fd: int, owner: Ownership | None, least: int, ours: int) -> None:
        """Raise if there are checkpoints from the step `least` on that are not this run's, which has come to `ours`."""
        for one in readable_manifests(dir_fd):
            known = one.step < least or one.step in self.bad_steps or self.has(owner, one.run, one.step)
            if not known:
                raise newer(self._directory, self.run, one.step, one.run, ours)

    def read_owner(self, dir_fd: int) -> Ownership | None:
        try:
            return Ownership.from_json(read_whole(dir_fd, OWNER_NAME, MAX_OWNER_BYTES))
        except FileNotFoundError:
            return None
        except ValueError as error:
            logger.warning("left aside: file=%s reason=%s", os.path.join(self._directory, OWNER_NAME), error)
            return None

    def _put_owner(self, dir_fd: int, owner: Ownership) -> None:
        raw = owner.to_json()
        temporary = self.temporary_name(0, 0, "json")
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

    def remove_abandoned(self, dir_fd: int, owner: Ownership | None, generation: int) -> None:
        """Remove what writers died over, but not a newer generation's: its writer may live, and we be the past.

        In generation -1 this run takes over: also what any other run has left that died before it was in `OWNER_NAME`.
        """
        for name in os.listdir(dir_fd):
            match = TEMPORARY_NAME.fullmatch(name)
            died_early = generation < 0 and name.startswith(_CLAIM)
            if not match or not (died_early or self.inherits(owner, match["run"])):
                continue
            if match["run"] != self.run.id or int(match["generation"]) <= generation:
                remove(dir_fd, name)

    def inherits(self, owner: Ownership | None, run: str | None) -> bool:
        """Whether what that run has not published is this one's to remove."""
        return run == self.run.id or (
            owner is not None and owner.run.id == self.run.id and owner.outlived(run or "")
        )

    def temporary_name(self, generation: int, step: int, kind: str) -> str:
        return f"tmp-{generation:08d}-{step:012d}-{self.run.id}-{self.mark}.{kind}"
