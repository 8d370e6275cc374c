"""How an operator on this machine finds its agents: each leaves its HTTP address and its store in its run directory.

The file is a hint, and its reader may be root in a folder that any user can write to. So it counts only when the
directory and the file belong to the reader, or, for root, to one and the same user; when no other user may have written
there; and when it holds an address and the words for a store, and nothing more. What answers there is then judged by
its answer. The store of another user's job is not believed, by root neither: its words may name files to be read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from ...codec import Document, Invalid, shown
from ...rendezvous.records import Endpoint
from ...rendezvous.text import clean
from ..common.folders import SERVICES, temporary_places, try_out
from ..configuration.parse import OptionSource
from ..configuration.rendezvous import BACKEND, ENDPOINT, ETCD_OPTIONS, JOB_ID, POOL

log = logging.getLogger(__name__)

RUN_DIR_PREFIX = "elastic-agent-"
SCHEMA = 1
STORE_OPTIONS = tuple(
    option.name
    for option in (BACKEND, ENDPOINT, JOB_ID, POOL, *ETCD_OPTIONS)
    if OptionSource.FILE in option.sources
)
MAX_PARENT_BYTES = 64
"""Bytes. The path of a UNIX socket has at most 107, and a run directory holds some."""

_NAME = "agent.json"
_MOST_BYTES = 4096
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def run_directory_parent(environ: Mapping[str, str]) -> str | None:
    """None: no place whose path is short enough takes a new file now.

    A service has a /tmp of its own (systemd's PrivateTmp), and should be found in its own directory.
    """
    given = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    for place in (*filter(None, [given]), *map(str, temporary_places())):
        if len(os.fsencode(place)) <= MAX_PARENT_BYTES:
            with suppress(OSError):
                try_out(Path(place))
                return place
    return None


def keep_from_tmpfiles(run_dir: Path) -> int:
    """As long as this descriptor is open, systemd-tmpfiles removes nothing in it, where its file system has locks."""
    descriptor = os.open(run_dir, _OPENED | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


@dataclass(frozen=True, slots=True)
class RunFile:
    """Where an agent listens; and where its job meets, as options by name: none where no other node can come."""

    http: Endpoint
    store: Annotated[tuple[tuple[str, str], ...], _read_store]


def _read_store(raw: Any) -> tuple[tuple[str, str], ...]:
    options = [(name, raw[name]) for name in STORE_OPTIONS if name in raw] if isinstance(raw, dict) else None
    if options is None or not all(isinstance(text, str) for _, text in options):
        raise Invalid(f"{shown(raw)}, expected texts by option")
    return tuple((name, clean(text)) for name, text in options)


_FILE = Document(RunFile, SCHEMA, _MOST_BYTES)


def announce(run_dir: Path, http: tuple[str, int], store: Mapping[str, str] | None = None) -> None:
    """`http` is where this agent listens, `store` the options of its store. The file goes when the directory does."""
    address, port = http
    endpoint = Endpoint(_ANYWHERE.get(address, address), port)
    file = run_dir / _NAME
    try:
        file.touch(0o600)
        file.write_text(json.dumps({"v": SCHEMA, "http": asdict(endpoint), "store": dict(store or {})}))
    except OSError as error:
        log.warning("elastic-agent status will not find this agent by itself: %s: %s", file, error)


def run_directory_parents() -> tuple[Path, ...]:
    """Where run directories may be: our systemd unit gives each job a folder below /run/elastic-agent."""
    try:
        services = sorted(SERVICES.iterdir())
    except OSError:
        services = []
    return *temporary_places(), *services


def agents_here(where: Iterable[Path], uid: int) -> tuple[Endpoint, ...]:
    """Where the agents of user `uid` listen, or have listened; for root (0), those of all users."""
    return tuple(dict.fromkeys(file.http for file in _run_files(where, {uid} if uid else None)))


def stores_here(where: Iterable[Path], uid: int) -> tuple[Mapping[str, str], ...]:
    """The stores of the jobs of user `uid` alone, each once."""
    stores = dict.fromkeys(file.store for file in _run_files(where, {uid}) if file.store)
    return tuple(dict(store) for store in stores)


def _run_files(where: Iterable[Path], owners: set[int] | None) -> Iterator[RunFile]:
    for place in where:
        with suppress(OSError):
            for name in sorted(os.listdir(place)):
                if name.startswith(RUN_DIR_PREFIX) and (file := _read(place / name, owners)) is not None:
                    yield file


def _read(run_dir: Path, owners: set[int] | None) -> RunFile | None:
    """None for whatever is not ours to trust, or no run file."""
    try:
        with ExitStack() as opened:
            directory = os.open(run_dir, _OPENED | os.O_DIRECTORY)
            opened.callback(os.close, directory)
            file = os.open(_NAME, _OPENED, dir_fd=directory)
            opened.callback(os.close, file)
            of_folder, of_file = os.fstat(directory), os.fstat(file)
            if (of_folder.st_mode | of_file.st_mode) & _OTHERS_MAY_WRITE or not stat.S_ISREG(of_file.st_mode):
                return None
            if of_file.st_uid != of_folder.st_uid or (owners and of_file.st_uid not in owners):
                return None
            return _FILE.decode(os.read(file, _MOST_BYTES + 1).decode(errors="replace"))
    except (OSError, Invalid):
        return None
