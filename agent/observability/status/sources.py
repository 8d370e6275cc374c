"""Where `elastic-agent status` learns of a job: from an agent, from the agents on this machine, or from the store.

A source lists the nodes; each node is then asked for what only it knows, over HTTP, many at
once and in bounded time. Nothing is written, no lease is taken, and the job does not notice.
"""

from __future__ import annotations

import enum
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from ....codec import Invalid
from ....rendezvous.errors import RecordInvalid, StoreError, StoreMismatch, StoreRefused
from ....rendezvous.records import NODES_PREFIX, WORLD_KEY, Endpoint, NodeRecord, World
from ....rendezvous.store.interface import Entry, Store
from ...common.exits import StatusCode
from ...common.http_get import NoAnswer, get
from ...configuration.rendezvous import RendezvousConfig
from ...rendezvous_io.store_opening import open_to_look
from .pages import JOB_PATH, MAX_JOB_BYTES, MAX_STATUS_BYTES, STATUS_PAGE, STATUS_PATH, JobStatus, NodeStatus

AT_ONCE = 128
"""Questions under way, each in a thread of its own."""


class CannotShow(Exception):
    """There is nothing to show, and `code` and text say why and what to try."""

    def __init__(self, code: StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Unreachable(enum.Enum):
    """How an agent did not answer."""

    REFUSED = "refused"
    """No process listens there any more: the agent has ended."""
    SILENT = "silent"
    """It stands still, or cannot be reached from here."""
    STRANGE = "strange"
    """What answers is another program, or another version of elastic-agent."""
    REPLACED = "replaced"
    """Another life of an agent answers there."""
    HIDDEN = "hidden"
    """It has published no address: it listens on its own loopback."""


NodeAnswer: TypeAlias = NodeStatus | Unreachable


@dataclass(frozen=True, slots=True)
class Found:
    """A job, and the source that knows it."""

    asked: str
    job: JobStatus
    witness: NodeStatus | None = None
    """The agent that was asked, if one was."""
    notes: tuple[str, ...] = ()
    """What is wrong besides, in words."""


class Source(ABC):
    """May be asked again and again."""

    @abstractmethod
    def jobs(self) -> list[Found]:
        """At least one. Raises CannotShow."""


# --- Agents


_T = TypeVar("_T")
_K = TypeVar("_K")


def ask_all(
    whom: Mapping[_K, Endpoint], path: str, read: Callable[[str], _T], at_most: int, timeout_s: float
) -> dict[_K, _T | Unreachable]:
    """The answer of each at `path`: all of them within `timeout_s`, which the ones that have to wait share."""
    if not whom:
        return {}
    # At worst all are silent, and each place is taken so often.
    each_s = timeout_s / math.ceil(len(whom) / AT_ONCE)

    def ask(http: Endpoint) -> _T | Unreachable:
        try:
            return read(get(http, path, time.monotonic, each_s, at_most))
        except ConnectionRefusedError:
            return Unreachable.REFUSED
        except OSError:
            return Unreachable.SILENT
        except (NoAnswer, Invalid, RecordInvalid):
            return Unreachable.STRANGE

    with ThreadPoolExecutor(min(AT_ONCE, len(whom)), thread_name_prefix="ask") as pool:
        return dict(zip(whom, pool.map(ask, whom.values()), strict=True))


def ask_nodes(job: JobStatus, timeout_s: float) -> dict[str, NodeAnswer]:
    """The status of each node of the job, by incarnation."""
    homes = {member.incarnation: member.http for member in job.world.members} if job.world is not None else {}
    homes |= {node.incarnation: node.http for node in job.nodes}
    known = {incarnation: http for incarnation, http in homes.items() if http is not None}
    said = ask_all(known, STATUS_PATH, STATUS_PAGE.decode, MAX_STATUS_BYTES, timeout_s)
    answers: dict[str, NodeAnswer] = dict.fromkeys(homes, Unreachable.HIDDEN)
    for incarnation, answer in said.items():
        another = isinstance(answer, NodeStatus) and answer.incarnation != incarnation
        answers[incarnation] = Unreachable.REPLACED if another else answer
    return answers


class AgentsSource(Source):
    """Asks the agents that `find` names, anew each time; several of them may belong to one job.

    `here`: they were looked for on this machine, and not named by the operator.
    """

    def __init__(self, find: Callable[[], Iterable[Endpoint]], timeout_s: float, *, here: bool) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._here = here

    def jobs(self) -> list[Found]:
        agents = {http: http for http in self._find()}
        said = ask_all(agents, STATUS_PATH, STATUS_PAGE.decode, MAX_STATUS_BYTES, self._timeout_s)
        # One that was killed leaves its address for a moment.
        selves = {http: answer for http, answer in said.items() if answer is not Unreachable.REFUSED}
        if not selves:
            raise self._nobody(agents)
        able = {http: http for http, answer in selves.items() if isinstance(answer, NodeStatus)}
        views = ask_all(able, JOB_PATH, JobStatus.from_json, MAX_JOB_BYTES, self._timeout_s)
        found = [
            self._through_coordinator(Found(f"agent {http}", view, witness))
            for http in able
            if isinstance(witness := selves[http], NodeStatus) and isinstance(view := views[http], JobStatus)
        ]
        problems = [
            self._problem(http, answer) for http, answer in selves.items() if isinstance(answer, Unreachable)
        ]
        if not found:
            strange = Unreachable.STRANGE in (*selves.values(), *views.values())
            code = StatusCode.MISMATCH if strange else StatusCode.NO_ANSWER
            raise CannotShow(
                code, "; ".join(problems) or f"agent {next(iter(able))} does not answer {JOB_PATH}"
            )
        jobs = _each_job_once(found)
        return [replace(jobs[0], notes=tuple(problems)), *jobs[1:]]

    def _through_coordinator(self, found: Found) -> Found:
        """Only the coordinator knows all nodes."""
        view = found.job
        http = next((node.http for node in view.nodes if node.node == view.coordinator), None)
        if view.complete or http is None:
            return found
        said = ask_all({"": http}, JOB_PATH, JobStatus.from_json, MAX_JOB_BYTES, self._timeout_s)[""]
        better = isinstance(said, JobStatus) and said.complete and said.job == view.job
        return replace(found, job=said) if isinstance(said, JobStatus) and better else found

    def _nobody(self, agents: Iterable[Endpoint]) -> CannotShow:
        store = (
            "ask the store with the options that the agents have: --rdzv-endpoint HOST:PORT --rdzv-id NAME"
        )
        if self._here:
            return CannotShow(
                StatusCode.NO_AGENT,
                "no agent of this user runs on this machine. Ask one by the address in its log, --agent HOST:PORT; or "
                f"{store}",
            )
        return CannotShow(
            StatusCode.NO_ANSWER,
            f"no process listens at {', '.join(map(str, agents))}: the agent has ended, or its address is another. It "
            f"is in the agent's log, behind 'metrics, /healthz, /readyz and /node at'; or {store}",
        )

    def _problem(self, http: Endpoint, how: Unreachable) -> str:
        if how is Unreachable.STRANGE:
            advice = "check the address, and use this command in the agent's own version"
            return f"what answers at {http} is another program, or another version of elastic-agent: {advice}"
        waited = f"no answer within {self._timeout_s:g} s"
        return f"the agent at {http} gives {waited}: it stands still, or cannot be reached"


def _each_job_once(found: Iterable[Found]) -> list[Found]:
    """Agents of one job give the same answer: the one that knows most of it counts."""
    chosen: list[Found] = []
    told: set[str] = set()
    for one in sorted(found, key=lambda one: not one.job.complete):
        if one.witness is not None and one.witness.incarnation in told:
            continue
        chosen.append(one)
        told |= {node.incarnation for node in one.job.nodes}
        told |= (
            {member.incarnation for member in one.job.world.members} if one.job.world is not None else set()
        )
    return sorted(chosen, key=lambda one: (one.job.job, one.asked))


# --- The store


class StoreSource(Source):
    """Reads the job's keys once for each question; the connection stays."""

    def __init__(self, rendezvous: RendezvousConfig, timeout_s: float) -> None:
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._store: Store | None = None

    def jobs(self) -> list[Found]:
        try:
            if self._store is None:
                self._store = open_to_look(self._rendezvous, self._timeout_s)
            snapshot = self._store.read((WORLD_KEY, NODES_PREFIX))
        except StoreRefused as error:
            raise CannotShow(StatusCode.BAD_CONFIG, str(error)) from error
        except StoreMismatch as error:
            raise CannotShow(StatusCode.MISMATCH, str(error)) from error
        except StoreError as error:
            self._store = None
            raise CannotShow(StatusCode.NO_ANSWER, str(error)) from error
        return [self._found(snapshot.entries)]

    def _found(self, entries: Iterable[Entry]) -> Found:
        where = f"{self._rendezvous.backend} store {', '.join(map(str, self._rendezvous.endpoints))}"
        try:
            return found_in_store(where, self._rendezvous.job_id, entries)
        except RecordInvalid as error:
            raise CannotShow(StatusCode.MISMATCH, str(error)) from error


def found_in_store(where: str, job: str, entries: Iterable[Entry]) -> Found:
    """What the job's keys say. Raises RecordInvalid, and CannotShow when there are none."""
    world: World | None = None
    nodes: list[NodeRecord] = []
    notes = []
    for entry in sorted(entries, key=lambda entry: entry.create_revision):
        if entry.key == WORLD_KEY:
            world = World.from_json(entry.value)
            continue
        try:
            nodes.append(NodeRecord.from_json(entry.key, entry.value))
        except RecordInvalid as error:
            notes.append(f"the store's {error.key!r} cannot be read: {error.problem}")
    if world is None and not nodes and not notes:
        raise CannotShow(
            StatusCode.NO_JOB,
            f"the {where} holds nothing of a job {job!r}: check --rdzv-id (and the PREFIX of an etcd:// endpoint); a "
            "job is there from its first agent's start on",
        )
    coordinator = nodes[0].node if nodes else None
    return Found(where, JobStatus(job, world, tuple(nodes), coordinator, complete=True), None, tuple(notes))
