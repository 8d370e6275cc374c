"""The temporary directory, and folders of this user's alone in it, the same each time; the one of a pool's store, too.

A process that makes something takes the first place that can hold it now: the others are for a full disk or a
read-only one. A process that only reads looks at all places, and needs none that can be written to.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from .exits import NoTemporaryDirectory

_PLACES = ("/tmp", "/var/tmp", "/usr/tmp")
_VARIABLES = ("TMPDIR", "TEMP", "TMP")
"""Where `tempfile` looks; but we never take the current folder."""


def temporary_places() -> tuple[Path, ...]:
    """The first is tried first. Nothing is written."""
    named = filter(None, map(os.environ.get, _VARIABLES))
    places = dict.fromkeys(map(os.path.abspath, (*named, *_PLACES)))
    return tuple(Path(place) for place in places if os.path.isdir(place)) or (Path(_PLACES[0]),)


def try_out(place: Path) -> None:
    """Raises OSError where no file can be written now."""
    with tempfile.NamedTemporaryFile(dir=place) as file:
        file.write(b"a disk that is full takes no byte")
        file.flush()


def own_path(name: str) -> Path:
    """Raises NoTemporaryDirectory."""
    refusals = []
    for place in temporary_places():
        try:
            try_out(place)
            return place / own_name(name)
        except OSError as error:
            refusals.append(f"{place}: {error.strerror}")
    advice = "make room, let this user write there, or name another folder in TMPDIR"
    raise NoTemporaryDirectory(f"no temporary directory ({'; '.join(refusals)}): {advice}")


def own_name(name: str) -> str:
    """Of this user's folder."""
    return f"{name}{os.geteuid()}"


def make_own(path: Path, *, readable: bool = False) -> None:
    """`readable`: its owner may have let others read it. Raises PermissionError where another user has made one by this
    name, or may write to it, and OSError."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    others = found.st_mode & (0o022 if readable else 0o077)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
        problem = "it is not a folder of this user's alone: remove it, or name another place in TMPDIR"
        raise PermissionError(errno.EPERM, problem, str(path))


SERVICES = Path("/run/elastic-agent")
"""Our systemd unit gives each service a folder below it."""
_LASTING = Path("/var/lib/elastic-agent")
"""And one here, which outlives the machine's restart: the store of its pool is there."""
_NAME = "elastic-agent-pool-"


def pool_folder(environ: Mapping[str, str]) -> Path:
    """A daemon's: that of its service, which has a /tmp of its own, else one in the temporary directory."""
    return _of_service(environ) or own_path(_NAME)


def _of_service(environ: Mapping[str, str]) -> Path | None:
    """Where it has both, the one that lasts. With that one alone it is no unit of ours."""
    runtime, lasting = (  # the service manager may have made several
        environ.get(variable, "").partition(":")[0] for variable in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY")
    )
    if not os.path.isabs(runtime):
        return None
    return Path(lasting if os.path.isabs(lasting) else runtime)


def pool_folder_here(environ: Mapping[str, str], pool: str) -> Path:
    """A command's, which may run outside of the daemon's service: where there is a store of this pool, first of all one
    that is in use, whose log is there."""
    usual = [place / own_name(_NAME) for place in temporary_places()]
    if (given := _of_service(environ)) is not None:
        usual.insert(0, given)
    places = (*usual, *_folders_in(_LASTING), *_folders_in(SERVICES))
    for file in (f"{pool}.db-wal", f"{pool}.db"):
        for place in places:
            if os.access(place / file, os.W_OK):
                return place
    return usual[0]


def _folders_in(place: Path) -> Iterator[Path]:
    try:
        yield from sorted(place.iterdir())
    except OSError:
        return
