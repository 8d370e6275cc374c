"""The restart budget of a job: how often it may fail, and how long it waits before it tries again.

A failure counts once for the whole job, whichever node it happened on. A generation *made progress* when a node
reported a step beyond every step of earlier generations; of a job that never reports one, when workers ran for longer
than a minute. The budget's state travels in the world record, so that it survives the coordinator.

A state may end all who load it: weights that are not numbers, a copy that was damaged before its checksum was taken.
After `BAD_STATE_AFTER` failures alike, all before any step beyond the state that was loaded, the next generation loads
an older one, and after the next such failure one older again.

A worker that found its port taken says nothing about script, state or node: the first `FREE_PORT_RETRIES` such failures
of a job cost nothing, unless the job allows no restart at all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ..records import BadState, Restarts, Result

STABLE_AFTER_S = 60.0
"""Workers that have run for so long have made progress, if no worker of the job reports steps."""

BAD_STATE_AFTER = 2

FREE_PORT_RETRIES = 2
PORT_BACKOFF_S = 1.0
"""Before the second one: what held the port may need a moment to end."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to give up, and how long to wait before another try.

    `max_failures` is how many failures the whole job survives; None means any number while generations make
    progress, and `max_without_progress` in a row without: the next one ends the job.
    The first failure in such a row is retried at once: it may as well be the only one, and of a script that reports
    no steps every failure looks fruitless. The wait then doubles from `first_backoff_s`, after the second, up to
    `max_backoff_s`, and is multiplied by a random factor from 0.5 to 1, so that many jobs hit by one outage do not
    return in step.
    """

    max_failures: int | None = None
    max_without_progress: int = 3
    first_backoff_s: float = 0.1
    max_backoff_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Retry:
    restarts: Restarts
    backoff_s: float
    free: bool = False
    """It costs no budget, and no node is to blame."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    restarts: Restarts
    result: Result
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A generation that a failure has ended."""

    generation: int
    fingerprint: str
    progressed: bool
    loaded: int | None = None
    """The step of the state that its workers had loaded, if none of them came to a step beyond it; None otherwise."""
    final: bool = False
    """No restart of the job helps."""
    port_taken: bool = False


def after_failure(used: Restarts, ended: Ended, policy: RestartPolicy, rng: random.Random) -> Retry | GiveUp:
    """What one more failure means for the job."""
    if ended.port_taken and policy.max_failures != 0 and used.port_retries < FREE_PORT_RETRIES:
        backoff_s = PORT_BACKOFF_S * rng.uniform(0.5, 1.0) if used.port_retries else 0.0
        kept = Restarts(used.failures, fingerprint=used.fingerprint) if ended.progressed else used
        return Retry(replace(kept, port_retries=used.port_retries + 1), backoff_s, free=True)
    now_used = _count(used, ended)
    if ended.final:
        return GiveUp(now_used, Result.FINAL_FAILURE, "no restart helps")
    if policy.max_failures is not None:
        spent = now_used.failures > policy.max_failures
        limit = f"{now_used.failures} failures, --max-restarts allows {policy.max_failures}"
    else:
        spent = now_used.without_progress > policy.max_without_progress
        limit = f"{now_used.without_progress} failures in a row without progress"
    if spent:
        looping = now_used.same_fingerprint > 1 and now_used.same_fingerprint == now_used.without_progress
        if looping:
            return GiveUp(
                now_used,
                Result.CRASH_LOOP,
                f"crash loop: {limit}, the last {now_used.same_fingerprint} the same",
            )
        return GiveUp(now_used, Result.RESTARTS_EXHAUSTED, limit)
    if now_used.without_progress <= 1:
        return Retry(now_used, 0.0)
    longest = min(
        policy.max_backoff_s, policy.first_backoff_s * 2.0 ** min(now_used.without_progress - 2, 30)
    )
    return Retry(now_used, longest * rng.uniform(0.5, 1.0))


def _count(used: Restarts, ended: Ended) -> Restarts:
    if ended.progressed:
        return Restarts(used.failures + 1, 0, ended.fingerprint, port_retries=used.port_retries)
    same = ended.fingerprint == used.fingerprint
    at_load = (used.at_load if same else 0) + 1 if ended.loaded else 0
    bad = used.bad_state
    if ended.loaded and at_load >= BAD_STATE_AFTER:
        bad = BadState(ended.generation, ended.loaded)
    return Restarts(
        used.failures + 1,
        used.without_progress + 1,
        ended.fingerprint,
        used.same_fingerprint + 1 if same else 1,
        at_load,
        bad,
        port_retries=used.port_retries,
    )
