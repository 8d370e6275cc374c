"""The sources of `elastic-agent status`: an agent, the agents on this machine, or the store.

A source lists the nodes. Each node then answers what only it knows, over HTTP, many at once and in bounded time.
Nothing is written and no lease is taken. A source may be asked again and again."""

from __future__ import annotations

import enum
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

from ...codec import Document, Invalid
from ...rendezvous.errors import RecordInvalid, StoreError, StoreMismatch, StoreRefused
from ...rendezvous.records import NODES_PREFIX, WORLD_KEY, Endpoint, NodeRecord, World
from ...rendezvous.store.interface import Entry
from ..common.exits import CannotDo, ExitCode
from ..common.http_client import NoAnswer, get
from ..configuration.rendezvous import RendezvousConfig
from ..rendezvous_io.store_opening import open_to_look
from .status import JOB_PAGE, JOB_PATH, STATUS_PAGE, STATUS_PATH, JobStatus, NodeStatus

AT_ONCE = 128
"""Questions under way, each in a thread of its own."""


class Unreachable(enum.Enum):
    """Why there is no answer of an agent: a word, the state of its node, and a sentence for a person."""

    REFUSED = "refused", "gone", "no process of it listens at {http}: its agent has ended"
    SILENT = "silent", "no answer", "no answer from {http}: it stands still, or cannot be reached from here"
    STRANGE = (
        "strange",
        "no answer",
        "what answers at {http} is another program, or another version of elastic-agent",
    )
    HIDDEN = "hidden", "hidden", "it has published no address: it listens on its own loopback"

    def __init__(self, word: str, state: str, sentence: str) -> None:
        self.word = word
        self.state = state
        self.sentence = sentence


NodeAnswer: TypeAlias = NodeStatus | Unreachable


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job, and the source that knows it."""

    asked: str
    job: JobStatus
    notes: tuple[str, ...] = ()
    """Further problems, in words."""


class JobSource(ABC):
    """May be read again and again."""

    silent: tuple[str, ...] = ()
    """Which agents gave no answer at the last look, in words: of which job they are is not known."""

    @abstractmethod
    def jobs(self) -> list[FoundJob]:
        """At least one. Raises CannotDo."""


# --- Agents


_T = TypeVar("_T")
_K = TypeVar("_K")


def ask(
    http: Endpoint, path: str, read: Callable[[str], _T], timeout_s: float, most_chars: int
) -> _T | Unreachable:
    """What `read`, which may raise Invalid, makes of the agent's answer at `path`."""
    try:
        return read(get(http, path, time.monotonic, timeout_s, most_chars))
    except ConnectionRefusedError:
        return Unreachable.REFUSED
    except OSError:
        return Unreachable.SILENT
    except (NoAnswer, Invalid):
        return Unreachable.STRANGE


def ask_all(
    agents: Mapping[_K, Endpoint], path: str, page: Document[_T], timeout_s: float, at_once: int = AT_ONCE
) -> dict[_K, _T | Unreachable]:
    """The answer of each at `path`, all of them within `timeout_s`."""
    if not agents:
        return {}
    # If all are silent, each thread waits for so many in turn.
    each_s = timeout_s / math.ceil(len(agents) / at_once)
    asked = partial(ask, path=path, read=page.decode, timeout_s=each_s, most_chars=page.most_chars)
    with ThreadPoolExecutor(min(at_once, len(agents)), thread_name_prefix="ask") as pool:
        return dict(zip(agents, pool.map(asked, agents.values()), strict=True))


def ask_nodes(job: JobStatus, timeout_s: float, at_once: int = AT_ONCE) -> dict[str, NodeAnswer]:
    """The status of each node of the job, by incarnation."""
    members = job.world.members if job.world is not None else ()
    addresses = {member.incarnation: member.http for member in members}
    addresses |= {node.incarnation: node.http for node in job.nodes}
    known = {incarnation: http for incarnation, http in addresses.items() if http is not None}
    answers: dict[str, NodeAnswer] = dict.fromkeys(addresses, Unreachable.HIDDEN)
    for incarnation, answer in ask_all(known, STATUS_PATH, STATUS_PAGE, timeout_s, at_once).items():
        another = isinstance(answer, NodeStatus) and answer.incarnation != incarnation
        answers[incarnation] = Unreachable.REFUSED if another else answer
    return answers


class AgentsSource(JobSource):
    """Asks the agents that `find` names, anew each time; several of them may belong to one job.

    `here`: they were looked for on this machine, and not named by the operator. `job`: only of this one; None: of all.
    `otherwise`: where the store is that is asked when there is none; None: nowhere.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Endpoint]],
        timeout_s: float,
        *,
        here: bool,
        job: str | None = None,
        otherwise: Callable[[], RendezvousConfig | None] = lambda: None,
    ) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._here = here
        self._job = job
        self._otherwise = otherwise

    def jobs(self) -> list[FoundJob]:
        try:
            return self._of_agents()
        except CannotDo as nothing:
            place = self._otherwise() if nothing.code is ExitCode.NOT_FOUND else None
            if place is None:
                raise
            try:
                return StoreSource(place, self._timeout_s).jobs()
            except CannotDo as error:
                raise CannotDo(error.code, f"{nothing}; {error}") from None

    def _of_agents(self) -> list[FoundJob]:
        agents = {http: http for http in self._find()}
        answers = ask_all(agents, JOB_PATH, JOB_PAGE, self._timeout_s)
        # The address of a killed agent stays for a moment.
        alive = {http: answer for http, answer in answers.items() if answer is not Unreachable.REFUSED}
        if not alive and self._job is None:
            raise self._no_agent(agents)
        found = [
            self._through_coordinator(FoundJob(f"agent {http}", view))
            for http, view in alive.items()
            if isinstance(view, JobStatus)
        ]
        problems = [
            problem(http, how, self._timeout_s) for http, how in alive.items() if isinstance(how, Unreachable)
        ]
        if self._job is not None:
            found = [one for one in found if one.job.job == self._job]
            if not found:
                nothing = f"no agent of job {self._job} answers on this machine"
                raise CannotDo(ExitCode.NOT_FOUND, "; ".join((nothing, *problems)))
        if not found:
            strange = Unreachable.STRANGE in alive.values()
            raise CannotDo(ExitCode.MISMATCH if strange else ExitCode.NO_ANSWER, "; ".join(problems))
        self.silent = tuple(problems)
        return _each_job_once(found)

    def _through_coordinator(self, found: FoundJob) -> FoundJob:
        """Only the coordinator knows all nodes."""
        view = found.job
        http = next((node.http for node in view.nodes if node.node == view.coordinator), None)
        if view.complete or http is None:
            return found
        job = ask_all({"": http}, JOB_PATH, JOB_PAGE, self._timeout_s)[""]
        if isinstance(job, JobStatus) and job.complete and job.job == view.job:
            return replace(found, job=replace(job, agent=view.agent))
        return found

    def _no_agent(self, agents: Iterable[Endpoint]) -> CannotDo:
        code, what = ExitCode.NOT_FOUND, "no agent of this user runs on this machine"
        if not self._here:
            code, what = ExitCode.NO_ANSWER, f"no process listens at {', '.join(map(str, agents))}"
        return CannotDo(
            code,
            f"{what}. Ask an agent by the address in its log, --agent HOST:PORT, or the store with the options that "
            "the agents have: --rdzv-endpoint HOST:PORT --rdzv-id NAME",
        )


def problem(http: Endpoint, how: Unreachable, waited_s: float) -> str:
    """Of an agent that did not answer."""
    if how is Unreachable.STRANGE:
        advice = "check the address, and use this command in the agent's own version"
        return f"{how.sentence.format(http=http)}: {advice}"
    return f"the agent at {http} gives no answer within {waited_s:g} s: it stands still, or cannot be reached"


def _each_job_once(found: Iterable[FoundJob]) -> list[FoundJob]:
    """Agents of one job give the same answer: the most complete one counts."""
    chosen: list[FoundJob] = []
    covered: set[str] = set()
    for one in sorted(found, key=lambda one: not one.job.complete):
        if one.job.agent is not None and one.job.agent.incarnation in covered:
            continue
        chosen.append(one)
        members = one.job.world.members if one.job.world is not None else ()
        covered.update(node.incarnation for node in one.job.nodes)
        covered.update(member.incarnation for member in members)
    return sorted(chosen, key=lambda one: (one.job.job, one.asked))


# --- The store


class StoreSource(JobSource):
    def __init__(self, rendezvous: RendezvousConfig, timeout_s: float) -> None:
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s

    def jobs(self) -> list[FoundJob]:
        try:
            with closing(open_to_look(self._rendezvous, self._timeout_s)) as store:
                snapshot = store.read((WORLD_KEY, NODES_PREFIX))
        except StoreRefused as error:
            raise CannotDo(ExitCode.BAD_CONFIG, str(error)) from error
        except StoreMismatch as error:
            raise CannotDo(ExitCode.MISMATCH, str(error)) from error
        except StoreError as error:
            raise CannotDo(ExitCode.NO_ANSWER, str(error)) from error
        return [self._found(snapshot.entries)]

    def _found(self, entries: Iterable[Entry]) -> FoundJob:
        place = ", ".join(map(str, self._rendezvous.endpoints)) or self._rendezvous.folder
        where = f"{self._rendezvous.backend} store {place}"
        try:
            return found_in_store(where, self._rendezvous.job_id, entries)
        except RecordInvalid as error:
            raise CannotDo(ExitCode.MISMATCH, str(error)) from error


def found_in_store(where: str, job: str, entries: Iterable[Entry]) -> FoundJob:
    """The content of the job's keys. Raises RecordInvalid, and CannotDo when there are none."""
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
        raise CannotDo(
            ExitCode.NO_JOB,
            f"the {where} holds nothing of a job {job!r}: check --rdzv-id (and the PREFIX of an etcd:// endpoint); a "
            "job is there from its first agent's start on",
        )
    coordinator = nodes[0].node if nodes else None
    return FoundJob(where, JobStatus(job, world, tuple(nodes), coordinator, complete=True), tuple(notes))
