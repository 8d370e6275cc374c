"""`elastic-agent forget JOB`: delete what an ended job has left in its etcd, so that its name begins anew.

Only a job without live nodes is forgotten: to delete the world of one that runs would make it stop and begin anew. A
node that joins meanwhile is noticed, because it writes the world: the world goes last, and only as it was read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

from ...rendezvous.errors import RecordInvalid, StoreUnavailable
from ...rendezvous.records import NODES_PREFIX, WORLD_KEY
from ...rendezvous.store.interface import MOST_OPERATIONS, Compare, Delete, Entry, Store
from ...rendezvous.text import NAME, shortened
from ..common.exits import CannotDo, ExitCode
from ..configuration.config import ConfigError, Problem
from ..configuration.derive import resolve_meeting_place
from ..configuration.load import Settings
from ..configuration.rendezvous import JOB_ID, RendezvousConfig
from .store_command import store_command, world_of

_USAGE = """\
usage: elastic-agent forget JOB --rdzv-endpoint etcd://HOST,... [--etcd-...] [--config FILE.toml]

Deletes what a job that has ended left in etcd. A job with live nodes is refused. Its checkpoints and logs stay.
"""

KEYS_AT_ONCE = MOST_OPERATIONS // 2
"""Each is compared, and deleted."""


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    return store_command("forget", words, _USAGE, _meeting_place, _work, subject="JOB")


def _work(store: Store, place: RendezvousConfig, job: str, command_line: Settings) -> None:
    print(f"job {job} is forgotten: {forget(store, job)} keys deleted")


def forget(store: Store, job: str) -> int:
    """How many keys there were. Raises CannotDo, StoreMismatch and other StoreErrors."""
    entries = _read(store, job)
    if not entries:
        raise CannotDo(
            ExitCode.NO_JOB, f"the store holds nothing of a job {job!r}: check its name and the prefix"
        )
    others = [entry for entry in entries if entry.key != WORLD_KEY]
    for begin in range(0, len(others), KEYS_AT_ONCE):
        _delete(store, job, others[begin : begin + KEYS_AT_ONCE])
    _delete(store, job, [entry for entry in _read(store, job) if entry.key == WORLD_KEY])
    return len(entries)


def _meeting_place(job: str, command_line: Settings) -> RendezvousConfig:
    """Raises ConfigError."""
    if not NAME.fullmatch(job):
        problem = Problem("job", job, "the name of a job", "write it first: elastic-agent forget JOB")
        command_line.problems.append(problem)
    else:
        command_line.derive(JOB_ID, job, "job")
    place = resolve_meeting_place(command_line, os.environ)
    if place is None or not place.kind.outlives_job:
        advice = "add --rdzv-endpoint etcd://HOST,... as the agents have it; another store ends with its job"
        raise ConfigError([Problem("rdzv-endpoint", None, "the etcd that the job's nodes met in", advice)])
    return replace(place, job_id=job)


def _read(store: Store, job: str) -> list[Entry]:
    entries = list(store.read(("",)).entries)
    with contextlib.suppress(RecordInvalid):  # what another version has left is to be forgotten, too
        world_of(job, entries)
    nodes = sorted(
        entry.key.removeprefix(NODES_PREFIX) for entry in entries if entry.key.startswith(NODES_PREFIX)
    )
    if nodes:
        raise CannotDo(
            ExitCode.LATER,
            f"job {job!r} has {len(nodes)} live nodes: {shortened(nodes)}. Stop their agents first (SIGTERM, or"
            " elastic-agent drain NODE); one that was killed is gone when its lease ends",
        )
    return entries


def _delete(store: Store, job: str, entries: Sequence[Entry]) -> None:
    if not entries:
        return
    compares = tuple(Compare(entry.key, entry.mod_revision) for entry in entries)
    if not store.transact(compares, tuple(Delete(entry.key) for entry in entries)).succeeded:
        _read(store, job)
        raise StoreUnavailable(f"others write the keys of job {job!r} at this moment; try again")
