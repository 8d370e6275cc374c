"""A directory that the job writes to: is it there, is there room, and how fast is what is written durable?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ....codec import Checked, Count, Seconds, Text
from ..finding import Finding, Outcome
from ..text import GIB, MIB, size, span

SLOW_FSYNC_S = 0.1
LEAST_BYTES = 16 * MIB
"""Below that not even a small checkpoint, or its manifest, fits."""
FEW_BYTES = GIB
FEW_INODES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts(Checked):
    """`tried` is the directory itself, or the nearest one above it that exists."""

    tried: Annotated[str, Text(4096)]
    exists: bool
    problem: Annotated[str, Text(1024)] = ""
    """Why a file cannot be made or written there; empty where it can."""
    file_system: Annotated[str, Text(128)] = ""
    free_bytes: Count | None = None
    """For this user; None: the file system does not count them."""
    free_inodes: Count | None = None
    """None: the file system does not count them."""
    fsync_s: Seconds | None = None
    """The median of a few; None: nothing was written."""


def judge_directory(check: str, given: str, option: str, facts: DirectoryFacts) -> Finding:
    """`given` is the directory that the job names, with `option`."""
    kind = f" ({facts.file_system})" if facts.file_system else ""
    where = f"{given}{kind}" if facts.exists else f"{given}, which can be made in {facts.tried}{kind}"
    values: dict[str, float] = {}
    if facts.free_bytes is not None:
        values["free_bytes"] = facts.free_bytes
    if facts.free_inodes is not None:
        values["free_inodes"] = facts.free_inodes
    if facts.fsync_s is not None:
        values["fsync_seconds"] = facts.fsync_s

    other = f"name another directory with {option}"

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        return Finding(check, outcome, summary, advice, values)

    if facts.problem:
        place = given if facts.exists else f"{given} cannot be made in {facts.tried}"
        advice = f"let this user write there, mount what is missing, or {other}"
        return found(Outcome.FAIL, f"{place}: {facts.problem}", advice)
    room = "room not known" if facts.free_bytes is None else f"{size(facts.free_bytes)} free"
    free = f"{where}: {room}"
    if facts.free_inodes == 0:
        return found(Outcome.FAIL, f"{where}: all inodes are taken", f"delete files there, or {other}")
    if facts.free_bytes is not None and facts.free_bytes < LEAST_BYTES:
        return found(Outcome.FAIL, free, f"make room there, or {other}")
    if facts.fsync_s is not None and facts.fsync_s > SLOW_FSYNC_S:
        return found(
            Outcome.WARN,
            f"{where}: fsync takes {span(facts.fsync_s)}",
            "each save waits for it several times: is the disk busy or failing, the file server overloaded? If it is "
            f"as it should be, save less often, or {other}",
        )
    if facts.free_bytes is not None and facts.free_bytes < FEW_BYTES:
        return found(Outcome.WARN, free, f"make room, or {other}")
    if facts.free_inodes is not None and facts.free_inodes < FEW_INODES:
        return found(
            Outcome.WARN, f"{where}: {facts.free_inodes} more files fit", f"delete files there, or {other}"
        )
    return found(
        Outcome.OK, free + (f", fsync in {span(facts.fsync_s)}" if facts.fsync_s is not None else "")
    )
