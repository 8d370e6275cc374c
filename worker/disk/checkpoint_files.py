"""The checkpoint directory: what lies on disk, and the order in which it gets there.

A checkpoint is two files. The *data* is whatever the caller serializes; its name carries its run, its writer and its
own digest, so a new data file never overwrites one that may still be needed. The *manifest* names the data file
with size and sha256 and carries a checksum of itself; its rename is the one instant at which the checkpoint begins to
exist.

    step-000000000120-3b9e0c51d7aa-91c2f0d4-4f1c0a9be2d35577.pt
    step-000000000120.json

Invariant: whenever the power goes, every visible manifest names data that was durable before it, and the newest
`keep` good checkpoints are still there. It follows from the order, each line done before the next begins:

    1 write the data under a temporary name, fsync it       4 write the manifest under a temporary name, fsync it
    2 rename the data to its final name                     5 rename the manifest to its final name
    3 fsync the directory                                   6 fsync the directory; only now delete older ones

Before 1, so that nothing large is written in vain, and again right before each rename of 5 and each deletion, two
questions are asked. Is the directory still this run's (see `ownership`)? And does the caller give leave, since a
writer that stood still may by then be a writer of the past? A writer that is refused removes its own data file; what
one has died over is removed before the next write.

Only what is this run's own, or what it comes from (see `ownership`), is ever deleted or overwritten. A run that takes
over says so in `owner.json` first, and then removes the temporary files of those before. So the rename of one that was
given leave a moment too early fails: what it would rename is gone.

After a failed write or fsync the file is abandoned: the kernel may have dropped the dirty pages and call the next
fsync a success. Files are opened below one directory descriptor and never through a symbolic link.

One process at a time writes (rank 0); any number may read. No torch here, and no collectives: see `checkpoint`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from typing import BinaryIO

from ..errors import BadCheckpoint, CheckpointError
from ..wire.run import Run
from .durable import make_directory, open_for_reading, write_durably
from .former_runs import move
from .manifests import (
    DATA_NAME,
    TEMPORARY_NAME,
    Manifest,
    is_named,
    manifest_name,
    manifest_of,
    manifest_steps,
    read_manifest,
    runs_with_data,
)
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
_LOOK_S = 0.2
_LOOKS = 10
"""How often a reader may find that a run that saves has replaced what it was about to read."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose digest was just checked; `stream` is the very file that was read, at its beginning."""

    manifest: Manifest
    stream: BufferedReader


def _none(_: Manifest) -> bool:
    return False


class CheckpointFiles:
    """The checkpoints of one run in one directory, of which the newest `keep` good ones are retained."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int,
        run: Run,
        lend: Callable[..., bool] = lambda *_: False,
    ) -> None:
        """`lend` gives the descriptor of a lock to the agent, which outlives this process (see `Lock`)."""
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1 checkpoint to retain")
        self.directory = os.path.abspath(directory)
        self.keep = keep
        self.run = run
        # Steps that this object wrote or verified. What was not looked at does not count as a good one to fall
        # back to, so it can never push a good one out of the newest `keep`.
        self.good: set[int] = set()
        self._bad: set[int] = set()
        """Steps that did not verify: no run can go on from them."""
        self._mark = uuid.uuid4().hex[:8]
        """No two writers, not even of one generation, have a name for a file in common."""
        self._lock = Lock(run.id, lend)
        self._taken = False
        self._elsewhere: bool | None = None
        """The state that this run goes on from was not loaded from this directory. None: nothing was loaded."""
        self._kin: Collection[Former] = ()
        """Runs that this one comes from, as other nodes tell."""

    def trust(self, *steps: int) -> None:
        """Another has just written or verified these."""
        self.good.update(steps)

    # ---------------------------------------------------------------- whose it is

    def enter(
        self,
        wait_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Before a load of rank 0: wait until no other run that lives has the directory.

        Raises OtherRun when one still has it after `wait_s`, and when this run was replaced; never OSError.
        """
        ends_at, told = clock() + (LOCK_WAIT_S if wait_s is None else wait_s), False
        while True:
            try:
                with self._opened() as dir_fd:
                    owner = self._owner(dir_fd)
                    if self._may_own(dir_fd, owner):
                        return
            except OSError:
                return  # there is none yet, or it cannot be read: the load will tell
            if clock() >= ends_at:
                raise in_use(self.directory, self.run, owner)
            if not told:
                told = True
                logger.warning(
                    "another run has the checkpoint directory, waiting for its end: directory=%s run=%s owner=%s",
                    self.directory,
                    self.run,
                    owner.run if owner is not None else "not known yet",
                )
            sleep(_LOOK_S)

    def take(self, step: int, kin: Collection[Former] = (), *, elsewhere: bool = False) -> None:
        """From here on the directory is this run's, which goes on from `step`: rank 0, once all have loaded.

        What this run comes from (see `ownership`) is its own too, and what does not verify. `kin` is what other nodes'
        disks and memories tell of that. Newer ones of other runs raise OtherRun, as does an owner that
        lives, or has replaced this run. A run that comes here for the first time with a state from `elsewhere` moves
        what other runs have left to a directory below this one, if the lock shows that the run before it has ended.
        Where nothing can be written nothing is taken: the next `hold` tries again.
        """
        self._elsewhere, self._kin = elsewhere, kin
        self._come(step)

    def _come(self, step: int) -> None:
        try:
            make_directory(self.directory)
            with self._opened() as dir_fd:
                owner = self._owner(dir_fd)
                if not self._may_own(dir_fd, owner):
                    raise in_use(self.directory, self.run, owner)
                if self._is_settled(owner):
                    self._refuse_newer(dir_fd, owner, step + 1, step)
                else:
                    moves = bool(self._elsewhere) and self._comes_first(dir_fd)
                    if not moves:
                        self._heir(dir_fd, owner, step)
                    with self._blaming(dir_fd):
                        self._take(dir_fd, owner, step, moves=moves)
            self._taken = True
            self._lock.lend()
        except OSError as error:
            logger.warning(
                "the checkpoint directory cannot be made this run's: directory=%s reason=%s",
                self.directory,
                error,
            )

    def hold(self, step: int) -> None:
        """Before a save of rank 0, which has come to `step`: the directory is this run's, or becomes it now.

        Raises OtherRun. A disk that refuses is told by the write that follows.
        """
        try:
            with self._opened() as dir_fd:
                owner = self._owner(dir_fd)
                if self._taken:
                    self._confirm(owner)
                if self._is_settled(owner):
                    self._lock.take(dir_fd)  # an earlier generation may have had it until now
                    self._lock.lend()
                    return
        except OSError:
            pass
        if not self._taken:
            self.enter()
        self._come(step)

    def begin(self) -> None:
        """On each node, before a load."""
        self._lock.begin()

    def join(self) -> None:
        """On a node without rank 0, after a load: its agent holds the lock as well, in case that rank 0's is lost."""
        with contextlib.suppress(OSError), self._opened() as dir_fd:
            self._lock.join(dir_fd)
            self._lock.lend()

    def leave(self) -> None:
        """After a load that failed: let others have the lock."""
        if not self._taken:
            self._lock.forget()

    def _comes_first(self, dir_fd: int) -> bool:
        """Whether this run has left nothing here, and no other run can be alive."""
        return self._lock.is_held and all(one.run != self.run.id for one in _readable(dir_fd))

    def _heir(self, dir_fd: int, owner: Ownership | None, step: int, *, moves: bool = False) -> Ownership:
        """This run, which comes after `owner` at `step`, with what it comes from of all that is here.

        Moves the rest, or raises if some of that is not older: OtherRun, or CheckpointError where another load helps.
        """
        mine = owner if owner is not None and owner.run.id == self.run.id else successor(owner, self.run)
        loaded = manifest_of(dir_fd, step) if self._elsewhere is False else None
        follows = self._lock.is_held if self._elsewhere is None else not self._elsewhere
        found = _readable(dir_fd)

        def comes_from(one: Manifest) -> bool:
            return follows and mine.follows(one.run, one.step, loaded.run if loaded is not None else None)

        def has(one: Manifest) -> bool:
            is_kin = any(former.covers(one.run, one.step) for former in self._kin)
            return one.step in self._bad or is_kin or (one.step <= step and comes_from(one))

        known = [(former.run, min(former.step, step)) for former in self._kin]
        heir = settle(mine, [*known, *((one.run, one.step) for one in found if has(one))])
        for one in found:
            if heir.has(one.run, one.step):
                continue
            if moves:
                logger.warning(
                    "another run's checkpoint is kept apart: directory=%s step=%d run=%s to=%s",
                    self.directory, one.step, one.run, move(dir_fd, one),
                )  # fmt: skip
            elif one.step >= step:
                raise (overtaken if comes_from(one) else newer)(
                    self.directory, self.run, one.step, one.run, step
                )
        return heir

    def _take(self, dir_fd: int, owner: Ownership | None, step: int, *, moves: bool) -> None:
        if owner is None or owner.run.id != self.run.id:
            owner = successor(owner, self.run)
            self._put_owner(dir_fd, owner)
        # From here on those before can begin nothing, and without these files they can end nothing.
        self._remove_abandoned(dir_fd, owner, generation=-1)
        heir = self._heir(dir_fd, owner, step, moves=moves)
        self._confirm(self._owner(dir_fd))
        self._put_owner(dir_fd, heir)

    def _is_settled(self, owner: Ownership | None) -> bool:
        return owner is not None and owner.run.id == self.run.id and owner.settled

    def owner(self) -> Ownership | None:
        """None when there is none, or it cannot be read."""
        with contextlib.suppress(OSError), self._opened() as dir_fd:
            return self._owner(dir_fd)
        return None

    def is_ours(self, manifest: Manifest) -> bool:
        """Whether this run has written it or taken it over."""
        with contextlib.suppress(OSError), self._opened() as dir_fd:
            return self._has(self._owner(dir_fd), manifest.run, manifest.step)
        return manifest.run == self.run.id

    def _may_own(self, dir_fd: int, owner: Ownership | None) -> bool:
        """False: another run lives. Raises OtherRun when this one was replaced."""
        if owner is not None and owner.outlived(self.run.id):
            raise replaced(self.directory, self.run, owner)
        return self._lock.take(dir_fd)

    def _has(self, owner: Ownership | None, run: str, step: int) -> bool:
        return run == self.run.id or (
            owner is not None and owner.run.id == self.run.id and owner.has(run, step)
        )

    def _confirm(self, owner: Ownership | None) -> None:
        if owner is not None and owner.run.id != self.run.id:
            raise replaced(self.directory, self.run, owner)

    def _refuse_newer(self, dir_fd: int, owner: Ownership | None, least: int, ours: int) -> None:
        """Raise if there are checkpoints from the step `least` on that are not this run's, which has come to `ours`."""
        for one in _readable(dir_fd):
            known = one.step < least or one.step in self._bad or self._has(owner, one.run, one.step)
            if not known:
                raise newer(self.directory, self.run, one.step, one.run, ours)

    def _owner(self, dir_fd: int) -> Ownership | None:
        try:
            with open_for_reading(dir_fd, OWNER_NAME) as stream:
                return Ownership.from_json(stream.read(MAX_OWNER_BYTES + 1))
        except FileNotFoundError:
            return None
        except ValueError as error:
            logger.warning("left aside: file=%s reason=%s", os.path.join(self.directory, OWNER_NAME), error)
            return None

    def _put_owner(self, dir_fd: int, owner: Ownership) -> None:
        raw = owner.to_json()
        temporary = self._temporary(0, 0, "json")
        write_durably(dir_fd, temporary, lambda sink: sink.write(raw))
        os.rename(temporary, OWNER_NAME, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.fsync(dir_fd)

    # ---------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Every step that has a manifest, newest first, verified or not; empty when there is no directory."""
        try:
            with self._opened() as dir_fd:
                return manifest_steps(dir_fd)
        except FileNotFoundError:
            return []

    def newest_manifest(self, unwanted: Callable[[Manifest], bool] = _none) -> Manifest | None:
        """What the newest checkpoint claims to be: its data was not looked at. Raises OSError.

        One that is `unwanted` is only taken where there is no other.
        """
        last: Manifest | None = None
        try:
            with self._opened() as dir_fd:
                for step in self._candidates(dir_fd):
                    with contextlib.suppress(ValueError):
                        manifest = read_manifest(dir_fd, step)
                        if not unwanted(manifest):
                            return manifest
                        last = last or manifest
        except FileNotFoundError:
            pass
        return last

    def find(
        self, unwanted: Callable[[Manifest], bool] = _none
    ) -> tuple[VerifiedCheckpoint | None, list[BadCheckpoint]]:
        """The newest checkpoint that verifies, and those before it that do not. What is `unwanted` comes last.

        A reader beside a run that saves may find gone what it has listed, and something newer there: it looks again.
        """
        for _ in range(_LOOKS):
            checkpoint, bad = self._find(unwanted)
            gone = [one.step for one in bad if isinstance(one.__cause__, FileNotFoundError)]
            if checkpoint is not None or not gone or max(self.steps(), default=-1) <= max(gone):
                break
        return checkpoint, bad

    def _find(
        self, unwanted: Callable[[Manifest], bool]
    ) -> tuple[VerifiedCheckpoint | None, list[BadCheckpoint]]:
        bad: list[BadCheckpoint] = []
        try:
            with self._opened() as dir_fd:
                candidates = self._candidates(dir_fd)
        except FileNotFoundError:
            return None, bad
        for step in sorted(candidates, key=lambda step: self._claims(step, unwanted)):
            try:
                return self.open(step), bad
            except BadCheckpoint as error:
                bad.append(error)
        return None, bad

    def _claims(self, step: int, what: Callable[[Manifest], bool]) -> bool:
        try:
            with self._opened() as dir_fd:
                return what(read_manifest(dir_fd, step))
        except (OSError, ValueError):
            return False

    def open(self, step: int) -> VerifiedCheckpoint:
        """Open and verify one checkpoint. Raises BadCheckpoint; the caller closes the stream."""
        name = manifest_name(step)
        try:
            with self._opened() as dir_fd:
                manifest = read_manifest(dir_fd, step)
                name = manifest.file
                stream = open_for_reading(dir_fd, name)
                try:
                    _verify(stream, manifest)
                except BaseException:
                    stream.close()
                    raise
        except (OSError, ValueError) as error:
            self._bad.add(step)
            raise BadCheckpoint(step, os.path.join(self.directory, name), str(error)) from error
        self.good.add(step)
        return VerifiedCheckpoint(manifest, stream)

    def open_data(self, manifest: Manifest) -> BufferedReader:
        """The data of a checkpoint, not verified. Raises OSError; the caller closes the stream."""
        with self._opened() as dir_fd:
            return open_for_reading(dir_fd, manifest.file)

    def _candidates(self, dir_fd: int) -> list[int]:
        """Steps to load, best first: this run's own from the newest on, and then others' if it has just come here."""
        owner = self._owner(dir_fd)
        own: list[int] = []
        others: list[int] = []
        for step in manifest_steps(dir_fd):
            manifest = manifest_of(dir_fd, step)
            ours = manifest is None or self._has(owner, manifest.run, step)
            (own if ours else others).append(step)
        return own if self._is_settled(owner) else own + others

    # ---------------------------------------------------------------- writing

    def write(
        self,
        step: int,
        *,
        generation: int,
        world_size: int,
        serialize: Callable[[BinaryIO], object],
        may_change: Callable[[], None],
    ) -> Manifest:
        """Make the data durable under its final name. It is no checkpoint yet: `publish` makes it one.

        Raises OSError when the directory refuses, OtherRun, and what `may_change` raises (see `publish`): whatever
        was there before is untouched.
        """
        make_directory(self.directory)
        with self._opened() as dir_fd:
            owner = self._ask(dir_fd, may_change, step)
            self._remove_abandoned(dir_fd, owner, generation)
            self._remove_unnamed(dir_fd, owner, may_change)
            temporary = self._temporary(generation, step, "pt")
            with self._blaming(dir_fd):
                sha256, size = write_durably(dir_fd, temporary, serialize)
                name = f"step-{step:012d}-{self.run.id}-{self._mark}-{sha256[:16]}.pt"
                os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.fsync(dir_fd)
        return Manifest(step, generation, world_size, name, size, sha256, self.run.id)

    def publish(self, manifest: Manifest, may_change: Callable[[], None]) -> None:
        """Make the manifest visible and durable: from here on the checkpoint exists. Then drop older ones.

        `may_change` returns if this process may change what others see at this instant, and raises CheckpointError
        if not: then there is no such checkpoint, or an old one too many. Raises OtherRun, and OSError.
        """
        raw = manifest.to_json()
        with self._opened() as dir_fd:
            temporary = self._temporary(manifest.generation, manifest.step, "json")
            try:
                with self._blaming(dir_fd):
                    write_durably(dir_fd, temporary, lambda sink: sink.write(raw))
                    self._ask(dir_fd, may_change, manifest.step)
                    os.rename(temporary, manifest_name(manifest.step), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except BaseException:
                # Their names have our run and mark in them: they are no other run's.
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=dir_fd)
                self.discard(manifest)
                raise
            os.fsync(dir_fd)
            self.good.add(manifest.step)
            try:
                self._prune(dir_fd, manifest.step, may_change)
            except (OSError, CheckpointError) as error:
                # The new checkpoint is safe; a file too many is no reason to call its save a failure.
                logger.warning("old checkpoints not deleted: directory=%s reason=%s", self.directory, error)

    def discard(self, manifest: Manifest) -> None:
        """Remove the data of a checkpoint of this object that will not be published."""
        with contextlib.suppress(OSError), self._opened() as dir_fd:
            if not is_named(dir_fd, manifest.step, manifest.file):
                os.unlink(manifest.file, dir_fd=dir_fd)

    def _ask(self, dir_fd: int, may_change: Callable[[], None], least: int | None = None) -> Ownership | None:
        """Return if the directory is ours, holds nothing of others from step `least` on, and the caller gives leave."""
        owner = self._owner(dir_fd)
        self._confirm(owner)
        if least is not None:
            self._refuse_newer(dir_fd, owner, least, least - 1)
        may_change()
        return owner

    @contextlib.contextmanager
    def _blaming(self, dir_fd: int) -> Iterator[None]:
        """A file of ours that is gone was removed by the run that has taken over: that is the error to tell."""
        try:
            yield
        except FileNotFoundError:
            self._confirm(self._owner(dir_fd))
            raise

    def _prune(self, dir_fd: int, newest: int, may_change: Callable[[], None]) -> None:
        # A manifest beyond the newest commit belongs to a past that the run fell back from: were it left, a disk
        # that reads again would bring that past back and undo the commits made since.
        self.good = set(sorted(step for step in self.good if step <= newest)[-self.keep :])
        enough = len(self.good) == self.keep
        owner = self._owner(dir_fd)
        for step in manifest_steps(dir_fd):
            given_up = step > newest or (enough and step not in self.good)
            if given_up and self._may_drop(dir_fd, owner, step):
                self._ask(dir_fd, may_change)
                os.unlink(manifest_name(step), dir_fd=dir_fd)
        self._remove_unnamed(dir_fd, owner, may_change)

    def _may_drop(self, dir_fd: int, owner: Ownership | None, step: int) -> bool:
        """Whether the manifest of `step` is ours. One that cannot be read is of a run that has data of that step."""
        manifest = manifest_of(dir_fd, step)
        if manifest is not None:
            return self._has(owner, manifest.run, step)
        return all(self._has(owner, run, 0) for run in runs_with_data(dir_fd, step))

    def _remove_unnamed(self, dir_fd: int, owner: Ownership | None, may_change: Callable[[], None]) -> None:
        """Remove data that no manifest names: what was never published, and what of older checkpoints is left."""
        for name in os.listdir(dir_fd):
            match = DATA_NAME.fullmatch(name)
            if (
                match
                and self._inherits(owner, match["run"])
                and not is_named(dir_fd, int(match["step"]), name)
            ):
                self._ask(dir_fd, may_change)
                os.unlink(name, dir_fd=dir_fd)

    def _remove_abandoned(self, dir_fd: int, owner: Ownership | None, generation: int) -> None:
        """Remove what writers died over, but not a newer generation's: its writer may live, and we be the past."""
        for name in os.listdir(dir_fd):
            match = TEMPORARY_NAME.fullmatch(name)
            if not match or not self._inherits(owner, match["run"]):
                continue
            if match["run"] != self.run.id or int(match["generation"]) <= generation:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=dir_fd)

    def _inherits(self, owner: Ownership | None, run: str | None) -> bool:
        """Whether what that run has not published is this one's to remove."""
        return run == self.run.id or (
            owner is not None and owner.run.id == self.run.id and owner.outlived(run or "")
        )

    def _temporary(self, generation: int, step: int, kind: str) -> str:
        return f"tmp-{generation:08d}-{step:012d}-{self.run.id}-{self._mark}.{kind}"

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        dir_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield dir_fd
        finally:
            os.close(dir_fd)


def _readable(dir_fd: int) -> list[Manifest]:
    return [one for step in manifest_steps(dir_fd) if (one := manifest_of(dir_fd, step)) is not None]


def _verify(stream: BufferedReader, manifest: Manifest) -> None:
    size = os.fstat(stream.fileno()).st_size
    if size != manifest.size:
        raise ValueError(f"{size} bytes long, the manifest says {manifest.size}")
    if digest(stream) != manifest.sha256:
        raise ValueError("sha256 differs from the manifest's")


def digest(stream: BufferedReader | BufferedRandom) -> str:
    """The sha256 of a whole stream, which is at its beginning before and after."""
    stream.seek(0)
    sha256 = hashlib.sha256()
    while block := stream.read(_READ_BYTES):
        sha256.update(block)
    stream.seek(0)
    return sha256.hexdigest()
