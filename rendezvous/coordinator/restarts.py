"""The restart budget of a job: how often it may fail, and how long it waits before it tries again.

A failure counts once for the whole job, whichever node it happened on. A generation *made progress* when a node
reported a step beyond every step of earlier generations; of a job that never reports one, when workers ran for longer
than a minute. The budget's state travels in the world record, so that it survives the coordinator.

A state may end all who load it: weights that are not numbers, a copy that was damaged before its checksum was taken.
After `BAD_STATE_AFTER` failures alike, all before any step beyond the state that was loaded, the next generation loads
an older one, and after the next such failure one older again.

The action of a failure changes its cost:

- RESTART, EXCLUDE_NODE: as above. (`blame` decides which node is excluded.)
- FREE: chance, such as a port that is taken. The first `FREE_RETRIES` since the newest step of the job cost nothing,
  unless the job allows no restart at all; further ones count like RESTART.
- STOP: an error of the script. The second identical one in a row, without progress, ends the job, even if
  --max-restarts allows more: a restart that must fail again would only waste time. If the state that was loaded may be
  the origin, the failure counts like RESTART, so that an older state is tried.
- END: the first one ends the job.

A failure from *outside*, such as a worker that a user or another program killed, uses --max-restarts like any other.
But it is no sign of a crash loop: the job restarts without a pause, and a job without --max-restarts ends only after
`OUTSIDE_IN_A_ROW` such failures without progress.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ..records import Action, BadState, Restarts, Result

STABLE_AFTER_S = 60.0
"""Workers that have run for so long have made progress, if no worker of the job reports steps."""

BAD_STATE_AFTER = 2

FREE_RETRIES = 2
FREE_BACKOFF_S = 1.0
"""The pause before the second free retry: the process that holds a port may need a moment to end."""

STOP_AT = 2
OUTSIDE_IN_A_ROW = 20


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
    action: Action = Action.RESTART
    outside: bool = False
    cause: str = "unknown"
    stepped: bool = False
    """A worker reached a step beyond all earlier ones."""


def after_failure(used: Restarts, ended: Ended, policy: RestartPolicy, rng: random.Random) -> Retry | GiveUp:
    """What one more failure means for the job."""
    if ended.stepped:
        used = replace(used, free_retries=0)
    if ended.action is Action.FREE and policy.max_failures != 0 and used.free_retries < FREE_RETRIES:
        backoff_s = FREE_BACKOFF_S * rng.uniform(0.5, 1.0) if used.free_retries else 0.0
        kept = Restarts(used.failures, fingerprint=used.fingerprint) if ended.progressed else used
        return Retry(replace(kept, free_retries=used.free_retries + 1), backoff_s, free=True)
    now_used = _count(used, ended)
    if ended.action is Action.END:
        return GiveUp(now_used, Result.FINAL_FAILURE, "no restart helps")
    if (spent := _spent(now_used, ended, policy)) is not None:
        return spent
    if ended.outside or now_used.without_progress <= 1:
        return Retry(now_used, 0.0)
    longest = min(
        policy.max_backoff_s, policy.first_backoff_s * 2.0 ** min(now_used.without_progress - 2, 30)
    )
    return Retry(now_used, longest * rng.uniform(0.5, 1.0))


def _spent(now_used: Restarts, ended: Ended, policy: RestartPolicy) -> GiveUp | None:
    """The end of the job, if its budget of failures is spent."""
    alike = now_used.same_fingerprint
    if policy.max_failures is not None:
        spent = now_used.failures > policy.max_failures
        limit = f"{now_used.failures} failures, --max-restarts allows {policy.max_failures}"
    elif ended.outside:
        spent = now_used.from_outside > OUTSIDE_IN_A_ROW
        limit = f"{now_used.from_outside} times in a row without progress, a worker was killed from outside the job"
    else:
        spent = now_used.without_progress > policy.max_without_progress
        limit = f"{now_used.without_progress} failures in a row without progress"
    if spent and not ended.outside and alike > 1 and alike == now_used.without_progress:
        return GiveUp(now_used, Result.CRASH_LOOP, f"crash loop: {limit}, the last {alike} the same")
    if spent:
        return GiveUp(now_used, Result.RESTARTS_EXHAUSTED, limit)
    if ended.action is Action.STOP and alike >= STOP_AT and not ended.loaded:
        return GiveUp(
            now_used,
            Result.CRASH_LOOP,
            f"the same error of the script ({ended.cause}) {alike} times in a row without progress: a restart does"
            " not help",
        )
    return None


def _count(used: Restarts, ended: Ended) -> Restarts:
    failures, free = used.failures + 1, used.free_retries
    if ended.progressed:
        return Restarts(failures, 0, ended.fingerprint, free_retries=free)
    if ended.outside:
        return replace(used, failures=failures, from_outside=used.from_outside + 1)
    same = ended.fingerprint == used.fingerprint
    at_load = (used.at_load if same else 0) + 1 if ended.loaded else 0
    bad = used.bad_state
    if ended.loaded and at_load >= BAD_STATE_AFTER:
        bad = BadState(ended.generation, ended.loaded)
    return Restarts(
        failures,
        used.without_progress + 1,
        ended.fingerprint,
        used.same_fingerprint + 1 if same else 1,
        at_load,
        bad,
        free_retries=free,
        from_outside=used.from_outside,
    )
