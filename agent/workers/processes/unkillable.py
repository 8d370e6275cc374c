"""Processes that an agent could not kill, as later agents on this machine know them.

A process in uninterruptible sleep outlives its agent, with its GPU and its memory. Its guard writes pid and start time
to a file beside the agent's run directory, where a later agent of the same user finds it (`run_files`). As long as
one of them lives, an agent of the same job does not join: the job would train beside it, on what it holds (I1). A file
whose processes have all ended is removed. A file from another PID namespace (a container with the same /tmp), or from
before the machine started anew, is left alone: here its pids name other processes, or none.

Only /proc/PID/stat and the like are read: other files of a process may hang with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ....rendezvous.text import shortened
from ...common.exits import CannotStart, ExitCode
from .proc import life_of_pids, living_since, process_status
from .run_files import paths_in, trusted_text

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25

_SUFFIX = ".remains"
_MAX_BYTES = 32768


def file_for(run_dir: Path) -> Path:
    """Beside the run directory, which does not outlive its agent."""
    return run_dir.with_name(run_dir.name + _SUFFIX)


def living_of(job: str, where: Iterable[Path], uid: int) -> dict[Path, list[int]]:
    """Of agents of this job and user, by file: what still lives. Removes the files of which nothing does."""
    found = {}
    for file in paths_in(where):
        if file.suffix == _SUFFIX and (named := _read(file, uid, job)) is not None:
            living = [pid for pid, start in named if living_since(pid) == start]
            if living:
                found[file] = living
            else:
                _remove(file)
    return found


def process_statuses(pids: Iterable[int], proc: Path = Path("/proc")) -> str:
    """Of all these that are there; of many the first few, as they mostly wait for the same thing."""
    return shortened(filter(None, (process_status(proc / str(pid)) for pid in sorted(pids))), "; ")


def await_end(
    where: Sequence[Path],
    uid: int,
    job: str,
    within_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until nothing of `job` is left here: a process may end late. Raises CannotStart when that takes too long."""
    give_up_at, logged = clock() + within_s, False
    while living := living_of(job, where, uid):
        pids = [pid for of_file in living.values() for pid in of_file]
        refusal = (
            "what an earlier agent of this job could not kill still lives on this machine, and may hold its GPUs and "
            f"memory: {process_statuses(pids) or pids}. Whatever device or disk it waits for must be repaired, or the "
            f"machine started anew. To start beside it all the same, remove {shortened(map(str, living))}"
        )
        if clock() >= give_up_at:
            raise CannotStart(ExitCode.UNKILLABLE, refusal)
        if not logged:
            log.warning("waiting up to %g s (--kill-timeout): %s", within_s, refusal)
        logged = True
        sleep(LOOK_AGAIN_S)


def _read(file: Path, uid: int, job: str) -> list[tuple[int, str]] | None:
    """None for a file that another user may have written, of another form, job or life of pids."""
    text = trusted_text(file, {uid}, _MAX_BYTES) or ""
    its, _, rest = text.partition("\n")
    life, _, processes = rest.partition("\n")
    if (its, life) != (job, life_of_pids()):
        return None
    words = [line.split() for line in processes.splitlines()]
    return [(int(pid), start) for pid, start in words if pid.isdecimal()] if all(map(_pair, words)) else None


def _pair(words: Sequence[str]) -> bool:
    return len(words) == 2


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", file, error.strerror)
