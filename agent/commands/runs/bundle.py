"""Packs a run's folder into one archive of bounded size, with everything masked that looks like a secret.

Only the end of a long file is kept: its last lines matter most. Links are not followed. Only the agents' text files and
the dumps of torch's flight recorder are taken. `about.txt` lists what was left out, and why.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ....codec import Invalid
from ...output.log_folders import FLIGHT_RECORDS
from ...output.masking import masked
from ...output.secret_digests import FILE_NAME, SECRET_DIGESTS, SecretDigests, find_secrets, without

MOST_OF_A_FILE = 2 * 2**20
MOST_FILES = 20_000
MOST_IN_ALL = 512 * 2**20

_TEXTS = re.compile(r".*\.(log|txt|toml)|events-.+\.jsonl(\.1)?")


@dataclass(slots=True)
class Bundled:
    """What the archive contains, and what it does not."""

    files: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    """One line for each file that was cut or left out."""


def write_bundle(
    archive: IO[bytes], run: Path, about: Callable[[Bundled], str], known: Collection[str]
) -> Bundled:
    """Everything below the folder `run`, in a folder of the same name; `known` are secrets' values. Others are found by
    the digests that the run's agents have left. Raises OSError when the archive cannot be written."""
    done = Bundled()
    digests = [without(one, known) for one in _secret_digests(run, done)]
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in _files(run, done):
            name = path.relative_to(run)
            try:
                content = _content(path, name, done)
            except OSError as error:
                done.notes.append(f"{name}: left out: {error.strerror}")
                continue
            if FLIGHT_RECORDS not in name.parts:
                text = content.decode(errors="replace")
                content = masked(text, {*known, *_found(text, digests)}).encode(errors="replace")
            if done.bytes + len(content) > MOST_IN_ALL:
                done.notes.append(f"{name}: left out: the archive is full")
                continue
            _add(tar, f"{run.name}/{name}", content)
            done.files += 1
            done.bytes += len(content)
        text = about(done)
        text = masked(text, {*known, *_found(text, digests)})
        _add(tar, f"{run.name}/about.txt", text.encode(errors="replace"))
    return done


def _secret_digests(run: Path, done: Bundled) -> Iterator[SecretDigests]:
    """Of the secrets of each node's agent."""
    for path in sorted(run.iterdir()):
        if FILE_NAME.fullmatch(path.name):
            name = path.relative_to(run)
            try:
                yield SECRET_DIGESTS.decode(_content(path, name, done).decode(errors="replace"))
            except (OSError, Invalid) as error:
                done.notes.append(f"{name}: its secrets are not masked where they stand alone: {error}")


def _found(text: str, digests: Iterable[SecretDigests]) -> Iterator[str]:
    for one in digests:
        yield from find_secrets(text, one)


def _files(run: Path, done: Bundled) -> Iterator[Path]:
    """The newest generations first: if the archive is full, old files are left out."""
    found = []
    for folder, _, names in os.walk(run):
        found += [Path(folder, name) for name in names]
    found.sort(key=lambda path: (-_generation(path.relative_to(run)), str(path)))
    for path in found[:MOST_FILES]:
        name = path.relative_to(run)
        if _TEXTS.fullmatch(path.name) or FLIGHT_RECORDS in name.parts:
            yield path
        elif not path.name.startswith("."):
            done.notes.append(f"{name}: left out: no file of the agent's")
    if len(found) > MOST_FILES:
        done.notes.append(f"{len(found) - MOST_FILES} files more are left out")


def _generation(name: Path) -> int:
    """The generation in a file's path; files without one count as the newest."""
    found = re.fullmatch(r"gen(\d{1,18})", name.parts[0])
    return int(found[1]) if found else 2**63


def _content(path: Path, name: Path, done: Bundled) -> bytes:
    # A worker may have put anything there: no link to elsewhere, and no pipe that would make us wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is not a regular file")
        if found.st_size > MOST_OF_A_FILE:
            done.notes.append(f"{name}: the last {MOST_OF_A_FILE} of {found.st_size} bytes")
            file.seek(-MOST_OF_A_FILE, os.SEEK_END)
            file.readline()  # half a line may be half a secret
        return file.read(MOST_OF_A_FILE)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o600
    tar.addfile(info, io.BytesIO(content))
