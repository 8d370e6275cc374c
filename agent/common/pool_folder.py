"""Where the store of a pool is that has no other place: in a folder of this user's own on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from .own_folder import own_name, own_path, temporary_places

SERVICES = Path("/run/elastic-agent")
"""Our systemd unit gives each service a folder below it."""
_LASTING = Path("/var/lib/elastic-agent")
"""And one here, which outlives the machine's restart: the store of its pool is there."""
_NAME = "elastic-agent-pool-"


def pool_folder(environ: Mapping[str, str]) -> Path:
    """A daemon's: that of its service, which has a /tmp of its own, else one in the temporary directory."""
    return _of_service(environ) or own_path(_NAME)


def _of_service(environ: Mapping[str, str]) -> Path | None:
    for variable in ("STATE_DIRECTORY", "RUNTIME_DIRECTORY"):
        given = environ.get(variable, "").partition(":")[0]  # the service manager may have made several
        if os.path.isabs(given):
            return Path(given)
    return None


def pool_folder_here(environ: Mapping[str, str], pool: str) -> Path:
    """A command's, which may run outside of the daemon's service: where there is a store of this pool."""
    given = _of_service(environ)
    usual = [given] if given is not None else [place / own_name(_NAME) for place in temporary_places()]
    others = (place / usual[0].name for place in temporary_places())
    places = (*usual, *others, *_folders_in(_LASTING), *_folders_in(SERVICES))
    return next((place for place in places if os.access(place / f"{pool}.db", os.W_OK)), usual[0])


def _folders_in(place: Path) -> Iterator[Path]:
    try:
        yield from sorted(place.iterdir())
    except OSError:
        return
