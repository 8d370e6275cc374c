"""`elastic-agent drain NODE`: ask a node of a job to leave it, and show how far that has come.

The request is a key of its own in the job's store, which the node's agent watches. It names the agent's incarnation, so
that a request that was not read in time has no effect later. The rest is as after SIGTERM to the agent: all workers end
after the same step, and the next generation goes on without the node.

The store is found by the options of the agents, their file, or the environment; without any of them it is that of the
job which this user's agents on this machine belong to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

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
from ...rendezvous.store.interface import Compare, Delete, Entry, Put, Store
from ...rendezvous.text import NAME, shortened
from ..common.exits import DrainCode
from ..configuration.config import ConfigError, Problem
from ..configuration.reading.resolve import resolve_meeting_place
from ..configuration.reading.settings import Settings
from ..configuration.reading.sources import ENV_PREFIX
from ..configuration.rendezvous import JOB_ID, RendezvousConfig
from ..configuration.types.option import Option
from ..configuration.types.parsers import duration
from ..workers.processes.run_files import run_directory_parents, stores_here
from .store_command import CannotDo, store_command, world_of

_USAGE = """\
usage: elastic-agent drain NODE
       elastic-agent drain NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Lets a node leave its job. The workers of all nodes end after the same step and the next generation begins there,
without this node: no step is lost. It may come back: start its agent again. On the node itself, SIGTERM to the agent
does the same.
"""

LOOK_S = 0.2

TIMEOUT: Option[float] = Option(
    "timeout",
    duration(0.1),
    "how long to wait until the node has left; longer than the --stop-grace of its job",
    default="2m",
)


def main(words: Sequence[str]) -> int:
    """Returns a `DrainCode`."""
    return store_command("drain", words, DrainCode, _USAGE, _meeting_place, _work, TIMEOUT)


def _work(store: Store, place: RendezvousConfig, node: str, command_line: Settings) -> None:
    drain(store, place.job_id, node, command_line[TIMEOUT].value, lambda line: print(line, flush=True))


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
            world, nodes, request = _read(store, job, node)
        except StoreUnavailable as error:
            if not away:
                show(f"the store does not answer, trying on: {error}")
            away = True
        else:
            away = False
            record = next((each for each in nodes if life_of(each.incarnation) == incarnation), None)
            if record is None:
                _withdraw(store, request, incarnation)
                show(f"node {node} has left; {_state(world)}")
                return
            state = f"{'leaving' if record.leaving else 'has not read the request yet'}; {_state(world)}"
            if state != shown:
                shown = state
                show(f"node {node}: {state}")
        if clock() >= deadline:
            raise CannotDo(
                DrainCode.TIMED_OUT,
                f"node {node} has not left within {timeout_s:g} s: {shown or 'nothing is known of it'}. It was asked, "
                "and may still leave; look with elastic-agent status",
            )
        sleep(min(LOOK_S, max(0.0, deadline - clock())))


def _meeting_place(node: str | None, command_line: Settings) -> RendezvousConfig:
    """Raises ConfigError with all problems."""
    if node is None or not NAME.fullmatch(node):
        advice = "write its name first, as elastic-agent status shows it: elastic-agent drain NODE"
        command_line.problems.append(Problem("node", node, "the name of a node", advice))
    place = resolve_meeting_place(command_line, os.environ)
    return place if place is not None else _meeting_place_here(command_line, os.environ)


def _meeting_place_here(command_line: Settings, environ: Mapping[str, str]) -> RendezvousConfig:
    """Where the only job of this user's agents on this machine meets, or the one that --rdzv-id names."""
    job = command_line[JOB_ID].value
    stores = [
        store
        for store in stores_here(run_directory_parents(), os.getuid())
        if job in (None, store[JOB_ID.name])
    ]
    if len(stores) == 1:
        words = {ENV_PREFIX + name.upper().replace("-", "_"): text for name, text in stores[0].items()}
        place = resolve_meeting_place(command_line, {**environ, **words})
        assert place is not None, "an endpoint is among the words"
        return place
    if stores:
        jobs = ", ".join(sorted(store[JOB_ID.name] for store in stores))
        advice = "add --rdzv-id, or --rdzv-endpoint as the agents have it"
        raise ConfigError(
            [Problem("rdzv-id", None, f"the name of one job, of those on this machine: {jobs}", advice)]
        )
    advice = (
        "add --rdzv-endpoint as the agents have it, or ask on a machine where one of them runs; on the node itself,"
        " send SIGTERM to its agent"
    )
    raise ConfigError([Problem("rdzv-endpoint", None, "the address of the job's store", advice)])


def _ask(store: Store, job: str, node: str) -> str:
    """Write the request; returns the incarnation that it is for."""
    for _ in range(10):
        world, nodes, request = _read(store, job, node)
        if world is None and not nodes:
            raise CannotDo(
                DrainCode.NO_JOB,
                f"the store holds nothing of a job {job!r}: check --rdzv-id and --rdzv-endpoint",
            )
        record = next((each for each in nodes if each.node == node), None)
        if record is None and world is not None and world.phase is Phase.ENDED:
            raise CannotDo(DrainCode.NO_JOB, f"job {job!r} has ended: {world.cause.detail}")
        if record is None:
            names = shortened(each.node for each in nodes) or "none"
            raise CannotDo(DrainCode.NO_NODE, f"job {job!r} has no node {node!r} now; its nodes: {names}")
        life = life_of(record.incarnation)
        compare = Compare(drain_key(node), request.mod_revision if request is not None else 0)
        if store.transact((compare,), (Put(compare.key, DrainRequest(life).to_json()),)).succeeded:
            return life
    raise StoreUnavailable(f"others write {drain_key(node)!r} all the time")


def _read(store: Store, job: str, node: str) -> tuple[World | None, list[NodeRecord], Entry | None]:
    entries = {entry.key: entry for entry in store.read((WORLD_KEY, NODES_PREFIX, drain_key(node))).entries}
    return world_of(job, entries.values()), list(_records(entries.values())), entries.get(drain_key(node))


def _records(entries: Iterable[Entry]) -> Iterable[NodeRecord]:
    for entry in entries:
        if entry.key.startswith(NODES_PREFIX):
            yield NodeRecord.from_json(entry.key, entry.value)


def _withdraw(store: Store, request: Entry | None, incarnation: str) -> None:
    """Delete the request of an agent that ended before it read it."""
    if request is not None and DrainRequest.from_json(request.key, request.value).incarnation == incarnation:
        store.transact((Compare(request.key, request.mod_revision),), (Delete(request.key),))


def _state(world: World | None) -> str:
    if world is None:
        return "there is no world yet"
    names = shortened(member.node for member in world.members)
    if world.phase is Phase.RUNNING:
        return f"generation {world.generation} runs on {names}"
    if world.phase is Phase.ENDED:
        return f"the job has ended: {world.cause.detail}"
    how = "ends between two steps" if world.drains else "is being stopped"
    return f"generation {world.generation} on {names} {how}: {world.cause.detail}"
