"""Files below one open directory, whatever takes its name later.

Only the directory that a user names may be a symbolic link. What this library makes below it is never opened through
one.

Checkpoints on disk and copies in memory are read and replaced with these.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from io import BufferedReader
from typing import Any

from ...codec import Invalid, load_object, plain, shown

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
OWN_DIRECTORY = _DIRECTORY | os.O_NOFOLLOW


def open_directory(path: str) -> contextlib.AbstractContextManager[int]:
    """The descriptor of a directory that a user names, through a symbolic link too. Raises OSError."""
    return _opened(path, _DIRECTORY)


def open_own_directory(path: str, dir_fd: int | None = None) -> contextlib.AbstractContextManager[int]:
    """The descriptor of a directory that this library has made. Raises OSError, also for a symbolic link."""
    return _opened(path, OWN_DIRECTORY, dir_fd)


@contextlib.contextmanager
def _opened(path: str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    """Raises OSError."""
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def open_for_reading(dir_fd: int, name: str) -> BufferedReader:
    # O_NONBLOCK: a named pipe in the place of a file must fail to verify, not hang the load.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        return os.fdopen(fd, "rb")
    except OSError as error:  # a directory: Python's own error names the descriptor, and leaves it open
        os.close(fd)
        raise OSError(error.errno, error.strerror, name) from None


def read_whole(dir_fd: int, name: str, most_bytes: int) -> bytes:
    """Raises OSError, and ValueError when it is longer."""
    with open_for_reading(dir_fd, name) as stream:
        raw = stream.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise ValueError(f"{name} is longer than {most_bytes} bytes")
    return raw


def replace_file(dir_fd: int, name: str, content: bytes) -> None:
    """At once, and not durably: for files in memory. Raises OSError."""
    temporary = f"tmp-{name}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=dir_fd)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(content)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        remove(dir_fd, temporary)  # what it has taken of a full memory is given back
        raise


def remove(dir_fd: int, name: str) -> None:
    """If it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


# ---------------------------------------------------------------- sealed files
#
# Small JSON files that show by themselves whether they are whole: the fields of a dataclass, a schema, a checksum.


def checksum(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def seal(schema: int, record: object, indent: int | None = None) -> bytes:
    return seal_fields({"schema": schema, **plain(record)}, indent)


def seal_fields(body: dict[str, Any], indent: int | None = None) -> bytes:
    return json.dumps({**body, "check": checksum(body)}, indent=indent).encode()


def unseal(raw: bytes, what: str, *schemas: int) -> tuple[int, dict[str, Any]]:
    """The schema, one of these, and the fields; `from_plain` makes the record of them. Raises Invalid."""
    body = load_object(raw, what)
    schema = body.get("schema")
    if type(schema) is not int or schema not in schemas:
        known = " and ".join(map(str, schemas))
        raise Invalid(f"{what} has schema {shown(schema)}, this version reads {known}")
    if body.pop("check", None) != checksum(body):
        raise Invalid(f"{what} does not match its own checksum")
    del body["schema"]
    return schema, body
