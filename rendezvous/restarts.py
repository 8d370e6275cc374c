"""The restart budget of a job: how often it may fail, and how long it waits before it tries again.

A failure counts once for the whole job, whichever node it happened on. A generation *made progress* when a node
reported a step beyond every step of earlier generations, or ran its workers for longer than a minute. The
budget's state travels in the world record, so that it survives the coordinator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .records import Restarts, Result

LASTING_S = 60.0
"""Workers that have run for so long have made progress, also when they report no step."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to give up, and how long to wait before another try.

    `max_failures` is how many failures the whole job survives; None means any number while generations make
    progress, and `max_fruitless` in a row without: the next one ends the job.
    The first failure in such a row is retried at once: it may as well be the only one, and of a script that reports
    no steps every failure looks fruitless. The wait then doubles from `first_backoff_s`, after the second, up to
    `max_backoff_s`, and is multiplied by a random factor from 0.5 to 1, so that many jobs hit by one outage do not
    return in step.
    """

    max_failures: int | None = None
    max_fruitless: int = 3
    first_backoff_s: float = 0.1
    max_backoff_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Retry:
    restarts: Restarts
    backoff_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    restarts: Restarts
    result: Result
    reason: str


def after_failure(
    used: Restarts, fingerprint: str, progressed: bool, policy: RestartPolicy, rng: random.Random
) -> Retry | GiveUp:
    """What one more failure means for the job."""
    if progressed:
        now_used = Restarts(used.failures + 1, 0, fingerprint, 0)
    else:
        alike = used.alike + 1 if fingerprint == used.fingerprint else 1
        now_used = Restarts(used.failures + 1, used.fruitless + 1, fingerprint, alike)
    if policy.max_failures is not None:
        spent = now_used.failures > policy.max_failures
        limit = f"{now_used.failures} failures, --max-restarts allows {policy.max_failures}"
    else:
        spent = now_used.fruitless > policy.max_fruitless
        limit = f"{now_used.fruitless} failures in a row without progress"
    if spent:
        looping = now_used.alike > 1 and now_used.alike == now_used.fruitless
        if looping:
            return GiveUp(
                now_used, Result.CRASH_LOOP, f"crash loop: {limit}, the last {now_used.alike} the same"
            )
        return GiveUp(now_used, Result.RESTARTS_EXHAUSTED, limit)
    if now_used.fruitless <= 1:
        return Retry(now_used, 0.0)
    longest = min(policy.max_backoff_s, policy.first_backoff_s * 2.0 ** min(now_used.fruitless - 2, 30))
    return Retry(now_used, longest * rng.uniform(0.5, 1.0))
