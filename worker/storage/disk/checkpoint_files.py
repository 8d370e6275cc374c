"""The checkpoint directory: what lies on disk, and the order in which it gets there.

A checkpoint is a directory with its *data*, whose name carries its run, its generation and a mark of this one attempt
to save, so that new data never overwrites what may still be needed; and a *manifest*, which names that directory, lists
its files with size and sha256, and carries a checksum of itself. Its rename is the one instant at which the checkpoint
begins to exist.

    step-000000000120-3b9e0c51d7aa-00000007-91c2f0d4/       see `shard_files`
    step-000000000120.json

Invariant: whenever the power goes, every visible manifest names data that was durable before it, and the newest
`keep` good checkpoints are still there. It follows from the order, each line done before the next begins:

    1 write each part under a temporary name, fsync it      4 write the manifest under a temporary name, fsync it
    2 rename it to its final name                           5 rename the manifest to its final name
    3 fsync both directories (see `commit`)                 6 fsync the directory; only now delete older ones

Before 1, so that nothing large is written for nothing, and again right before each rename of 5 and each deletion, two
questions are asked. Is the directory still this run's (see `ownership`)? And does the caller give leave, since a
writer that stood still may by then be a writer of the past? What a writer that is refused, or has died, leaves is
removed before the next write.

Only what is this run's own, or what it comes from (see `ownership`), is ever deleted or overwritten.

After a failed write or fsync the file is abandoned: the kernel may have dropped the dirty pages and call the next
fsync a success. Files are opened below one directory descriptor and never through a symbolic link.

The ranks that have parts fill the directory (see `parts`), one process at a time commits (rank 0, see `commit`), any
number may read. No torch here, and no collectives: see `checkpointer`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader

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
from .shard_files import METADATA_NAME, DiskCopy, Footer, data_name, look, open_copy, remove_directory

logger = logging.getLogger(__name__)

_LOOKS = 10
"""How often a reader may find that a run that saves has replaced what it was about to read."""


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint that was just looked at: all bytes of one part that has all, which is the open `stream`.

    `footer` is that of the part. Of several parts `stream` is DCP's index of them, and all are there: `open_rank` reads
    and verifies their bytes.
    """

    manifest: Manifest
    stream: BufferedReader
    footer: Footer | None = None


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
        """Of the checkpoint that was read last."""

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
        self, unwanted: Callable[[Manifest], bool] = _none, *, verify: bool = True
    ) -> tuple[VerifiedCheckpoint | None, list[BadCheckpoint]]:
        """The newest checkpoint that verifies, and those before it that do not. What is `unwanted` comes last.

        `verify`: all bytes of one part that has all, which else is verified as it is read, as several parts are.
        A reader beside a run that saves may find gone what it has listed, and something newer there: it looks again.
        """
        for _ in range(_LOOKS):
            checkpoint, bad = self._find(unwanted, verify)
            gone = [one.step for one in bad if isinstance(one.__cause__, FileNotFoundError)]
            if checkpoint is not None or not gone or max(self.steps(), default=-1) <= max(gone):
                break
        return checkpoint, bad

    def _find(
        self, unwanted: Callable[[Manifest], bool], verify: bool
    ) -> tuple[VerifiedCheckpoint | None, list[BadCheckpoint]]:
        bad: list[BadCheckpoint] = []
        for step, manifest in self._candidates(unwanted):
            if manifest is not None and manifest.file in self._rejected:
                bad.append(self._rejected[manifest.file])
                continue
            try:
                return self.open(step, verify=verify), bad
            except BadCheckpoint as error:
                bad.append(error)
        return None, bad

    def open(self, step: int, *, verify: bool = True) -> VerifiedCheckpoint:
        """Open and verify one checkpoint, as `find`. Raises BadCheckpoint; the caller closes the stream."""
        name = manifest_name(step)
        try:
            with open_directory(self.directory) as dir_fd:
                manifest = read_manifest(dir_fd, step)
                name = manifest.file
                found = self._open(dir_fd, manifest, verify)
        except (OSError, ValueError) as error:
            self.claim.bad_steps.add(step)
            raise BadCheckpoint(step, os.path.join(self.directory, name), str(error)) from error
        except BadCheckpoint:
            self.claim.bad_steps.add(step)
            raise
        self.good.add(step)
        return found

    def has(self, manifest: Manifest) -> bool:
        """Whether that checkpoint is still there, or may be."""
        try:
            with open_directory(self.directory) as dir_fd:
                return is_named(dir_fd, manifest.step, manifest.file)
        except OSError:
            return True

    def open_file(self, manifest: Manifest) -> BufferedReader:
        """Of the version before, see `old_format`: not verified. Raises OSError; the caller closes the stream."""
        with open_directory(self.directory) as dir_fd:
            return open_for_reading(dir_fd, manifest.file)

    def open_rank(self, manifest: Manifest, rank: int) -> DiskCopy:
        """That rank's part, for the caller to close. Raises BadCheckpoint."""
        path = os.path.join(self.directory, manifest.file, data_name(rank))
        try:
            with (
                open_directory(self.directory) as dir_fd,
                open_own_directory(manifest.file, dir_fd) as there,
            ):
                return self._open_rank(dir_fd, there, manifest, rank)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(manifest.step, path, str(error)) from error

    def _open_rank(self, dir_fd: int, there: int, manifest: Manifest, rank: int) -> DiskCopy:
        """Raises OSError, ValueError."""
        files = self._files_in(dir_fd, there, manifest)
        open_it = old_format.open_copy if old_format.is_old(files) else open_copy
        path = os.path.join(self.directory, manifest.file, data_name(rank))
        return open_it(there, path, manifest, files, rank)

    def _files_in(self, dir_fd: int, there: int, manifest: Manifest) -> dict[str, FileSum]:
        """Those of the checkpoint in the directory `there`. Raises OSError, ValueError."""
        listed = self._listed
        if listed is None or listed[0] != manifest:
            files = read_files(dir_fd, manifest)
            listed = self._listed = (
                manifest,
                old_format.files_of(there, manifest) if files is None else files,
            )
        return listed[1]

    def _open(self, dir_fd: int, manifest: Manifest, verify: bool) -> VerifiedCheckpoint:
        """Raises OSError, ValueError, BadCheckpoint."""
        if manifest.is_one_file:
            return VerifiedCheckpoint(manifest, old_format.open_verified(dir_fd, manifest))
        with open_own_directory(manifest.file, dir_fd) as there:
            look(there, self._files_in(dir_fd, there, manifest))
            if manifest.parts > 1:
                return VerifiedCheckpoint(manifest, open_for_reading(there, METADATA_NAME))
            copy = self._open_rank(dir_fd, there, manifest, 0)
            try:
                if verify:
                    copy.verify()
            except BaseException:
                copy.close()
                raise
            return VerifiedCheckpoint(manifest, copy.stream, copy.footer)

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
        self, manifest: Manifest, may_change: Callable[[], None], listed: Mapping[str, FileSum]
    ) -> None:
        """Make the manifest visible and durable: from here on the checkpoint exists. Then drop older ones.

        `listed` are its files. What they are may be published by another try, where this one fails.
        `may_change` returns if this process may change what others see at this instant, and raises CheckpointError
        if not: then there is no such checkpoint, or an old one too many. Raises OtherRun, and OSError.
        """
        raw = manifest.to_json(listed)
        with open_directory(self.directory) as dir_fd:
            temporary = self.claim.temporary_name(manifest.generation, manifest.step)
            try:
                with self.claim.blaming(dir_fd):
                    write_durably(dir_fd, temporary, lambda sink: sink.write(raw))
                    self._ask(dir_fd, may_change, manifest.step)
                    os.rename(temporary, manifest_name(manifest.step), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except BaseException:
                # Their names have our run and mark in them: they are no other run's.
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=dir_fd)
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
