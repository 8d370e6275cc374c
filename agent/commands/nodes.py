"""`elastic-agent drain NODE`, `exclude NODE` and `readmit NODE`: the commands about one node of a job.

*drain* asks a node to leave its job, and shows how far that has come. The request is a key of its own in the job's
store, which the node's agent watches. It names the agent's incarnation, so that a request that was not read in time has
no effect later. The rest is as after SIGTERM to the agent: all workers end after the same step, and the next generation
goes on without the node.

*exclude* leaves a node out of its job's worlds until *readmit*, which needs neither a cool-down nor a check. They write
the job's `world` by compare-and-set, and try again if another writer was faster. The coordinator does the rest: a
member leaves by a planned change, without a lost step, as soon as the other nodes are enough.

The store is found by the options of the agents, their file, or the environment; without any of them it is the store of
the job that this user's agents on this machine belong to.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...rendezvous.coordinator.candidates import suffice
from ...rendezvous.coordinator.exclusions import BY_OPERATOR, exclude, left_out, readmit
from ...rendezvous.errors import StoreUnavailable
from ...rendezvous.records import (
    NODES_PREFIX,
    WORLD_KEY,
    DrainRequest,
    NodeRecord,
    Phase,
    World,
    drain_key,
    life_of,
)
from ...rendezvous.statements.exclusion import MAX_EXCLUSION_REASON, MAX_EXCLUSIONS, Exclusion
from ...rendezvous.store.interface import Compare, Delete, Entry, Put, Store
from ...rendezvous.text import NAME, clean, shortened
from ..common.exits import ExitCode
from ..configuration.config import ConfigError, Problem
from ..configuration.derive import resolve_meeting_place
from ..configuration.load import ENV_PREFIX
from ..configuration.parse import YES_OR_NO, Option, Parser, duration
from ..configuration.rendezvous import JOB_ID, RendezvousConfig
from ..configuration.settings import Settings
from ..observability.sources import AgentsSource, CannotShow
from ..workers.processes.run_files import agents_here, run_directory_parents, stores_here
from .store_command import CannotDo, store_command, world_of

LOOK_S = 0.2
"""How often a command that waits reads the store."""
HERE_S = 1.0
"""How long the agents on this machine may take to say which jobs are here."""
TRIES = 10
"""How often a command tries to write a key that others write, too."""

_DRAIN = """\
usage: elastic-agent drain NODE
       elastic-agent drain NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Lets a node leave its job. The workers of all nodes end after the same step and the next generation begins there,
without this node: no step is lost. It may come back: start its agent again. On the node itself, SIGTERM to the agent
does the same.
"""

_EXCLUDE = """\
usage: elastic-agent exclude NODE [--reason TEXT] [--away]
       elastic-agent exclude NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Leaves a node out of all worlds of its job until elastic-agent readmit NODE. If it trains, the workers of all nodes end
after the same step and the next generation begins there, without it: no step is lost. Its agent stays. A node whose
agent is away is left out when it comes.
"""

_READMIT = """\
usage: elastic-agent readmit NODE
       elastic-agent readmit NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Ends the exclusion of a node, also one that the job itself has decided: at once, without a cool-down or a check. The job
takes the node in by a planned change, if there is room for it.
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
    "how long to wait until the job goes on without the node; longer than the --stop-grace of its job",
    default="2m",
)


def main(words: Sequence[str]) -> int:
    """`words` begin with the command. Returns an `ExitCode`."""
    name, *rest = words
    place = _meeting_place_for(name)
    if name == "drain":
        return store_command(name, rest, _DRAIN, place, _drain, timeout=TIMEOUT)
    if name == "exclude":
        return store_command(name, rest, _EXCLUDE, place, _exclude, REASON, AWAY, timeout=TIMEOUT)
    return store_command(name, rest, _READMIT, place, _readmit)


def _drain(store: Store, place: RendezvousConfig, node: str, command_line: Settings, left_s: float) -> None:
    drain(store, place.job_id, node, left_s, _show)


def _exclude(store: Store, place: RendezvousConfig, node: str, command_line: Settings, left_s: float) -> None:
    reason, away = command_line[REASON].value, command_line[AWAY].value
    exclude_node(store, place.job_id, node, reason, left_s, _show, away=away)


def _readmit(store: Store, place: RendezvousConfig, node: str, command_line: Settings, left_s: float) -> None:
    readmit_node(store, place.job_id, node, _show)


def _show(line: str) -> None:
    print(line, flush=True)


# ---------------------------------------------------------------- which job, and how it is


def _meeting_place_for(command: str) -> Callable[[str | None, Settings], RendezvousConfig]:
    """Takes the node and the command line; raises ConfigError with all problems."""

    def meeting_place(node: str | None, command_line: Settings) -> RendezvousConfig:
        if node is None or not NAME.fullmatch(node):
            advice = f"write its name first, as elastic-agent status shows it: elastic-agent {command} NODE"
            command_line.problems.append(Problem("node", node, "the name of a node", advice))
        place = resolve_meeting_place(command_line, os.environ)
        assert node is not None, "else there was a problem"
        return place if place is not None else _meeting_place_here(node, command_line, os.environ)

    return meeting_place


def _meeting_place_here(node: str, command_line: Settings, environ: Mapping[str, str]) -> RendezvousConfig:
    """The store of the only job of this user's agents on this machine, of the one that has such a node, or of the one
    that --rdzv-id names."""
    job = command_line[JOB_ID].value
    stores = [
        store
        for store in stores_here(run_directory_parents(), os.getuid())
        if job in (None, store[JOB_ID.name])
    ]
    nodes: Mapping[str, frozenset[str]] = {}
    if len(stores) > 1:
        nodes = _nodes_by_job()
        stores = [store for store in stores if node in nodes.get(store[JOB_ID.name], ())] or stores
    if len(stores) == 1:
        words = {ENV_PREFIX + name.upper().replace("-", "_"): text for name, text in stores[0].items()}
        place = resolve_meeting_place(command_line, {**environ, **words})
        assert place is not None, "an endpoint is among the words"
        return place
    if stores:
        jobs = sorted({store[JOB_ID.name] for store in stores})
        known = ", ".join(f"{job} ({', '.join(sorted(nodes.get(job, ()))) or 'no answer'})" for job in jobs)
        advice = "check the node's name; or add --rdzv-id, or --rdzv-endpoint as the agents have it"
        raise ConfigError(
            [Problem("rdzv-id", None, f"one job with node {node}, of those here: {known}", advice)]
        )
    advice = (
        "add --rdzv-endpoint as the agents have it, or ask on a machine where one of them runs; on the node itself,"
        " send SIGTERM to its agent"
    )
    raise ConfigError([Problem("rdzv-endpoint", None, "the address of the job's store", advice)])


def _nodes_by_job() -> Mapping[str, frozenset[str]]:
    """Of the jobs whose agents on this machine answer, those that are away and excluded among them."""
    here = AgentsSource(lambda: agents_here(run_directory_parents(), os.getuid()), HERE_S, here=True)
    found: dict[str, frozenset[str]] = {}
    with contextlib.suppress(CannotShow):
        for job in (one.job for one in here.jobs()):
            names = {each.node for each in job.nodes}
            if job.world is not None:
                names |= {member.node for member in job.world.members} | {
                    out.node for out in job.world.exclusions
                }
            found[job.job] = found.get(job.job, frozenset()) | names
    return found


def _look(
    store: Store, job: str, *more: str
) -> tuple[World | None, Sequence[NodeRecord], Mapping[str, Entry]]:
    """The job's world, its nodes, and by key all entries, those of the keys `more` among them.

    Raises StoreError and RecordInvalid.
    """
    entries = store.read((WORLD_KEY, NODES_PREFIX, *more)).entries
    nodes = [
        NodeRecord.from_json(entry.key, entry.value)
        for entry in entries
        if entry.key.startswith(NODES_PREFIX)
    ]
    return world_of(job, entries), nodes, {entry.key: entry for entry in entries}


def _no_such_node(node: str, nodes: Sequence[NodeRecord], job: str) -> str:
    names = shortened(each.node for each in nodes) or "none"
    return f"job {job!r} has no node {node!r} now; its nodes: {names}"


def _state_of(world: World | None) -> str:
    if world is None:
        return "there is no world yet"
    names = shortened(member.node for member in world.members)
    if world.phase is Phase.RUNNING:
        return f"generation {world.generation} runs on {names}"
    if world.phase is Phase.ENDED:
        return f"the job has ended: {world.cause.detail}"
    how = "ends between two steps" if world.drains else "is being stopped"
    return f"generation {world.generation} on {names} {how}: {world.cause.detail}"


# ---------------------------------------------------------------- drain


def drain(
    store: Store,
    job: str,
    node: str,
    timeout_s: float,
    show: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when the node has left. Raises CannotDo, StoreError and RecordInvalid."""
    deadline = clock() + timeout_s
    incarnation = _ask(store, job, node)
    show(f"node {node} is asked to leave job {job}")
    shown, away = "", False
    while True:
        try:
            world, nodes, request = _read_drain(store, job, node)
        except StoreUnavailable as error:
            if not away:
                show(f"the store does not answer, trying on: {error}")
            away = True
        else:
            away = False
            record = next((each for each in nodes if life_of(each.incarnation) == incarnation), None)
            if record is None:
                _withdraw(store, request, incarnation)
                show(f"node {node} has left; {_state_of(world)}")
                return
            state = f"{'leaving' if record.leaving else 'has not read the request yet'}; {_state_of(world)}"
            if state != shown:
                shown = state
                show(f"node {node}: {state}")
        if clock() >= deadline:
            raise CannotDo(
                ExitCode.LATER,
                f"node {node} had not left when --timeout was over: {shown or 'nothing is known of it'}. It was asked, "
                "and may still leave; look with elastic-agent status",
            )
        sleep(min(LOOK_S, max(0.0, deadline - clock())))


def _ask(store: Store, job: str, node: str) -> str:
    """Write the request; returns the incarnation that it is for."""
    for _ in range(TRIES):
        world, nodes, request = _read_drain(store, job, node)
        if world is None and not nodes:
            raise CannotDo(
                ExitCode.NO_JOB,
                f"the store holds nothing of a job {job!r}: check --rdzv-id and --rdzv-endpoint",
            )
        record = next((each for each in nodes if each.node == node), None)
        if record is None and world is not None and world.phase is Phase.ENDED:
            raise CannotDo(ExitCode.NO_JOB, f"job {job!r} has ended: {world.cause.detail}")
        if record is None:
            raise CannotDo(ExitCode.NOT_FOUND, _no_such_node(node, nodes, job))
        life = life_of(record.incarnation)
        compare = Compare(drain_key(node), request.mod_revision if request is not None else 0)
        if store.transact((compare,), (Put(compare.key, DrainRequest(life).to_json()),)).succeeded:
            return life
    raise StoreUnavailable(f"others write {drain_key(node)!r} all the time")


def _read_drain(store: Store, job: str, node: str) -> tuple[World | None, Sequence[NodeRecord], Entry | None]:
    world, nodes, entries = _look(store, job, drain_key(node))
    return world, nodes, entries.get(drain_key(node))


def _withdraw(store: Store, request: Entry | None, incarnation: str) -> None:
    """Delete the request of an agent that ended before it read it."""
    if request is not None and DrainRequest.from_json(request.key, request.value).incarnation == incarnation:
        store.transact((Compare(request.key, request.mod_revision),), (Delete(request.key),))


# ---------------------------------------------------------------- exclude and readmit


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
    world, nodes = _rewrite(store, job, lambda world, nodes: _rows(world, nodes, node, reason, away=away))
    show(f"node {node} is excluded from job {job}: {reason}")
    while any(each.node == node for each in nodes) and any(member.node == node for member in world.members):
        if clock() >= deadline:
            raise CannotDo(
                ExitCode.LATER,
                f"node {node} is excluded, and was still in generation {world.generation} when --timeout was over: "
                f"{_state_of(world)}. It stays while the others are fewer than the job needs (--min-nodes, "
                "--nodes-multiple-of), and goes when another node comes. Where it is alone in its world, only it "
                f"has the newest state: elastic-agent drain {node} hands that over",
            )
        sleep(min(LOOK_S, max(0.0, deadline - clock())))
        try:
            newest, nodes, _ = _look(store, job)
        except StoreUnavailable:
            continue
        world = newest or world
    if any(each.node == node for each in nodes):
        show(_state_of(world))
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
            ExitCode.NOT_FOUND,
            f"{_no_such_node(node, nodes, world.job)}. If the name is right and its agent is away, add --away: it is "
            "left out when it comes",
        )
    rows = exclude(world.exclusions, node, life, BY_OPERATOR, reason, record=record, operator=True)
    if node not in left_out(rows):
        raise CannotDo(
            ExitCode.NOT_HERE,
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


def _rewrite(
    store: Store, job: str, change: Callable[[World, Sequence[NodeRecord]], tuple[Exclusion, ...]]
) -> tuple[World, Sequence[NodeRecord]]:
    """Replaces the exclusions of the job's world; returns it and the nodes.

    Raises CannotDo, StoreError and RecordInvalid.
    """
    for _ in range(TRIES):
        world, revision, nodes = _read_world(store, job)
        after = replace(world, exclusions=change(world, nodes))
        compare = Compare(WORLD_KEY, revision)
        if store.transact((compare,), (Put(WORLD_KEY, after.to_json()),)).succeeded:
            return after, nodes
    raise StoreUnavailable(f"others write {WORLD_KEY!r} all the time")


def _read_world(store: Store, job: str) -> tuple[World, int, Sequence[NodeRecord]]:
    world, nodes, entries = _look(store, job)
    if world is None:
        raise CannotDo(
            ExitCode.NO_JOB,
            f"the store holds no world of a job {job!r}: check --rdzv-id and --rdzv-endpoint, or wait for its first",
        )
    if world.phase is Phase.ENDED:
        raise CannotDo(ExitCode.NO_JOB, f"job {job!r} has ended: {world.cause.detail}")
    return world, entries[WORLD_KEY].mod_revision, nodes


def readmit_node(store: Store, job: str, node: str, show: Callable[[str], None]) -> None:
    """Raises CannotDo, StoreError and RecordInvalid."""

    def change(world: World, nodes: Sequence[NodeRecord]) -> tuple[Exclusion, ...]:
        out = left_out(world.exclusions)
        if node not in out:
            raise CannotDo(
                ExitCode.NOT_FOUND,
                f"node {node!r} of job {job!r} is not excluded; those that are: {shortened(out) or 'none'}",
            )
        return readmit(world.exclusions, frozenset({node}))

    _rewrite(store, job, change)
    show(f"node {node} is readmitted to job {job}")
