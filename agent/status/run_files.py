"""How an operator on this machine finds its agents: each leaves its HTTP address in its run directory.

The file is a hint, and whoever reads it may be root in a folder that anybody can write to. So it counts only when the
directory and the file belong to the reader, or, for root, to one and the same user; when nobody else may have written
there; and when it holds an address and nothing more. What answers there is then judged by its answer.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from ...rendezvous.errors import RecordInvalid
from ...rendezvous.fields import Fields
from ...rendezvous.records import Endpoint

log = logging.getLogger(__name__)

RUN_DIR_PREFIX = "elastic-agent-"
SERVICES = Path("/run/elastic-agent")
SCHEMA = 1
LONGEST_PLACE = 64
"""The path of a UNIX socket has at most 107 characters, and a run directory holds some."""

_NAME = "agent.json"
_MOST_BYTES = 4096
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def place_of_run_directory(environ: Mapping[str, str]) -> str | None:
    """None: where temporary files go. A service has another /tmp than everybody else (systemd's PrivateTmp)."""
    given = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return given if 0 < len(given) <= LONGEST_PLACE and os.access(given, os.W_OK | os.X_OK) else None


def announce(run_dir: Path, http: tuple[str, int]) -> None:
    """`http` is where this agent listens. The file goes when the run directory does."""
    address, port = http
    endpoint = Endpoint(_ANYWHERE.get(address, address), port)
    file = run_dir / _NAME
    try:
        file.touch(0o600)
        file.write_text(json.dumps({"v": SCHEMA, "http": asdict(endpoint)}))
    except OSError as error:
        log.warning("elastic-agent status will not find this agent by itself: %s: %s", file, error)


def places() -> tuple[Path, ...]:
    """Where run directories may be: our systemd unit gives each job a folder below /run/elastic-agent."""
    try:
        services = sorted(SERVICES.iterdir())
    except OSError:
        services = []
    return tuple(dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"), *services)))


def agents_here(where: Iterable[Path], uid: int) -> tuple[Endpoint, ...]:
    """Where the agents of user `uid` listen, or have listened; for root (0), those of all users."""
    found = []
    for place in where:
        try:
            names = sorted(name for name in os.listdir(place) if name.startswith(RUN_DIR_PREFIX))
        except OSError:
            continue
        found += [http for name in names if (http := _read(place / name, uid)) is not None]
    return tuple(dict.fromkeys(found))


def _read(run_dir: Path, uid: int) -> Endpoint | None:
    """None for whatever is not ours to trust, or no run file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        directory = os.open(run_dir, flags | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        owner = _trusted_owner(directory, stat.S_IFDIR, {uid} if uid else None)
        if owner is None:
            return None
        file = os.open(_NAME, flags, dir_fd=directory)
        try:
            if _trusted_owner(file, stat.S_IFREG, {owner}) is None:
                return None
            text = os.read(file, _MOST_BYTES + 1).decode()
        finally:
            os.close(file)
        return Fields.of_text(_NAME, text, SCHEMA, _MOST_BYTES).one("http", Endpoint.read)
    except (OSError, UnicodeDecodeError, RecordInvalid):
        return None
    finally:
        os.close(directory)


def _trusted_owner(fd: int, kind: int, owners: set[int] | None) -> int | None:
    """Who owns what is open there, if it is of this kind, one of these owners' and nobody else may write to it."""
    found = os.fstat(fd)
    if stat.S_IFMT(found.st_mode) != kind or found.st_mode & _OTHERS_MAY_WRITE:
        return None
    return found.st_uid if owners is None or found.st_uid in owners else None
