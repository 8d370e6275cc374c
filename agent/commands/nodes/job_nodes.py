"""Shared by the commands about one node of a job: they find its store, read its records, and describe its state.

The store is found by the options of the agents, their file, or the environment; without any of them it is the store of
the job that this user's agents on this machine belong to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence

from ....rendezvous.records import NODES_PREFIX, WORLD_KEY, NodeRecord, Phase, World
from ....rendezvous.store.interface import Entry, Store
from ....rendezvous.text import NAME, shortened
from ...configuration.config import ConfigError, Problem
from ...configuration.derive import resolve_meeting_place
from ...configuration.load import ENV_PREFIX
from ...configuration.rendezvous import JOB_ID, RendezvousConfig
from ...configuration.settings import Settings
from ...observability.sources import HERE_S, AgentsSource, CannotShow
from ...workers.processes.run_files import agents_here, run_directory_parents, stores_here
from ..store_command import world_of

LOOK_S = 0.2
"""How often a command that waits reads the store."""
TRIES = 10
"""How often a command tries to write a key that others write, too."""


def meeting_place_for(command: str) -> Callable[[str | None, Settings], RendezvousConfig]:
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


def look(
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


def no_such_node(node: str, nodes: Sequence[NodeRecord], job: str) -> str:
    names = shortened(each.node for each in nodes) or "none"
    return f"job {job!r} has no node {node!r} now; its nodes: {names}"


def state_of(world: World | None) -> str:
    if world is None:
        return "there is no world yet"
    names = shortened(member.node for member in world.members)
    if world.phase is Phase.RUNNING:
        return f"generation {world.generation} runs on {names}"
    if world.phase is Phase.ENDED:
        return f"the job has ended: {world.cause.detail}"
    how = "ends between two steps" if world.drains else "is being stopped"
    return f"generation {world.generation} on {names} {how}: {world.cause.detail}"
