"""`elastic-agent exclude NODE`: leave a node out of its job's worlds until `elastic-agent readmit NODE`.

It writes one row of the job's `world` by compare-and-set, and tries again if another writer was faster. The coordinator
does the rest: a member leaves by a planned change, without a lost step, as soon as the other nodes are enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ....rendezvous.coordinator.candidates import suffice
from ....rendezvous.coordinator.exclusions import BY_OPERATOR, exclude, left_out
from ....rendezvous.errors import StoreUnavailable
from ....rendezvous.records import WORLD_KEY, NodeRecord, Phase, World, life_of
from ....rendezvous.statements.exclusion import MAX_EXCLUSION_REASON, MAX_EXCLUSIONS, Exclusion
from ....rendezvous.store.interface import Compare, Put, Store
from ....rendezvous.text import clean, shortened
from ...common.exits import CommandCode
from ...configuration.parse import YES_OR_NO, Option, Parser, duration
from ...configuration.rendezvous import RendezvousConfig
from ...configuration.settings import Settings
from ..store_command import CannotDo, store_command
from .job_nodes import LOOK_S, TRIES, look, meeting_place_for, no_such_node, state_of

_USAGE = """\
usage: elastic-agent exclude NODE [--reason TEXT] [--away]
       elastic-agent exclude NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Leaves a node out of all worlds of its job until elastic-agent readmit NODE. If it trains, the workers of all nodes end
after the same step and the next generation begins there, without it: no step is lost. Its agent stays. A node whose
agent is away is left out when it comes.
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
AWAY: Option[bool] = Option(
    "away",
    YES_OR_NO,
    "also a node of which the job knows nothing now, because its agent is away: check its name",
    default="false",
    flag=True,
)
TIMEOUT: Option[float] = Option(
    "timeout",
    duration(0.1),
    "how long to wait until the job trains without the node; longer than the --stop-grace of its job",
    default="2m",
)


def main(words: Sequence[str]) -> int:
    """Returns an `CommandCode`."""
    place = meeting_place_for("exclude")
    return store_command("exclude", words, _USAGE, place, _work, REASON, AWAY, timeout=TIMEOUT)


def _work(store: Store, place: RendezvousConfig, node: str, command_line: Settings, left_s: float) -> None:
    reason, away = command_line[REASON].value, command_line[AWAY].value
    exclude_node(store, place.job_id, node, reason, left_s, lambda line: print(line, flush=True), away=away)


def exclude_node(
    store: Store,
    job: str,
    node: str,
    reason: str,
    timeout_s: float,
    show: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    *,
    away: bool = False,
) -> None:
    """Returns when the job trains without the node, or when nothing of it is there. `away`: the job need not know it.

    Raises CannotDo, StoreError and RecordInvalid.
    """
    deadline = clock() + timeout_s
    world, nodes = rewrite(store, job, lambda world, nodes: _rows(world, nodes, node, reason, away=away))
    show(f"node {node} is excluded from job {job}: {reason}")
    while any(each.node == node for each in nodes) and any(member.node == node for member in world.members):
        if clock() >= deadline:
            raise CannotDo(
                CommandCode.LATER,
                f"node {node} is excluded, and was still in generation {world.generation} when --timeout was over: "
                f"{state_of(world)}. It stays while the others are fewer than the job needs (--min-nodes, "
                "--nodes-multiple-of), and goes when another node comes. Where it is alone in its world, only it "
                f"has the newest state: elastic-agent drain {node} hands that over",
            )
        sleep(min(LOOK_S, max(0.0, deadline - clock())))
        try:
            newest, nodes, _ = look(store, job)
        except StoreUnavailable:
            continue
        world = newest or world
    if any(each.node == node for each in nodes):
        show(state_of(world))
        return
    show("its agent is away: it is left out when it comes")
    if shortage := _shortage(world, nodes):
        show(shortage)


def _rows(
    world: World, nodes: Sequence[NodeRecord], node: str, reason: str, *, away: bool
) -> tuple[Exclusion, ...]:
    """The exclusions of this world, with that of the node. Raises CannotDo."""
    record = next((each for each in nodes if each.node == node), None)
    life = life_of(record.incarnation) if record is not None else _last_life(world, node)
    if not life and not away:
        raise CannotDo(
            CommandCode.NOT_FOUND,
            f"{no_such_node(node, nodes, world.job)}. If the name is right and its agent is away, add --away: it is "
            "left out when it comes",
        )
    rows = exclude(world.exclusions, node, life, BY_OPERATOR, reason, record=record, operator=True)
    if node not in left_out(rows):
        raise CannotDo(
            CommandCode.CANNOT,
            f"{MAX_EXCLUSIONS} nodes of job {world.job!r} are excluded already, and a world remembers no more: stop "
            f"the agent of node {node} instead (`elastic-agent drain {node}`), or readmit another node",
        )
    return rows


def _shortage(world: World, nodes: Sequence[NodeRecord]) -> str:
    """Empty if the nodes that are not excluded are enough for a world."""
    others = [each.node for each in nodes if each.node not in left_out(world.exclusions) and not each.leaving]
    if world.limits is None or suffice(len(others), world.limits):
        return ""
    return (
        f"without it the job has too few nodes here ({shortened(others) or 'none'}) for a world of at least "
        f"{world.limits.min_nodes}: it waits for another node"
    )


def _last_life(world: World, node: str) -> str:
    """Of a node's agent, as the world remembers it; empty if it knows nothing of the node."""
    lives = [life_of(member.incarnation) for member in world.members if member.node == node]
    return next(iter(lives or [one.life for one in world.exclusions if one.node == node]), "")


def rewrite(
    store: Store, job: str, change: Callable[[World, Sequence[NodeRecord]], tuple[Exclusion, ...]]
) -> tuple[World, Sequence[NodeRecord]]:
    """Replaces the exclusions of the job's world; returns it and the nodes.

    Raises CannotDo, StoreError and RecordInvalid.
    """
    for _ in range(TRIES):
        world, revision, nodes = _read(store, job)
        after = replace(world, exclusions=change(world, nodes))
        compare = Compare(WORLD_KEY, revision)
        if store.transact((compare,), (Put(WORLD_KEY, after.to_json()),)).succeeded:
            return after, nodes
    raise StoreUnavailable(f"others write {WORLD_KEY!r} all the time")


def _read(store: Store, job: str) -> tuple[World, int, Sequence[NodeRecord]]:
    world, nodes, entries = look(store, job)
    if world is None:
        raise CannotDo(
            CommandCode.NO_JOB,
            f"the store holds no world of a job {job!r}: check --rdzv-id and --rdzv-endpoint, or wait for its first",
        )
    if world.phase is Phase.ENDED:
        raise CannotDo(CommandCode.NO_JOB, f"job {job!r} has ended: {world.cause.detail}")
    return world, entries[WORLD_KEY].mod_revision, nodes
