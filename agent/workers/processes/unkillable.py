"""Processes that an agent could not kill, as later agents on this machine know them.

A process in uninterruptible sleep outlives its agent, with its GPU and its memory. Its guard writes pid, start time and
rank to a file beside the agent's run directory, where a later agent of the same user finds it (`run_files`). As long as
one of them lives, an agent of the same job does not join: the job would train beside it, on what it holds. Those of
another job may have other devices, and are a warning. A file whose processes have all ended is removed. A file from
another PID namespace (a container with the same /tmp) is left alone: here its pids name other processes, or none.

Only /proc/PID/stat and the like are read: other files of a process may hang with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ....codec import Count, Document, Invalid, Text, Within
from ....rendezvous.text import NAME, shortened
from ...common.exits import CannotStart, ExitCode
from .proc import boot_id, living_since, pid_namespace, process_status
from .run_files import paths_in, trusted_text

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25

_SUFFIX = ".remains"
_MAX_BYTES = 32768


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that SIGKILL had not ended. Pid and start time name it until the machine starts anew."""

    pid: Annotated[int, Within(2, 2**31)]
    start: Annotated[str, Text(32)]
    rank: Annotated[int, Within(0, 2**31)] | None
    """Of the worker whose session it is in, if it is in any."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """Those of one agent, as its guard has written them."""

    job: Annotated[str, Text(128, NAME)]
    node: Annotated[str, Text(128, NAME)]
    boot: Annotated[str, Text(64)]
    pid_namespace: Count
    processes: tuple[Survivor, ...]


_FILE = Document(Survivors, version=2, most_chars=_MAX_BYTES)


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


def judge(found: Mapping[Path, Survivors], job: str, living: Mapping[Survivor, str]) -> Verdict:
    """`job` is the later agent's. `living` has the status of each process that still lives."""
    refusals, warnings, over = [], [], []
    for file, left in found.items():
        names = [_name(left, one, living[one]) for one in left.processes if one in living]
        own = left.job == job
        text = (
            f"what an earlier agent of {'this job' if own else f'job {left.job}'} could not kill still lives on "
            f"this machine, and may hold its GPUs and memory: {shortened(names, '; ')}. Whatever device or disk it "
            "waits for must be repaired, or the machine started anew"
        )
        if not names:
            over.append(file)
        elif own:
            refusals.append(f"{text}. To start beside it all the same, remove {file}")
        else:
            warnings.append(text)
    return Verdict("\n".join(refusals), tuple(warnings), tuple(over))


def _name(left: Survivors, one: Survivor, status: str) -> str:
    rank = f"rank {one.rank} of " if one.rank is not None else ""
    return f"{rank}node {left.node}: {status}"


def find(where: Iterable[Path], uid: int) -> dict[Path, Survivors]:
    """Of agents of user `uid`, by file."""
    files = (path for path in paths_in(where) if path.suffix == _SUFFIX)
    return {file: left for file in files if (left := _read(file, uid)) is not None}


def still_living(found: Iterable[Survivors], boot: str, proc: Path = Path("/proc")) -> dict[Survivor, str]:
    """Of all these processes those that live in this life of the machine, and their status."""
    return {
        one: process_status(proc / str(one.pid)) or f"process {one.pid}"
        for left in found
        if left.boot == boot
        for one in left.processes
        if living_since(one.pid, proc) == one.start
    }


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
    kept: set[Path] = set()
    while True:
        found = find(where, uid)
        verdict = judge(found, job, still_living(found.values(), boot_id()))
        for file in set(verdict.over) - kept:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be removed: %s", file, error.strerror)
                kept.add(file)
        for warning in verdict.warnings if not logged else ():
            log.warning("%s", warning)
        if not verdict.refusal:
            return
        if clock() >= give_up_at:
            raise CannotStart(ExitCode.UNKILLABLE, verdict.refusal)
        if not logged:
            log.warning("waiting up to %g s (--kill-timeout): %s", within_s, verdict.refusal)
        logged = True
        sleep(LOOK_AGAIN_S)


def _read(file: Path, uid: int) -> Survivors | None:
    """None for a file that another user may have written, of another form, or of another PID namespace."""
    text = trusted_text(file, {uid}, _MAX_BYTES)
    try:
        left = _FILE.decode(text) if text is not None else None
    except Invalid:
        return None
    return left if left is not None and left.pid_namespace == pid_namespace() else None
