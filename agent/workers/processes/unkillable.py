"""What an agent could not kill, as those that come after it on this machine know it.

A process in uninterruptible sleep outlives its agent, with its GPU and its memory. Its guard writes down pid, start
time and rank in a file beside the agent's run directory, where a later agent of the same user finds it (`run_files`).
As long as one of them lives, that agent does not join: the job would train beside it, on what it holds. Those of
another job may have other devices, and are a warning. A file whose processes have all ended is removed. A file from
another PID namespace (a container with the same /tmp) is left alone: here its pids name other processes, or none.

Only /proc/PID/stat and the like are read: what tells more of a process may hang with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....rendezvous.errors import RecordInvalid
from ....rendezvous.fields import Fields, shortened
from ...common.exits import CannotStart, ExitCode
from .guard import boot_id, living_since, pid_namespace
from .proc import standing
from .run_files import paths_in, trusted_text

log = logging.getLogger(__name__)

SCHEMA = 2
LOOK_AGAIN_S = 0.25

_SUFFIX = ".remains"
_MOST_BYTES = 32768
_HIGHEST_RANK = 2**31


@dataclass(frozen=True, slots=True)
class Left:
    """A process that SIGKILL had not ended. Pid and start time name it until the machine starts anew."""

    pid: int
    start: str
    rank: int | None
    """Of the worker whose session it is in, if it is in any."""


@dataclass(frozen=True, slots=True)
class Remains:
    """What one agent has left."""

    file: Path
    job: str
    node: str
    boot: str
    processes: tuple[Left, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows for an agent that comes later."""

    refusal: str
    """Why it must not start; empty if it may."""
    warnings: tuple[str, ...]
    over: tuple[Path, ...]
    """The files of which nothing lives."""


def file_for(run_dir: Path) -> Path:
    """Beside the run directory, which does not outlive its agent."""
    return run_dir.with_name(run_dir.name + _SUFFIX)


def judge(found: Iterable[Remains], job: str, living: Mapping[Left, str]) -> Verdict:
    """`job` is the later agent's. `living` tells of each process that still lives where it stands."""
    refusals, warnings, over = [], [], []
    for remains in found:
        where = [_told(remains, left, living[left]) for left in remains.processes if left in living]
        if not where:
            over.append(remains.file)
            continue
        own = remains.job == job
        text = (
            f"what an earlier agent of {'this job' if own else f'job {remains.job}'} could not kill still lives on "
            f"this machine, and may hold its GPUs and memory: {shortened(where, '; ')}. Whatever device or disk it "
            "waits for must be repaired, or the machine started anew"
        )
        if own:
            refusals.append(f"{text}. To start beside it all the same, remove {remains.file}")
        else:
            warnings.append(text)
    return Verdict("\n".join(refusals), tuple(warnings), tuple(over))


def _told(remains: Remains, left: Left, standing: str) -> str:
    rank = f"rank {left.rank} of " if left.rank is not None else ""
    return f"{rank}node {remains.node}: {standing}"


def find(where: Iterable[Path], uid: int) -> tuple[Remains, ...]:
    """What agents of user `uid` have left, since this machine was started."""
    files = (path for path in paths_in(where) if path.suffix == _SUFFIX)
    return tuple(remains for file in files if (remains := _read(file, uid)) is not None)


def still_living(found: Iterable[Remains], boot: str, proc: Path = Path("/proc")) -> dict[Left, str]:
    """Of all these processes those that live in this life of the machine, and where they stand."""
    return {
        left: standing(proc / str(left.pid)) or f"process {left.pid}"
        for remains in found
        if remains.boot == boot
        for left in remains.processes
        if living_since(left.pid, proc) == left.start
    }


def await_end(
    where: Sequence[Path],
    uid: int,
    job: str,
    within_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until nothing of `job` is left here: a process may end late. Raises CannotStart when that takes too long."""
    give_up_at, told = clock() + within_s, False
    kept: set[Path] = set()
    while True:
        found = find(where, uid)
        verdict = judge(found, job, still_living(found, boot_id()))
        for file in set(verdict.over) - kept:
            if not _remove(file):
                kept.add(file)
        if not told:
            for warning in verdict.warnings:
                log.warning("%s", warning)
        if not verdict.refusal:
            return
        if clock() >= give_up_at:
            raise CannotStart(ExitCode.UNKILLABLE, verdict.refusal)
        if not told:
            log.warning("waiting up to %g s (--kill-timeout): %s", within_s, verdict.refusal)
        told = True
        sleep(LOOK_AGAIN_S)


def _remove(file: Path) -> bool:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", file, error.strerror)
        return False
    return True


def _read(file: Path, uid: int) -> Remains | None:
    """None for whatever is not ours to trust, says nothing of this, or names processes of another PID namespace."""
    text = trusted_text(file, {uid}, _MOST_BYTES)
    if text is None:
        return None
    try:
        fields = Fields.of_text(file.name, text, SCHEMA, _MOST_BYTES)
        if fields.integer("pid_namespace") != pid_namespace():
            return None
        return Remains(
            file,
            fields.name("job"),
            fields.name("node"),
            fields.text("boot", 64),
            fields.many("processes", _left),
        )
    except RecordInvalid:
        return None


def _left(fields: Fields) -> Left:
    return Left(
        fields.integer("pid", 2),
        fields.text("start", 32),
        fields.integer_or_none("rank", 0, _HIGHEST_RANK),
    )
