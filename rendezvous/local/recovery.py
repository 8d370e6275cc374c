"""What a host takes over from the one before it: keys and leases, from the file that this has left."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace

from .files import StoreFiles, start_of
from .journal import Damaged, Leased, Past, parse

ENDED_S = 1.0
"""How long the lease of a process lives on that ended with, or before, the last host: what it has started ends, too."""
BASES, BASE_STEP = 2**20, 2**32
"""The first host counts revisions and leases from a multiple of the step, drawn at random, and each one after it from
the next multiple: none comes so far."""

log = logging.getLogger(__name__)


def left_s(leased: Leased) -> float:
    """Time to live of a lease under this host. A process in another namespace is taken for alive."""
    lives = not leased.pid or start_of(leased.pid) == leased.started
    return leased.ttl_s if lives else min(leased.ttl_s, ENDED_S)


def recovered(files: StoreFiles) -> Past:
    """What the host before has left, with a base above all revisions and leases that it has counted. Raises OSError."""
    fresh = random.SystemRandom().randrange(BASES) * BASE_STEP
    try:
        past = parse(files.state.read_bytes())
    except FileNotFoundError:
        return Past(files.job, fresh)
    except Damaged as damage:
        aside = files.state.with_name(f"{files.state.name}.damaged-{time.time_ns()}")
        files.state.rename(aside)
        log.error(
            "the queue of pool %s is lost here: what its last host has left cannot be read: %s; the file was kept as "
            "%s, and jobs that are missing from elastic-agent jobs must be submitted again",
            files.job,
            damage,
            aside,
        )
        return Past(files.job, fresh)
    if past.torn_bytes:
        log.warning(
            "dropped the last %d bytes of %s: its host ended while it wrote them, and nothing in them was answered",
            past.torn_bytes,
            files.state,
        )
    return replace(past, base=(past.base // BASE_STEP + 1) * BASE_STEP)
