"""Connecting to a store that is not there yet: other nodes, or people, may only be about to start it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from ..errors import StoreRefused, StoreUnavailable

PAUSE_S = 0.25
"""Between two tries, drawn from zero to this: all nodes of a job start together."""

log = logging.getLogger(__name__)


def retry_connect(try_once: Callable[[], object], deadline: float, rng: random.Random) -> None:
    """Returns as soon as `try_once` does. Raises its StoreUnavailable at the deadline, and other errors at once."""
    logged = ""
    while True:
        try:
            try_once()
            return
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            if str(error) != logged:
                logged = str(error)
                log.info("no rendezvous store yet: %s", logged)
            pause_s = rng.uniform(0.0, PAUSE_S)
            if time.monotonic() + pause_s >= deadline:
                raise
            time.sleep(pause_s)
