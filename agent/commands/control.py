"""`elastic-agent exclude NODE` and `readmit NODE`: the commands that change a job's store.

They write the job's `world` by compare-and-set, and try again if another writer was faster. The coordinator does the
rest: a member leaves by a planned change as soon as the other nodes are enough.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...rendezvous.coordinator import exclusions
from ...rendezvous.errors import StoreUnavailable
from ...rendezvous.messages import MAX_EXCLUSION_REASON, MAX_EXCLUSIONS, Exclusion
from ...rendezvous.records import (
    NODES_PREFIX,
    WORLD_KEY,
    NodeRecord,
    Phase,
    World,
    life_of,
)
from ...rendezvous.store.interface import Compare, Put, Store
from ...rendezvous.text import NAME, clean, shortened
from ..common.exits import CannotDo, ExitCode
from ..configuration.config import ConfigError, Problem
from ..configuration.derive import resolve_meeting_place
from ..configuration.load import ENV_PREFIX, Settings
from ..configuration.parse import Option, Parser, duration
from ..configuration.rendezvous import JOB_ID, RendezvousConfig
from ..machine.agents_here import run_directory_parents, stores_here
from .command import opened, run_command, world_of

LOOK_S = 0.2
"""How often a command that waits reads the store."""
TRIES = 10
"""How often a command tries to write a key that others write, too."""

_STORE = "--rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]"

_EXCLUDE = f"""\
usage: elastic-agent exclude NODE [--reason TEXT]
       elastic-agent exclude NODE {_STORE}

Leaves a node out of its job until elastic-agent readmit NODE, without a lost step. Its agent stays. A node whose agent
is away, or that the job does not know, is left out when it comes.
"""

_READMIT = f"""\
usage: elastic-agent readmit NODE
       elastic-agent readmit NODE {_STORE}

Ends the exclusion of a node, also one that the job itself has decided, at once. The job takes it in if there is room.
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


def exclude(words: Sequence[str]) -> int:
    """Returns an `ExitCode`, as `readmit` does."""

    def work(job: JobStore, node: str, given: Settings) -> None:
        job.exclude(node, given[REASON].value, given[TIMEOUT].value)

    return _of_node("exclude", words, _EXCLUDE, [REASON, TIMEOUT], work)


def readmit(words: Sequence[str]) -> int:
    return _of_node("readmit", words, _READMIT, [], lambda job, node, _: job.readmit(node))


def _of_node(
    name: str,
    words: Sequence[str],
    usage: str,
    options: Sequence[Option[Any]],
    work: Callable[[JobStore, str, Settings], None],
) -> int:
    def at_job(node: str, command_line: Settings) -> None:
        place = _place_of_node(node, command_line)
        with opened(place) as store:
            work(JobStore(store, place.job_id), node, command_line)

    return run_command(name, words, usage, options, at_job, takes="NODE", of_store=True)


# --- Where the store is


def _place_of_node(node: str, command_line: Settings) -> RendezvousConfig:
    """Where the options say; else the store of the only job of this user's agents on this machine, or of that one of
    them which --rdzv-id names. Raises ConfigError with all problems."""
    if not NAME.fullmatch(node):
        advice = "write its name first, as elastic-agent status shows it"
        command_line.problems.append(Problem("node", node, "the name of a node", advice))
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
    advice = "add --rdzv-endpoint as the agents have it, or ask on a machine where one of them runs"
    raise ConfigError([Problem("rdzv-endpoint", None, "the address of the job's store", advice)])


# --- What is done there


@dataclass(frozen=True, slots=True)
class Seen:
    """A job at one look."""

    world: World | None
    nodes: Mapping[str, NodeRecord]
    world_revision: int
    """Of the key of the world; 0: it is not there."""

    @property
    def names(self) -> str:
        return shortened(self.nodes) or "none"

    def life_of(self, node: str) -> str:
        """Of its agent, also as the world remembers it; empty: the job knows nothing of the node."""
        if node in self.nodes:
            return life_of(self.nodes[node].incarnation)
        members, rows = (self.world.members, self.world.exclusions) if self.world is not None else ((), ())
        lives = [life_of(member.incarnation) for member in members if member.node == node]
        return next(iter(lives or [row.life for row in rows if row.node == node]), "")


class JobStore:
    """The keys of one job. All methods show what is done, and raise CannotDo, StoreError and RecordInvalid."""

    def __init__(
        self,
        store: Store,
        job: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._job = store, job
        self._clock, self._sleep = clock, sleep

    def exclude(self, node: str, reason: str, timeout_s: float) -> None:
        """Until the job trains without the node, or nothing of it is there."""

        def rows(seen: Seen, before: Sequence[Exclusion]) -> tuple[Exclusion, ...]:
            record, life = seen.nodes.get(node), seen.life_of(node)
            after = exclusions.exclude(
                before, node, life, exclusions.BY_OPERATOR, reason, record=record, operator=True
            )
            if node not in exclusions.left_out(after):
                raise CannotDo(
                    ExitCode.NOT_HERE,
                    f"{MAX_EXCLUSIONS} nodes of job {self._job!r} are excluded already, and a world remembers no more: "
                    f"stop the agent of node {node} instead (SIGTERM), or readmit another node",
                )
            return after

        seen = self._change_exclusions(rows)
        _show(f"node {node} is excluded from job {self._job}: {reason}")
        if node not in seen.nodes:
            _show(f"its agent is away: it is left out when it comes (nodes of the job now: {seen.names})")
            return

        def gone(seen: Seen) -> bool:
            members = seen.world.members if seen.world is not None else ()
            return node not in seen.nodes or all(one.node != node for one in members)

        self._wait(node, gone, timeout_s)
        _show(f"job {self._job} goes on without node {node}")

    def readmit(self, node: str) -> None:
        def rows(_: Seen, before: Sequence[Exclusion]) -> tuple[Exclusion, ...]:
            out = exclusions.left_out(before)
            if node not in out:
                those = shortened(out) or "none"
                reason = f"node {node!r} of job {self._job!r} is not excluded; those that are: {those}"
                raise CannotDo(ExitCode.NOT_FOUND, reason)
            return exclusions.readmit(before, frozenset({node}))

        self._change_exclusions(rows)
        _show(f"node {node} is readmitted to job {self._job}")

    def _look(self) -> Seen:
        entries = self._store.read((WORLD_KEY, NODES_PREFIX)).entries
        nodes = [
            NodeRecord.from_json(entry.key, entry.value)
            for entry in entries
            if entry.key.startswith(NODES_PREFIX)
        ]
        revision = next((entry.mod_revision for entry in entries if entry.key == WORLD_KEY), 0)
        return Seen(world_of(self._job, entries), {node.node: node for node in nodes}, revision)

    def _change_exclusions(
        self, change: Callable[[Seen, Sequence[Exclusion]], tuple[Exclusion, ...]]
    ) -> Seen:
        """Writes what `change` makes of those that there are. Returns how the job was."""
        for _ in range(TRIES):
            seen = self._look()
            if seen.world is None or seen.world.phase is Phase.ENDED:
                raise self._no_job(seen.world)
            world = replace(seen.world, exclusions=change(seen, seen.world.exclusions))
            compare = Compare(WORLD_KEY, seen.world_revision)
            if self._store.transact((compare,), (Put(WORLD_KEY, world.to_json()),)).succeeded:
                return seen
        raise StoreUnavailable(f"others write {WORLD_KEY!r} all the time")

    def _wait(self, node: str, gone: Callable[[Seen], bool], timeout_s: float) -> None:
        """Until the node has gone; the store may be away meanwhile."""
        deadline = self._clock() + timeout_s
        while True:
            with contextlib.suppress(StoreUnavailable):
                if gone(self._look()):
                    return
            if self._clock() >= deadline:
                raise CannotDo(
                    ExitCode.LATER,
                    f"node {node} was still there when --timeout was over. It may still leave: look with "
                    "elastic-agent status. One that is excluded stays while the others are fewer than the job needs "
                    "(--min-nodes, --nodes-multiple-of)",
                )
            self._sleep(min(LOOK_S, max(0.0, deadline - self._clock())))

    def _no_job(self, world: World | None) -> CannotDo:
        why = f"the store holds nothing of a job {self._job!r}: check --rdzv-id and --rdzv-endpoint"
        if world is not None:
            why = f"job {self._job!r} has ended: {world.cause.detail}"
        return CannotDo(ExitCode.NO_JOB, why)


def _show(line: str) -> None:
    print(line, flush=True)
