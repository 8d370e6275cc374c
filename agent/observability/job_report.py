"""The report of a job by `elastic-agent status`: one `JobReport`, made of the answers of its source and its nodes.

A pure function, and one plain form in JSON (`docs/status.md`). Ages are counted by the node that knows them; only
`silent_s`, for how long a node has not answered, is counted by the command while it watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from ...rendezvous.coordinator.exclusions import left_out
from ...rendezvous.coordinator.restarts import RestartPolicy
from ...rendezvous.coordinator.stragglers import in_force
from ...rendezvous.records import CauseKind, Endpoint, Member, NodeRecord, Phase, Restarts, Result, World
from ...rendezvous.statements.exclusion import Exclusion
from ...rendezvous.statements.paces import Straggler
from .membership import other_limits
from .sources import AT_ONCE, Found, NodeAnswer, Source, Unreachable, ask_nodes
from .status import Checkpoint, JobStatus, NodeStatus

SCHEMA = 1
"""Of the JSON form. It grows only by new keys; anything else makes a new number."""

_KEYS = (
    *("node", "incarnation", "member", "first_rank", "slots", "address", "state", "coordinates", "leaving"),
    *("excluded", "has_lease", "silence", "silent_s"),
)
_STATUS_KEYS = (
    *("generation", "workers", "running_s", "step", "step_age_s", "checkpoint", "lease_age_s", "lease_ttl_s"),
    *("waiting_for", "agent_age_s", "version", "notice", "notice_s", "checks", "partners_unreachable"),
)
"""The keys of a node in JSON: attributes of `NodeReport`, and of the node's own status."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One life of a node."""

    node: str
    incarnation: str
    slots: int
    first_rank: int | None
    """None for a node that is not a member of the world."""
    address: Endpoint | None
    coordinates: bool
    leaving: bool
    has_lease: bool | None
    """None when the source does not know."""
    silence: Unreachable | None
    silent_s: float | None
    status: NodeStatus | None
    """None exactly when it does not answer."""
    excluded: bool = False
    """The node is excluded: no world includes it until it is readmitted."""

    @property
    def member(self) -> bool:
        return self.first_rank is not None

    @property
    def state(self) -> str:
        """The state in its status, or: standby, excluded, lost, gone, no answer, hidden."""
        if self.status is not None:
            idle = self.first_rank is None and self.status.state == "joining"
            return ("excluded" if self.excluded else "standby") if idle else self.status.state
        assert self.silence is not None
        return "lost" if self.has_lease is False else self.silence.state

    @property
    def ranks(self) -> str:
        if self.first_rank is None:
            return ""
        last = self.first_rank + self.slots - 1
        return f"{self.first_rank}" if self.slots == 1 else f"{self.first_rank}-{last}"


@dataclass(frozen=True, slots=True)
class CauseReport:
    kind: CauseKind
    node: str | None
    rank: int | None
    text: str
    """A sentence that stands alone."""
    known_as: str | None = None
    """For a failure: the name of its cause in the table of causes."""


@dataclass(frozen=True, slots=True)
class RestartReport:
    failures: int
    fruitless: int
    """Failures in a row without progress."""
    limit: int | None
    """--max-restarts; None without a limit, and when it is not known."""
    limit_known: bool
    left: int | None
    fruitless_left: int | None
    """Without a limit: how many more in a row the job survives without progress."""
    backoff_s: float


@dataclass(frozen=True, slots=True)
class JobReport:
    """Its fields are the keys of the JSON form."""

    job: str
    asked: str
    state: str
    """waiting, running, stopping, stopped, succeeded or failed."""
    generation: int
    """0 before the first."""
    phase_age_s: float | None
    """Since when the world is in its present phase."""
    world_size: int
    group_world_size: int
    master: Endpoint | None
    result: Result | None
    cause: CauseReport | None
    restarts: RestartReport
    step: int
    checkpoint: Checkpoint | None
    coordinator: str | None
    waiting_for: str
    complete: bool
    """`nodes` holds every node of the job."""
    nodes: tuple[NodeReport, ...]
    """Members by rank, then the others, oldest first."""
    exclusions: tuple[Exclusion, ...]
    """In force or over, the oldest first."""
    usual_us: int | None = None
    """The median over all ranks of their own time for a step; None: not known."""
    stragglers: tuple[Straggler, ...] = ()
    """Ranks that are slower than the others, by rank."""
    notes: tuple[str, ...] = ()
    """Problems that no other field shows."""


def as_json(value: Any) -> Any:
    """What json writes of a report, or of a part of one."""
    match value:
        case float():
            return round(value, 3)
        case Unreachable():
            return value.word
        case Enum():
            return value.value
        case Endpoint():
            return str(value)
        case tuple():
            return [as_json(item) for item in value]
        case NodeReport():
            status = {key: as_json(getattr(value.status, key, None)) for key in _STATUS_KEYS}
            return {name: as_json(getattr(value, name)) for name in _KEYS} | status
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    return value


def report(found: Found, answers: Mapping[str, NodeAnswer], silent_for: Mapping[str, float]) -> JobReport:
    """`answers` and `silent_for` (seconds) are by incarnation."""
    job, world = found.job, found.job.world
    nodes = tuple(_nodes(found, answers, silent_for))
    statuses = [node.status for node in nodes if node.status is not None]
    leading = next((status for status in statuses if status.coordinates), None)
    best = leading or found.agent or next(iter(statuses), None)
    state = _state(world, nodes)
    step = max([status.step for status in statuses], default=0) or _written_step(job)
    comparison = in_force(next((node for node in job.nodes if node.node == job.coordinator), None), world)
    return JobReport(
        job=job.job,
        asked=found.asked,
        state=state,
        generation=world.generation if world is not None else 0,
        phase_age_s=_phase_age(world, statuses),
        world_size=world.size if world is not None else 0,
        group_world_size=len(world.members) if world is not None else 0,
        master=world.master if world is not None else None,
        result=world.result if world is not None else None,
        cause=_cause(world) if world is not None else None,
        restarts=_restarts(world, best),
        step=step,
        checkpoint=_newest(status.checkpoint for status in statuses),
        coordinator=job.coordinator,
        waiting_for=best.waiting_for
        if best is not None and state in ("waiting", "stopping", "stopped")
        else "",
        complete=job.complete,
        nodes=nodes,
        exclusions=world.exclusions if world is not None else (),
        usual_us=comparison.usual_us if comparison is not None else None,
        stragglers=comparison.stragglers if comparison is not None else (),
        notes=(*found.notes, *_differences(job), *_unreported(step, statuses)),
    )


def _differences(job: JobStatus) -> Iterable[str]:
    """Nodes that were started with other limits than the job has."""
    world = job.world
    return other_limits(world, job.nodes) if world is not None and world.phase is not Phase.ENDED else ()


def _unreported(step: int, statuses: Iterable[NodeStatus]) -> Iterable[str]:
    if not step and any(status.state == "running" for status in statuses):
        yield (
            "no steps reported: call elastic_agent.worker.step() once a step, to see steps, their rate and how long "
            "training stood still (docs/worker.md)"
        )


def _nodes(
    found: Found, answers: Mapping[str, NodeAnswer], silent_for: Mapping[str, float]
) -> Iterable[NodeReport]:
    job, world, asked = found.job, found.job.world, found.agent
    records = {record.incarnation: record for record in job.nodes}
    members = world.members if world is not None and world.phase is not Phase.ENDED else ()
    excluded = left_out(world.exclusions) if world is not None and world.phase is not Phase.ENDED else {}

    def node(of: Member | NodeRecord, first_rank: int | None) -> NodeReport:
        record, answer = records.get(of.incarnation), answers.get(of.incarnation, Unreachable.HIDDEN)
        if isinstance(answer, Unreachable) and asked is not None and asked.incarnation == of.incarnation:
            answer = asked
        silence = answer if isinstance(answer, Unreachable) else None
        return NodeReport(
            node=of.node,
            incarnation=of.incarnation,
            slots=of.slots,
            first_rank=first_rank,
            address=record.http if record is not None else of.http,
            coordinates=record is not None and record.node == job.coordinator,
            leaving=record is not None and record.leaving,
            has_lease=True if record is not None else (False if job.complete else None),
            silence=silence,
            silent_s=silent_for.get(of.incarnation) if silence is not None else None,
            status=answer if isinstance(answer, NodeStatus) else None,
            excluded=of.node in excluded,
        )

    yield from (node(member, member.first_rank) for member in members)
    inside = {member.incarnation for member in members}
    yield from (node(record, None) for record in job.nodes if record.incarnation not in inside)
    if asked is not None and asked.incarnation not in inside | records.keys():
        yield NodeReport(asked.node, asked.incarnation, 0, None, None, False, False, None, None, None, asked)


def _state(world: World | None, nodes: Iterable[NodeReport]) -> str:
    """The phase of the world, unless no member has a worker: then it waits, or has lost its store."""
    if world is None:
        return "waiting"
    if world.phase is Phase.ENDED:
        return "succeeded" if world.result is Result.SUCCEEDED else "failed"
    nodes = list(nodes)
    statuses = [node.status for node in nodes if node.status is not None]
    gone = all(node.status is not None or node.state in ("gone", "lost") for node in nodes if node.member)
    known = gone if world.trains else bool(statuses)
    if not known or any(status.workers for status in statuses):
        return "running" if world.trains else "stopping"
    confirmed = any(s.lease_age_s is not None and s.lease_age_s <= s.lease_ttl_s for s in statuses)
    return "waiting" if confirmed else "stopped"


def _phase_age(world: World | None, statuses: Iterable[NodeStatus]) -> float | None:
    """As the node counts it that has known of the phase longest."""
    if world is None:
        return None
    now = (world.generation, world.phase.value)
    ages = [status.phase_s for status in statuses if (status.world, status.phase) == now]
    return max((age for age in ages if age is not None), default=None)


def _cause(world: World) -> CauseReport:
    cause, worker = world.cause, world.cause.failure
    if cause.kind is CauseKind.START:
        text = "the job started"
    elif worker is not None and worker.local_rank is not None:
        text = f"rank {worker.rank} on node {cause.node} failed in generation {worker.generation}: {worker.summary}"
    elif cause.kind is CauseKind.FAILURE:
        text = f"node {cause.node} failed: {cause.detail}"
    else:
        text = cause.detail
    rank = cause.failure.rank if cause.failure is not None else None
    known_as = cause.failure.cause if cause.kind is CauseKind.FAILURE and cause.failure is not None else None
    return CauseReport(cause.kind, cause.node or None, rank, text, known_as)


def _restarts(world: World | None, best: NodeStatus | None) -> RestartReport:
    used = world.restarts if world is not None else Restarts()
    known = best is not None
    limit = best.max_restarts if best is not None else None
    if known and world is not None:
        limit = world.max_restarts(limit)
    return RestartReport(
        failures=used.failures,
        fruitless=used.without_progress,
        limit=limit,
        limit_known=known,
        left=max(0, limit - used.failures) if limit is not None else None,
        fruitless_left=max(0, RestartPolicy().max_without_progress - used.without_progress)
        if known and limit is None
        else None,
        backoff_s=best.backoff_s if best is not None else 0.0,
    )


def _written_step(job: JobStatus) -> int:
    """The newest step in the store, where steps are written only together with other changes."""
    steps = [node.step for node in job.nodes] + ([job.world.step] if job.world is not None else [])
    return max(steps, default=0)


def _newest(checkpoints: Iterable[Checkpoint | None]) -> Checkpoint | None:
    """Of one that several know, its age: only the node that saved it knows it."""
    known = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    if not known:
        return None
    step = max(checkpoint.step for checkpoint in known)
    ages = [checkpoint.age_s for checkpoint in known if checkpoint.step == step]
    return Checkpoint(step, min((age for age in ages if age is not None), default=None))


class Watch:
    """Asks a source for the job and its nodes for their states, and remembers since when a node has not answered."""

    def __init__(
        self, source: Source, timeout_s: float, clock: Callable[[], float], at_once: int = AT_ONCE
    ) -> None:
        """`at_once`: how many threads ask nodes."""
        self._source = source
        self._timeout_s = timeout_s
        self._clock = clock
        self._at_once = at_once
        self.silent: tuple[str, ...] = ()
        """Which agents gave the source no answer at the last look, in words."""
        self._silent_since: dict[str, float] = {}

    def look(self) -> list[JobReport]:
        """Raises CannotShow."""
        jobs = [
            (found, ask_nodes(found.job, self._timeout_s, self._at_once)) for found in self._source.jobs()
        ]
        self.silent = self._source.silent
        now = self._clock()
        silent = {
            incarnation
            for _, answers in jobs
            for incarnation, answer in answers.items()
            if isinstance(answer, Unreachable)
        }
        self._silent_since = {one: self._silent_since.get(one, now) for one in silent}
        silent_for = {one: now - since for one, since in self._silent_since.items() if since < now}
        return [report(found, answers, silent_for) for found, answers in jobs]
