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

Before 1, so that nothing large is written for nothing, and again right before each rename of 5 and each deletion, two
questions are asked. Is the directory still this run's (see `ownership`)? And does the caller give leave, since a
writer that stood still may by then be a writer of the past? A writer that is refused removes its own data file; what
one has died over is removed before the next write.

Only what is this run's own, or what it comes from (see `ownership`), is ever deleted or overwritten.

After a failed write or fsync the file is abandoned: the kernel may have dropped the dirty pages and call the next
fsync a success. Files are opened below one directory descriptor and never through a symbolic link.

One process at a time writes (rank 0); any number may read. No torch here, and no collectives: see `checkpointer`.

A sharded checkpoint is a directory in the place of the data file (see `shard_files`), which the ranks of all nodes
fill (see `parts` and `commit`). All that is said here of data holds for it, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from typing import BinaryIO

from ...errors import BadCheckpoint, CheckpointError
from ...wire.environment import Run
from ...wire.files import open_directory, open_for_reading, open_own_directory
from . import old_format
from .durable import make_directory, write_durably
from .manifests import (
    ATTEMPT_NAME,
    FileSum,
    Manifest,
    data_match,
    is_named,
    manifest_name,
    manifest_of,
    manifest_steps,
    read_files,
    read_manifest,
    runs_with_data,
)
from .ownership import Claim, Ownership
from .shard_files import METADATA_NAME, DiskCopy, data_name, look, open_copy, remove_directory

logger = logging.getLogger(__name__)

_LOOKS = 10
"""How often a reader may find that a run that saves has replaced what it was about to read."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose digest was just checked; `stream` is the very file that was read, at its beginning.

    Of a sharded one that is DCP's index of its files, which are all there: `open_rank` reads and verifies their bytes.
    """

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
        self._lend = lend
        self.claim = Claim(self.directory, run, lend)
        self._rejected: dict[str, BadCheckpoint] = {}
        """By the `file` of the manifest, what was found when the bytes were read."""
        self._listed: tuple[Manifest, dict[str, FileSum]] | None = None
        """Of the sharded checkpoint that was read last."""

    def join(self, run: Run) -> None:
        """Without an agent each process is a run of its own; where all ranks write they are all of rank 0's."""
        if run.id != self.run.id:
            self.run = run
            self.claim = Claim(self.directory, run, self._lend)

    def trust(self, *steps: int) -> None:
        """Another has just written or verified these."""
        self.good.update(steps)

    # ---------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Every step that has a manifest, newest first, verified or not; empty when there is no directory."""
        try:
            with open_directory(self.directory) as dir_fd:
                return manifest_steps(dir_fd)
        except FileNotFoundError:
            return []

    def newest_manifest(self, unwanted: Callable[[Manifest], bool] = _none) -> Manifest | None:
        """What the newest checkpoint claims to be: its data was not looked at. Raises OSError.

        One that is `unwanted` is only taken where there is no other.
        """
        return next(
            (
                manifest
                for _, manifest in self._candidates(unwanted)
                if manifest is not None and manifest.file not in self._rejected
            ),
            None,
        )

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
        for step, manifest in self._candidates(unwanted):
            if manifest is not None and manifest.file in self._rejected:
                bad.append(self._rejected[manifest.file])
                continue
            try:
                return self.open(step), bad
            except BadCheckpoint as error:
                bad.append(error)
        return None, bad

    def open(self, step: int) -> VerifiedCheckpoint:
        """Open and verify one checkpoint. Raises BadCheckpoint; the caller closes the stream."""
        name = manifest_name(step)
        try:
            with open_directory(self.directory) as dir_fd:
                manifest = read_manifest(dir_fd, step)
                name = manifest.file
                stream = _open_verified(dir_fd, manifest)
        except (OSError, ValueError) as error:
            self.claim.bad_steps.add(step)
            raise BadCheckpoint(step, os.path.join(self.directory, name), str(error)) from error
        self.good.add(step)
        return VerifiedCheckpoint(manifest, stream)

    def has(self, manifest: Manifest) -> bool:
        """Whether that checkpoint is still there, or may be."""
        try:
            with open_directory(self.directory) as dir_fd:
                return is_named(dir_fd, manifest.step, manifest.file)
        except OSError:
            return True

    def open_data(self, manifest: Manifest) -> BufferedReader:
        """The data of a checkpoint, not verified. Raises OSError; the caller closes the stream."""
        with open_directory(self.directory) as dir_fd:
            return open_for_reading(dir_fd, manifest.file)

    def open_rank(self, manifest: Manifest, rank: int) -> DiskCopy:
        """That rank's copy in a sharded checkpoint, for the caller to close. Raises BadCheckpoint."""
        path = os.path.join(self.directory, manifest.file, data_name(rank))
        try:
            with (
                open_directory(self.directory) as dir_fd,
                open_own_directory(manifest.file, dir_fd) as there,
            ):
                if self._listed is None or self._listed[0] != manifest:
                    self._listed = manifest, _files_of(dir_fd, there, manifest)
                files = self._listed[1]
                open_it = old_format.open_copy if old_format.is_old(files) else open_copy
                return open_it(there, path, manifest, files, rank)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(manifest.step, path, str(error)) from error

    def reject(self, manifest: Manifest, bad: BadCheckpoint) -> None:
        """The bytes of that checkpoint, which were read since, are damaged: it is found no more."""
        self._rejected[manifest.file] = bad
        self.claim.bad_steps.add(manifest.step)
        self.good.discard(manifest.step)

    def _candidates(self, unwanted: Callable[[Manifest], bool]) -> list[tuple[int, Manifest | None]]:
        """Steps to load, best first: this run's own from the newest on, and then others' if it has just come here.

        What is `unwanted` comes last. None: the manifest cannot be read. Raises OSError.
        """
        own: list[tuple[int, Manifest | None]] = []
        others: list[tuple[int, Manifest | None]] = []
        try:
            with open_directory(self.directory) as dir_fd:
                owner = self.claim.read_owner(dir_fd)
                for step in manifest_steps(dir_fd):
                    manifest = manifest_of(dir_fd, step)
                    is_own = manifest is None or self.claim.has(owner, manifest.run, step)
                    (own if is_own else others).append((step, manifest))
        except FileNotFoundError:
            return []
        found = own if self.claim.is_owner(owner) else own + others
        return sorted(found, key=lambda one: one[1] is not None and unwanted(one[1]))

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
        with self.prepared(step, generation, may_change) as dir_fd:
            temporary = self.claim.temporary_name(generation, step, "pt")
            with self.claim.blaming(dir_fd):
                sha256, size = write_durably(dir_fd, temporary, serialize)
                name = f"step-{step:012d}-{self.run.id}-{self.claim.mark}-{sha256[:16]}.pt"
                os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.fsync(dir_fd)
        return Manifest(step, generation, world_size, name, size, sha256, self.run.id)

    @contextlib.contextmanager
    def prepared(self, step: int, generation: int, may_change: Callable[[], None]) -> Iterator[int]:
        """The directory, where a save of `step` may begin, and nothing is left of those that came to no end.

        Raises OSError, OtherRun, and what `may_change` raises.
        """
        make_directory(self.directory)
        with open_directory(self.directory) as dir_fd:
            owner = self._ask(dir_fd, may_change, step)
            self.claim.remove_abandoned(dir_fd, owner, generation)
            self._remove_unnamed(dir_fd, owner, may_change, (generation, step))
            yield dir_fd

    def publish(
        self,
        manifest: Manifest,
        may_change: Callable[[], None],
        listed: Mapping[str, FileSum] | None = None,
    ) -> None:
        """Make the manifest visible and durable: from here on the checkpoint exists. Then drop older ones.

        `listed` are the files of a sharded one.
        `may_change` returns if this process may change what others see at this instant, and raises CheckpointError
        if not: then there is no such checkpoint, or an old one too many. Raises OtherRun, and OSError.
        """
        raw = manifest.to_json(listed)
        with open_directory(self.directory) as dir_fd:
            temporary = self.claim.temporary_name(manifest.generation, manifest.step, "json")
            try:
                with self.claim.blaming(dir_fd):
                    write_durably(dir_fd, temporary, lambda sink: sink.write(raw))
                    self._ask(dir_fd, may_change, manifest.step)
                    os.rename(temporary, manifest_name(manifest.step), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except BaseException:
                # Their names have our run and mark in them: they are no other run's.
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=dir_fd)
                if not manifest.is_sharded:  # what all nodes have written may be published by another try
                    self.discard(manifest)
                raise
            os.fsync(dir_fd)
            self.good.add(manifest.step)
            try:
                self._prune(dir_fd, manifest, may_change)
            except (OSError, CheckpointError) as error:
                # The new checkpoint is safe; a file too many is no reason to call its save a failure.
                logger.warning("old checkpoints not deleted: directory=%s reason=%s", self.directory, error)

    def discard(self, manifest: Manifest) -> None:
        """Remove the data of a checkpoint of this object that will not be published."""
        with contextlib.suppress(OSError), open_directory(self.directory) as dir_fd:
            if not is_named(dir_fd, manifest.step, manifest.file):
                _remove_data(dir_fd, manifest.file)

    def _ask(self, dir_fd: int, may_change: Callable[[], None], least: int | None = None) -> Ownership | None:
        """Return if the directory is ours, holds nothing of others from step `least` on, and the caller gives leave."""
        owner = self.claim.check(dir_fd, least)
        may_change()
        return owner

    def _prune(self, dir_fd: int, published: Manifest, may_change: Callable[[], None]) -> None:
        # A manifest beyond the newest commit belongs to a past that the run fell back from: were it left, a disk
        # that reads again would bring that past back and undo the commits made since. Unless another process of this
        # generation has just committed it.
        newest = published.step
        self.good = set(sorted(step for step in self.good if step <= newest)[-self.keep :])
        enough = len(self.good) == self.keep
        owner, dropped = self.claim.read_owner(dir_fd), False
        for step in manifest_steps(dir_fd):
            old = enough and step not in self.good
            drops = old if step <= newest else self._is_given_up(dir_fd, step, published.generation)
            if drops and self._may_drop(dir_fd, owner, step):
                self._ask(dir_fd, may_change)
                os.unlink(manifest_name(step), dir_fd=dir_fd)
                dropped = True
        if dropped and any(map(ATTEMPT_NAME.fullmatch, os.listdir(dir_fd))):
            os.fsync(dir_fd)  # a manifest that comes back after a power cut has all of its files
        self._remove_unnamed(dir_fd, owner, may_change, (published.generation, newest))

    def _is_given_up(self, dir_fd: int, step: int, generation: int) -> bool:
        if step in self.claim.bad_steps:
            return True
        manifest = manifest_of(dir_fd, step)
        return manifest is None or manifest.run != self.run.id or manifest.generation < generation

    def _may_drop(self, dir_fd: int, owner: Ownership | None, step: int) -> bool:
        """Whether the manifest of `step` is ours. One that cannot be read is of a run that has data of that step."""
        manifest = manifest_of(dir_fd, step)
        if manifest is not None:
            return self.claim.has(owner, manifest.run, step)
        runs = runs_with_data(dir_fd, step)
        return bool(runs) and all(self.claim.has(owner, run, 0) for run in runs)

    def _remove_unnamed(
        self, dir_fd: int, owner: Ownership | None, may_change: Callable[[], None], before: tuple[int, int]
    ) -> None:
        """Remove data that no manifest names: what was never published, and what of older checkpoints is left.

        Of this run's directories those from the generation and step `before` on may still be filled, by other nodes.
        """
        for name in os.listdir(dir_fd):
            match = data_match(name)
            if (
                match
                and self.claim.inherits(owner, match["run"])
                and not is_named(dir_fd, int(match["step"]), name)
                and not (match["run"] == self.run.id and _may_be_filled(match, before))
            ):
                self._ask(dir_fd, may_change)
                _remove_data(dir_fd, name)


def _may_be_filled(match: re.Match[str], before: tuple[int, int]) -> bool:
    return match.re is ATTEMPT_NAME and (int(match["generation"]), int(match["step"])) >= before


def _remove_data(dir_fd: int, name: str) -> None:
    if ATTEMPT_NAME.fullmatch(name):
        remove_directory(dir_fd, name)
    else:
        os.unlink(name, dir_fd=dir_fd)


def _open_verified(dir_fd: int, manifest: Manifest) -> BufferedReader:
    """See `VerifiedCheckpoint`. Raises OSError, ValueError."""
    if manifest.is_sharded:
        with open_own_directory(manifest.file, dir_fd) as there:
            look(there, _files_of(dir_fd, there, manifest))
            return open_for_reading(there, METADATA_NAME)
    stream = open_for_reading(dir_fd, manifest.file)
    try:
        _verify(stream, manifest)
    except BaseException:
        stream.close()
        raise
    return stream


def _files_of(dir_fd: int, there: int, manifest: Manifest) -> dict[str, FileSum]:
    """Of a sharded checkpoint in the directory `there`. Raises OSError, ValueError."""
    files = read_files(dir_fd, manifest)
    return old_format.files_of(there, manifest) if files is None else files


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
