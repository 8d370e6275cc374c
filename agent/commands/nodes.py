"""`elastic-agent drain NODE`, `exclude NODE` and `readmit NODE`: the commands about one node of a job.

*drain* asks a node to leave its job. The request is a key of its own in the job's store, which the node's agent
watches. It names the agent's incarnation, so that a request that was not read in time has no effect later. The rest is
as after SIGTERM to the agent: all workers end after the same step, and the next generation goes on without the node.

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
from functools import partial
from typing import Any

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
from ...rendezvous.store.interface import Compare, Entry, Put, Store
from ...rendezvous.text import NAME, clean, shortened
from ..common.exits import CannotDo, ExitCode
from ..configuration.config import ConfigError, Problem
from ..configuration.derive import resolve_meeting_place
from ..configuration.load import ENV_PREFIX, Settings
from ..configuration.parse import Option, Parser, duration
from ..configuration.rendezvous import JOB_ID, RendezvousConfig
from ..workers.processes.run_files import run_directory_parents, stores_here
from .store_command import Work, store_command, world_of

LOOK_S = 0.2
"""How often a command that waits reads the store."""
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
usage: elastic-agent exclude NODE [--reason TEXT]
       elastic-agent exclude NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Leaves a node out of all worlds of its job until elastic-agent readmit NODE. If it trains, the workers of all nodes end
after the same step and the next generation begins there, without it: no step is lost. Its agent stays. A node whose
agent is away, or that the job does not know, is left out when it comes.
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
TIMEOUT: Option[float] = Option(
    "timeout",
    duration(0.1),
    "how long to wait until the job goes on without the node; longer than the --stop-grace of its job",
    default="2m",
)


def main(words: Sequence[str]) -> int:
    """`words` begin with the command. Returns an `ExitCode`."""
    name, *rest = words
    usage, work, options = _COMMANDS[name]
    find = partial(_meeting_place, name)
    return store_command(name, rest, usage, find, work, *options, subject="NODE")


def _show(line: str) -> None:
    print(line, flush=True)


_COMMANDS: Mapping[str, tuple[str, Work, tuple[Option[Any], ...]]] = {
    "drain": (
        _DRAIN,
        lambda store, place, node, words: drain(store, place.job_id, node, words[TIMEOUT].value, _show),
        (TIMEOUT,),
    ),
    "exclude": (
        _EXCLUDE,
        lambda store, place, node, words: exclude_node(
            store, place.job_id, node, words[REASON].value, words[TIMEOUT].value, _show
        ),
        (REASON, TIMEOUT),
    ),
    "readmit": (_READMIT, lambda store, place, node, _: readmit_node(store, place.job_id, node, _show), ()),
}


# ---------------------------------------------------------------- which job, and how it is


def _meeting_place(command: str, node: str, command_line: Settings) -> RendezvousConfig:
    """Where the options say; else the store of the only job of this user's agents on this machine, or of that one of
    them which --rdzv-id names. Raises ConfigError with all problems."""
    if not NAME.fullmatch(node):
        advice = f"write its name first, as elastic-agent status shows it: elastic-agent {command} NODE"
        command_line.problems.append(Problem("node", node or None, "the name of a node", advice))
    place = resolve_meeting_place(command_line, os.environ)
    if place is not None:
        return place
    job, here = command_line[JOB_ID].value, stores_here(run_directory_parents(), os.getuid())
    stores = [store for store in here if job in (None, store[JOB_ID.name])]
    if len(stores) == 1:
        words = {ENV_PREFIX + name.upper().replace("-", "_"): text for name, text in stores[0].items()}
        place = resolve_meeting_place(command_line, {**os.environ, **words})
        assert place is not None, "an endpoint is among the words"
        return place
    if stores:
        jobs = ", ".join(sorted({store[JOB_ID.name] for store in stores}))
        advice = "add --rdzv-id, or --rdzv-endpoint as the agents have it"
        raise ConfigError([Problem("rdzv-id", None, f"one of the jobs here: {jobs}", advice)])
    advice = (
        "add --rdzv-endpoint as the agents have it, or ask on a machine where one of them runs; on the node itself,"
        " send SIGTERM to its agent"
    )
    raise ConfigError([Problem("rdzv-endpoint", None, "the address of the job's store", advice)])


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


def _state_of(world: World | None) -> str:
    if world is None:
        return "there is no world yet"
    names = shortened(member.node for member in world.members)
    if world.phase is Phase.RUNNING:
        return f"generation {world.generation} runs on {names}"
    return f"generation {world.generation} on {names} is {world.phase.value}: {world.cause.detail}"


Clock = Callable[[], float]
Sleep = Callable[[float], None]


def _wait(
    store: Store,
    job: str,
    node: str,
    gone: Callable[[World | None, Sequence[NodeRecord]], bool],
    timeout_s: float,
    show: Callable[[str], None],
    clock: Clock,
    sleep: Sleep,
) -> None:
    """Shows each new state of the job until the node has `gone`; a store may be away meanwhile. Raises CannotDo."""
    deadline, shown = clock() + timeout_s, "the store does not answer"
    while True:
        with contextlib.suppress(StoreUnavailable):
            world, nodes, _ = _look(store, job)
            if (state := _state_of(world)) != shown:
                shown = state
                show(shown)
            if gone(world, nodes):
                return
        if clock() >= deadline:
            raise CannotDo(
                ExitCode.LATER,
                f"node {node} was still there when --timeout was over: {shown}. It may still leave: look with "
                "elastic-agent status. One that is excluded stays while the others are fewer than the job needs "
                "(--min-nodes, --nodes-multiple-of)",
            )
        sleep(min(LOOK_S, max(0.0, deadline - clock())))


def _no_job(job: str, world: World | None) -> CannotDo:
    if world is None:
        why = f"the store holds nothing of a job {job!r}: check --rdzv-id and --rdzv-endpoint"
    else:
        why = f"job {job!r} has ended: {world.cause.detail}"
    return CannotDo(ExitCode.NO_JOB, why)


def drain(
    store: Store,
    job: str,
    node: str,
    timeout_s: float,
    show: Callable[[str], None],
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> None:
    """Returns when the node has left. Raises CannotDo, StoreError and RecordInvalid."""
    life = _ask(store, job, node)
    show(f"node {node} is asked to leave job {job}")

    def gone(world: World | None, nodes: Sequence[NodeRecord]) -> bool:
        return all(life_of(each.incarnation) != life for each in nodes)

    _wait(store, job, node, gone, timeout_s, show, clock, sleep)
    show(f"node {node} has left")


def _ask(store: Store, job: str, node: str) -> str:
    """Write the request; returns the incarnation that it is for."""
    for _ in range(TRIES):
        world, nodes, entries = _look(store, job, drain_key(node))
        record = next((each for each in nodes if each.node == node), None)
        if record is None and (world is None or world.phase is Phase.ENDED):
            raise _no_job(job, world)
        if record is None:
            names = shortened(each.node for each in nodes) or "none"
            raise CannotDo(ExitCode.NOT_FOUND, f"job {job!r} has no node {node!r} now; its nodes: {names}")
        life, request = life_of(record.incarnation), entries.get(drain_key(node))
        compare = Compare(drain_key(node), request.mod_revision if request is not None else 0)
        if store.transact((compare,), (Put(compare.key, DrainRequest(life).to_json()),)).succeeded:
            return life
    raise StoreUnavailable(f"others write {drain_key(node)!r} all the time")


# ---------------------------------------------------------------- exclude and readmit


def exclude_node(
    store: Store,
    job: str,
    node: str,
    reason: str,
    timeout_s: float,
    show: Callable[[str], None],
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> None:
    """Returns when the job trains without the node, or when nothing of it is there. Raises CannotDo, StoreError and
    RecordInvalid."""
    nodes = _rewrite(store, job, lambda world, nodes: _rows(world, nodes, node, reason))
    show(f"node {node} is excluded from job {job}: {reason}")
    if all(each.node != node for each in nodes):
        names = shortened(each.node for each in nodes) or "none"
        show(f"its agent is away: it is left out when it comes (nodes of the job now: {names})")
        return

    def gone(world: World | None, nodes: Sequence[NodeRecord]) -> bool:
        members = world.members if world is not None else ()
        return not any(one.node == node for one in nodes) or all(one.node != node for one in members)

    _wait(store, job, node, gone, timeout_s, show, clock, sleep)


def _rows(world: World, nodes: Sequence[NodeRecord], node: str, reason: str) -> tuple[Exclusion, ...]:
    """The exclusions of this world, with that of the node. Raises CannotDo."""
    record = next((each for each in nodes if each.node == node), None)
    life = life_of(record.incarnation) if record is not None else _last_life(world, node)
    rows = exclude(world.exclusions, node, life, BY_OPERATOR, reason, record=record, operator=True)
    if node not in left_out(rows):
        raise CannotDo(
            ExitCode.NOT_HERE,
            f"{MAX_EXCLUSIONS} nodes of job {world.job!r} are excluded already, and a world remembers no more: stop "
            f"the agent of node {node} instead (`elastic-agent drain {node}`), or readmit another node",
        )
    return rows


def _last_life(world: World, node: str) -> str:
    """Of a node's agent, as the world remembers it; empty if it knows nothing of the node."""
    lives = [life_of(member.incarnation) for member in world.members if member.node == node]
    return next(iter(lives or [one.life for one in world.exclusions if one.node == node]), "")


def _rewrite(
    store: Store, job: str, change: Callable[[World, Sequence[NodeRecord]], tuple[Exclusion, ...]]
) -> Sequence[NodeRecord]:
    """Replaces the exclusions of the job's world; returns its nodes. Raises CannotDo, StoreError and RecordInvalid."""
    for _ in range(TRIES):
        world, nodes, entries = _look(store, job)
        if world is None or world.phase is Phase.ENDED:
            raise _no_job(job, world)
        after = replace(world, exclusions=change(world, nodes))
        compare = Compare(WORLD_KEY, entries[WORLD_KEY].mod_revision)
        if store.transact((compare,), (Put(WORLD_KEY, after.to_json()),)).succeeded:
            return nodes
    raise StoreUnavailable(f"others write {WORLD_KEY!r} all the time")


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
