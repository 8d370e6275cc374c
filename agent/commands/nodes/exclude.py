"""`elastic-agent exclude NODE`: leave a node out of its job's worlds until `elastic-agent readmit NODE`.

It writes one row of the job's `world` by compare-and-set, and tries again if another writer was faster. The coordinator
does the rest: a member leaves by a planned change, without a lost step, as soon as the other nodes are enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ....rendezvous.coordinator.exclusions import BY_OPERATOR, exclude, left_out
from ....rendezvous.errors import StoreUnavailable
from ....rendezvous.records import WORLD_KEY, NodeRecord, Phase, World, life_of
from ....rendezvous.statements.exclusion import MAX_EXCLUSION_REASON, MAX_EXCLUSIONS, Exclusion
from ....rendezvous.store.interface import Compare, Put, Store
from ....rendezvous.text import clean
from ...common.exits import ExclusionCode
from ...configuration.reading.settings import Settings
from ...configuration.rendezvous import RendezvousConfig
from ...configuration.types.option import Option
from ...configuration.types.parsers import Parser, duration
from ..store_command import CannotDo, store_command, world_of
from .job_nodes import LOOK_S, TRIES, look, meeting_place_for, named, state_of

_USAGE = """\
usage: elastic-agent exclude NODE [--reason TEXT]
       elastic-agent exclude NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Leaves a node out of all worlds of its job until elastic-agent readmit NODE. If it trains, the workers of all nodes end
after the same step and the next generation begins there, without it: no step is lost. Its agent stays.
"""


def read_reason(text: str) -> str:
    """Raises ValueError."""
    reason = clean(text).strip()
    if not reason or len(reason) > MAX_EXCLUSION_REASON:
        raise ValueError("empty or too long")
    return reason


REASON: Option[str] = Option(
    "reason",
    Parser(f"a text of at most {MAX_EXCLUSION_REASON} characters", read_reason),
    "why, for those who read status and logs",
    default="no reason given",
)
TIMEOUT: Option[float] = Option(
    "timeout",
    duration(0.1),
    "how long to wait until the job trains without the node; longer than the --stop-grace of its job",
    default="2m",
)


def main(words: Sequence[str]) -> int:
    """Returns an `ExclusionCode`."""
    place = meeting_place_for("exclude")
    return store_command("exclude", words, ExclusionCode, _USAGE, place, _work, REASON, TIMEOUT)


def _work(store: Store, place: RendezvousConfig, node: str, command_line: Settings) -> None:
    reason, timeout_s = command_line[REASON].value, command_line[TIMEOUT].value
    exclude_node(store, place.job_id, node, reason, timeout_s, lambda line: print(line, flush=True))


def exclude_node(
    store: Store,
    job: str,
    node: str,
    reason: str,
    timeout_s: float,
    show: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when the job trains without the node. Raises CannotDo, StoreError and RecordInvalid."""
    deadline = clock() + timeout_s

    def change(world: World, nodes: Sequence[NodeRecord]) -> tuple[Exclusion, ...]:
        record = named(node, nodes, job, ExclusionCode.NO_NODE)
        life = life_of(record.incarnation)
        rows = exclude(world.exclusions, node, life, BY_OPERATOR, reason, record=record, operator=True)
        if node not in left_out(rows):
            raise CannotDo(
                ExclusionCode.NO_ROOM,
                f"{MAX_EXCLUSIONS} nodes of job {job!r} are excluded already, and a world remembers no more: stop the "
                f"agent of node {node} instead (`elastic-agent drain {node}`), or readmit another node",
            )
        return rows

    world = rewrite(store, job, change)
    show(f"node {node} is excluded from job {job}: {reason}")
    while any(member.node == node for member in world.members):
        if clock() >= deadline:
            raise CannotDo(
                ExclusionCode.TIMED_OUT,
                f"node {node} is excluded, and still in generation {world.generation} after {timeout_s:g} s: "
                f"{state_of(world)}. It stays while the others are fewer than the job needs (--min-nodes, "
                "--nodes-multiple-of), and goes when another node comes. Where it is alone in its world, only it "
                f"has the newest state: elastic-agent drain {node} hands that over",
            )
        sleep(min(LOOK_S, max(0.0, deadline - clock())))
        try:
            world = world_of(job, store.read((WORLD_KEY,)).entries) or world
        except StoreUnavailable:
            continue
    show(state_of(world))


def rewrite(
    store: Store, job: str, change: Callable[[World, Sequence[NodeRecord]], tuple[Exclusion, ...]]
) -> World:
    """Replaces the exclusions of the job's world; returns it. Raises CannotDo, StoreError and RecordInvalid."""
    for _ in range(TRIES):
        world, revision, nodes = _read(store, job)
        after = replace(world, exclusions=change(world, nodes))
        compare = Compare(WORLD_KEY, revision)
        if store.transact((compare,), (Put(WORLD_KEY, after.to_json()),)).succeeded:
            return after
    raise StoreUnavailable(f"others write {WORLD_KEY!r} all the time")


def _read(store: Store, job: str) -> tuple[World, int, Sequence[NodeRecord]]:
    world, nodes, entries = look(store, job)
    if world is None:
        raise CannotDo(
            ExclusionCode.NO_JOB,
            f"the store holds no world of a job {job!r}: check --rdzv-id and --rdzv-endpoint, or wait for its first",
        )
    if world.phase is Phase.ENDED:
        raise CannotDo(ExclusionCode.NO_JOB, f"job {job!r} has ended: {world.cause.detail}")
    return world, entries[WORLD_KEY].mod_revision, nodes
