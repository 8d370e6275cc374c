"""Where the store of a pool is that has no other place: in a folder of this user's own on this machine.

A service has two: the store's socket is in the one that is emptied as the machine starts, its queue in the one that
lasts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .own_folder import own_name, own_path, temporary_places

SERVICES = Path("/run/elastic-agent")
"""Our systemd unit gives each service a folder below it."""
_NAME = "elastic-agent-pool-"


def pool_folder(environ: Mapping[str, str]) -> Path:
    """A daemon's: that of its service, which has a /tmp of its own, else one in the temporary directory."""
    return _of_service(environ, "RUNTIME_DIRECTORY") or own_path(_NAME)


def lasting_folder(environ: Mapping[str, str]) -> Path | None:
    """For what is to outlive the machine's restart; None: in the pool's folder, too."""
    return _of_service(environ, "STATE_DIRECTORY") if _of_service(environ, "RUNTIME_DIRECTORY") else None


def _of_service(environ: Mapping[str, str], variable: str) -> Path | None:
    """The service manager may have made several."""
    given = environ.get(variable, "").partition(":")[0]
    return Path(given) if os.path.isabs(given) else None


def pool_folder_here(environ: Mapping[str, str], pool: str) -> Path:
    """A command's, which may run outside of the daemon's service: where there is a store of this pool."""
    given = _of_service(environ, "RUNTIME_DIRECTORY")
    usual = [given] if given is not None else [place / own_name(_NAME) for place in temporary_places()]
    try:
        services = sorted(SERVICES.iterdir())
    except OSError:
        services = []
    places = (*usual, *(place / usual[0].name for place in temporary_places()), *services)
    return next((place for place in places if os.access(place / f"{pool}.sock", os.W_OK)), usual[0])
