"""The checkpoint directory: what lies on disk, and the order in which it gets there.

A checkpoint is two files. The *data* is whatever the caller serializes; its name carries its own digest, so a
new data file never overwrites one that somebody may still need. The *manifest* names the data file with size and
sha256 and carries a checksum of itself; its rename is the one instant at which the checkpoint begins to exist.

    step-000000000120-4f1c0a9be2d35577.pt
    step-000000000120.json

Invariant: whenever the power goes, every visible manifest names data that was durable before it, and the newest
`keep` good checkpoints are still there. It follows from the order, each line done before the next begins:

    1 write the data under a temporary name, fsync it       4 write the manifest under a temporary name, fsync it
    2 rename the data to its final name                     5 rename the manifest to its final name
    3 fsync the directory                                   6 fsync the directory; only now delete older ones

In 5 and 6 the caller is asked for leave right before each rename and each deletion, since a writer that stood still
may by then be a writer of the past. What such a writer had written before stays: another's manifest may name the very
same data, and the next writer that publishes deletes what no manifest names.

After a failed write or fsync the file is abandoned: the kernel may have dropped the dirty pages and call the next
fsync a success. Files are opened below one directory descriptor and never through a symbolic link.

One process at a time writes (rank 0); any number may read. No torch here, and no collectives: see `checkpoint`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from io import BufferedReader, BytesIO
from typing import BinaryIO, cast

from .errors import BadCheckpoint, CheckpointError

logger = logging.getLogger(__name__)

SCHEMA = 1
_MANIFEST_NAME = re.compile(r"step-(\d{12,19})\.json")
_DATA_NAME = re.compile(r"step-(\d{12,19})-[0-9a-f]{16}\.pt")
_TEMPORARY_NAME = re.compile(r"tmp-(\d{8,19})-.*")
_MAX_MANIFEST_BYTES = 4096
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one checkpoint must look like to be believed: the step, who wrote it, and its data file's digest."""

    step: int
    generation: int
    world_size: int
    file: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("generation", 0), ("world_size", 1), ("size", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**63:
                raise ValueError(f"manifest: {name} is {value!r}, expected an integer of at least {least}")
        if not isinstance(self.sha256, str) or not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"manifest: sha256 is {self.sha256!r}, expected 64 hexadecimal digits")
        if self.file != _data_name(self.step, self.sha256):
            raise ValueError(f"manifest: file is {self.file!r}, which is not this step's data file")

    def to_json(self) -> bytes:
        body = {"schema": SCHEMA, **asdict(self)}
        return json.dumps({**body, "check": _check(body)}, indent=1).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Read a manifest; ValueError says what is wrong with it."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"manifest is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ValueError(f"manifest is a JSON {type(body).__name__}, expected an object")
        schema = body.get("schema")
        if type(schema) is not int or schema != SCHEMA:
            raise ValueError(f"manifest has schema {schema!r}, this version reads {SCHEMA}")
        if body.pop("check", None) != _check(body):
            raise ValueError("manifest does not match its own checksum")
        del body["schema"]
        if body.keys() != {field.name for field in fields(cls)}:
            raise ValueError(f"manifest has the keys {sorted(body)}")
        return cls(**body)


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose digest was just checked; `stream` is the very file that was read, at its beginning."""

    manifest: Manifest
    stream: BufferedReader


class CheckpointFiles:
    """The checkpoints of one directory, of which the newest `keep` good ones are retained."""

    def __init__(self, directory: str | os.PathLike[str], *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1 checkpoint to retain")
        self.directory = os.path.abspath(directory)
        self.keep = keep
        # Steps that this object wrote or verified. What nobody looked at does not count as a good one to fall
        # back to, so it can never push a good one out of the newest `keep`.
        self.good: set[int] = set()

    def trust(self, *steps: int) -> None:
        """Another has just written or verified these."""
        self.good.update(steps)

    def steps(self) -> list[int]:
        """Every step that has a manifest, newest first, verified or not; empty when there is no directory."""
        try:
            with self._opened() as dir_fd:
                return _manifest_steps(dir_fd)
        except FileNotFoundError:
            return []

    def newest_manifest(self) -> Manifest | None:
        """What the newest checkpoint claims to be: its data was not looked at. Raises OSError."""
        try:
            with self._opened() as dir_fd:
                for step in _manifest_steps(dir_fd):
                    with contextlib.suppress(ValueError):
                        return _read_manifest(dir_fd, step)
        except FileNotFoundError:
            pass
        return None

    def find(self) -> tuple[VerifiedCheckpoint | None, list[BadCheckpoint]]:
        """The newest checkpoint that verifies, and every newer one that does not."""
        bad: list[BadCheckpoint] = []
        for step in self.steps():
            try:
                return self.open(step), bad
            except BadCheckpoint as error:
                bad.append(error)
        return None, bad

    def open(self, step: int) -> VerifiedCheckpoint:
        """Open and verify one checkpoint. Raises BadCheckpoint; the caller closes the stream."""
        name = _manifest_name(step)
        try:
            with self._opened() as dir_fd:
                manifest = _read_manifest(dir_fd, step)
                name = manifest.file
                stream = _open_for_reading(dir_fd, name)
                try:
                    _verify(stream, manifest)
                except BaseException:
                    stream.close()
                    raise
        except (OSError, ValueError) as error:
            raise BadCheckpoint(step, os.path.join(self.directory, name), str(error)) from error
        self.good.add(step)
        return VerifiedCheckpoint(manifest, stream)

    def write(
        self, step: int, *, generation: int, world_size: int, serialize: Callable[[BinaryIO], object]
    ) -> Manifest:
        """Make the data durable under its final name. It is no checkpoint yet: `publish` makes it one.

        Raises OSError when the directory refuses; whatever was there before is untouched.
        """
        _make_directory(self.directory)
        with self._opened() as dir_fd:
            _remove_abandoned(dir_fd, generation)
            temporary = f"tmp-{generation:08d}-{step:012d}.pt"
            sha256, size = _write_durably(dir_fd, temporary, serialize)
            name = _data_name(step, sha256)
            os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.fsync(dir_fd)
        return Manifest(step, generation, world_size, name, size, sha256)

    def publish(self, manifest: Manifest, may_change: Callable[[], None]) -> None:
        """Make the manifest visible and durable: from here on the checkpoint exists. Then drop older ones.

        `may_change` returns if this process may change what others see at this instant, and raises CheckpointError
        if not: then there is no such checkpoint, or an old one too many.
        """
        raw = manifest.to_json()
        with self._opened() as dir_fd:
            temporary = f"tmp-{manifest.generation:08d}-{manifest.step:012d}.json"
            _write_durably(dir_fd, temporary, lambda sink: sink.write(raw))
            try:
                may_change()
                os.rename(temporary, _manifest_name(manifest.step), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except BaseException:
                # Its name has our generation in it: it is nobody else's.
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=dir_fd)
                raise
            os.fsync(dir_fd)
            self.good.add(manifest.step)
            try:
                self._prune(dir_fd, manifest.step, may_change)
            except (OSError, CheckpointError) as error:
                # The new checkpoint is safe; a file too many is no reason to call its save a failure.
                logger.warning("old checkpoints not deleted: directory=%s reason=%s", self.directory, error)

    def _prune(self, dir_fd: int, newest: int, may_change: Callable[[], None]) -> None:
        # A manifest beyond the newest commit belongs to a past that the run fell back from: were it left, a disk
        # that reads again would bring that past back and undo the commits made since.
        self.good = set(sorted(step for step in self.good if step <= newest)[-self.keep :])
        enough = len(self.good) == self.keep
        for step in _manifest_steps(dir_fd):
            if step > newest or (enough and step not in self.good):
                may_change()
                os.unlink(_manifest_name(step), dir_fd=dir_fd)
        remaining = set(_manifest_steps(dir_fd))
        for name in os.listdir(dir_fd):
            match = _DATA_NAME.fullmatch(name)
            if match and not (int(match[1]) in remaining and _may_need(dir_fd, int(match[1]), name)):
                may_change()
                os.unlink(name, dir_fd=dir_fd)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        dir_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield dir_fd
        finally:
            os.close(dir_fd)


class _DurableSink:
    """Writes to a descriptor and digests what went by; remembers an OSError that the serializer swallows."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview, /) -> int:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered here; fsync comes once, at the end."""


def _write_durably(dir_fd: int, name: str, serialize: Callable[[BinaryIO], object]) -> tuple[str, int]:
    """Create `name`, let `serialize` fill it, fsync it; returns its sha256 and size. All or no file at all."""
    # Who may read checkpoints is for the umask to say.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o666, dir_fd=dir_fd)
    try:
        sink = _DurableSink(fd)
        try:
            # It has the two methods a serializer needs, of the many that the type promises.
            serialize(cast(BinaryIO, sink))
            os.fsync(fd)
        except Exception as error:
            # torch.save turns a full disk into a RuntimeError about file positions: tell the real story.
            if sink.error is not None:
                raise sink.error from error
            raise
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=dir_fd)
        raise
    return sink.digest.hexdigest(), sink.size


def _verify(stream: BufferedReader, manifest: Manifest) -> None:
    size = os.fstat(stream.fileno()).st_size
    if size != manifest.size:
        raise ValueError(f"{size} bytes long, the manifest says {manifest.size}")
    if digest(stream) != manifest.sha256:
        raise ValueError("sha256 differs from the manifest's")


def digest(stream: BufferedReader | BytesIO) -> str:
    """The sha256 of a whole stream, which is at its beginning before and after."""
    stream.seek(0)
    sha256 = hashlib.sha256()
    while block := stream.read(_READ_BYTES):
        sha256.update(block)
    stream.seek(0)
    return sha256.hexdigest()


def _read_manifest(dir_fd: int, step: int) -> Manifest:
    with _open_for_reading(dir_fd, _manifest_name(step)) as stream:
        raw = stream.read(_MAX_MANIFEST_BYTES + 1)
    if len(raw) > _MAX_MANIFEST_BYTES:
        raise ValueError(f"manifest is longer than {_MAX_MANIFEST_BYTES} bytes")
    manifest = Manifest.from_json(raw)
    if manifest.step != step:
        raise ValueError(f"manifest of step {manifest.step} under the name of step {step}")
    return manifest


def _open_for_reading(dir_fd: int, name: str) -> BufferedReader:
    # O_NONBLOCK: a named pipe in the place of a file must fail to verify, not hang the load.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    return os.fdopen(fd, "rb")


def _may_need(dir_fd: int, step: int, name: str) -> bool:
    """Whether the manifest of `step` may name this data file; an unreadable manifest may name any."""
    try:
        return _read_manifest(dir_fd, step).file == name
    except (OSError, ValueError):
        return True


def _remove_abandoned(dir_fd: int, generation: int) -> None:
    """Remove what writers died over. A newer generation's file is left: its writer may be alive, we are the past."""
    for name in os.listdir(dir_fd):
        match = _TEMPORARY_NAME.fullmatch(name)
        if match and int(match[1]) <= generation:
            os.unlink(name, dir_fd=dir_fd)


def _manifest_steps(dir_fd: int) -> list[int]:
    matches = map(_MANIFEST_NAME.fullmatch, os.listdir(dir_fd))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _manifest_name(step: int) -> str:
    return f"step-{step:012d}.json"


def _data_name(step: int, sha256: str) -> str:
    return f"step-{step:012d}-{sha256[:16]}.pt"


def _check(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _make_directory(path: str) -> None:
    """Like makedirs, but a new directory's own name is durable too."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_directory(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent_fd)
    finally:
        os.close(parent_fd)
