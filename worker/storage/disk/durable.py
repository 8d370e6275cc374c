"""Files that are whole and durable, or not there: below one directory, and never through a symbolic link."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from typing import BinaryIO, cast

from ...wire.files import open_directory


class _DurableSink:
    """Writes to a descriptor and digests what went by; remembers an OSError that the serializer swallows."""

    def __init__(self, fd: int, *, digests: bool) -> None:
        self._fd = fd
        self._digests = digests
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview, /) -> int:
        done = 0
        try:
            # What an error still holds would keep the mapping open that is written.
            with memoryview(data) as whole:
                while done < len(whole):
                    with whole[done:] as left:
                        done += os.write(self._fd, left)
        except OSError as error:
            self.error = error
            raise
        if self._digests:
            self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered here; fsync comes once, at the end."""


def write_durably(
    dir_fd: int, name: str, serialize: Callable[[BinaryIO], object], *, digests: bool = True
) -> tuple[str, int]:
    """Create `name`, let `serialize` fill it, fsync it; returns its sha256 and size. All or no file at all.

    Without `digests` the sha256 is not that of the file.
    """
    # The umask says which users may read checkpoints.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o666, dir_fd=dir_fd)
    try:
        sink = _DurableSink(fd, digests=digests)
        try:
            # It has the two methods a serializer needs, of the many that the type promises.
            serialize(cast(BinaryIO, sink))
            os.fsync(fd)
        except Exception as error:
            # torch.save turns a full disk into a RuntimeError about file positions: raise its cause.
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


def make_directory(path: str) -> None:
    """Like makedirs, but a new directory's own name is durable too."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_directory(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    with open_directory(parent) as parent_fd:
        os.fsync(parent_fd)
