"""What is told of a job by `elastic-agent status`: one `JobReport`, made of what the door and the nodes have said.

A pure function, and one plain form in JSON (`docs/status.md`). Ages are those that whoever knows has counted; only
`silent_s`, for how long a node has not answered, is counted by the command itself while it watches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...health.checks import told_otherwise
from ...rendezvous import blame
from ...rendezvous.records import CauseKind, Endpoint, Member, NodeRecord, Phase, Restarts, Result, World
from ...rendezvous.restarts import RestartPolicy
from .doors import Answer, Found, Silence
from .pages import Checkpoint, JobStatus, NodeStatus, worker_failure

SCHEMA = 1
"""Of the JSON form. It grows only by new keys; anything else makes a new number."""

_ABSENT = {
    Silence.REFUSED: "gone",
    Silence.REPLACED: "gone",
    Silence.SILENT: "no answer",
    Silence.STRANGE: "no answer",
    Silence.HIDDEN: "hidden",
}


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One life of a node."""

    node: str
    incarnation: str
    slots: int
    first_rank: int | None
    """None for a node that is not a member of the world."""
    http: Endpoint | None
    coordinates: bool
    leaving: bool
    has_lease: bool | None
    """The store counts it as there; None when that was not told."""
    silence: Silence | None
    silent_s: float | None
    status: NodeStatus | None
    """What it says of itself; None exactly when it is silent."""

    @property
    def state(self) -> str:
        """Its own word for its state, or: standby, lost, gone, no answer, hidden."""
        if self.status is not None:
            idle = self.first_rank is None and self.status.state == "joining"
            return "standby" if idle else self.status.state
        assert self.silence is not None
        return "lost" if self.has_lease is False else _ABSENT[self.silence]

    @property
    def missing(self) -> bool:
        """It should answer, and does not."""
        return self.silence not in (None, Silence.HIDDEN)

    @property
    def ranks(self) -> str:
        if self.first_rank is None:
            return ""
        last = self.first_rank + self.slots - 1
        return f"{self.first_rank}" if self.slots == 1 else f"{self.first_rank}-{last}"


@dataclass(frozen=True, slots=True)
class CauseReport:
    kind: CauseKind
    node: str
    rank: int | None
    text: str
    """A sentence that stands alone."""


@dataclass(frozen=True, slots=True)
class RestartReport:
    failures: int
    fruitless: int
    """Failures in a row without progress."""
    limit: int | None = None
    """--max-restarts; None without a limit, and when `known` is false."""
    known: bool = False
    """An agent has told what the limit is."""
    backoff_s: float = 0.0

    @property
    def left(self) -> int | None:
        return max(0, self.limit - self.failures) if self.limit is not None else None

    @property
    def fruitless_left(self) -> int | None:
        """Without a limit: how many more in a row the job survives without progress."""
        auto = self.known and self.limit is None
        return max(0, RestartPolicy().max_fruitless - self.fruitless) if auto else None


@dataclass(frozen=True, slots=True)
class JobReport:
    job: str
    asked: str
    state: str
    """waiting, running, stopping, succeeded or failed."""
    generation: int
    """0 before the first."""
    phase_s: float | None
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
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "asked": self.asked,
            "state": self.state,
            "generation": self.generation,
            "phase_age_s": _rounded(self.phase_s),
            "world_size": self.world_size,
            "group_world_size": self.group_world_size,
            "master": str(self.master) if self.master is not None else None,
            "result": self.result.value if self.result is not None else None,
            "cause": _cause_json(self.cause),
            "restarts": {
                "failures": self.restarts.failures,
                "fruitless": self.restarts.fruitless,
                "limit": self.restarts.limit,
                "limit_known": self.restarts.known,
                "left": self.restarts.left,
                "fruitless_left": self.restarts.fruitless_left,
                "backoff_s": _rounded(self.restarts.backoff_s),
            },
            "step": self.step,
            "checkpoint": _checkpoint_json(self.checkpoint),
            "coordinator": self.coordinator,
            "waiting_for": self.waiting_for,
            "complete": self.complete,
            "nodes": [_node_json(node) for node in self.nodes],
            "notes": list(self.notes),
        }


def report(found: Found, answers: Mapping[str, Answer], silent_for: Mapping[str, float]) -> JobReport:
    """`answers` and `silent_for` (seconds) are by incarnation."""
    job, world = found.job, found.job.world
    nodes = tuple(_nodes(found, answers, silent_for))
    told = [node.status for node in nodes if node.status is not None]
    leading = next((status for status in told if status.coordinates), None)
    spokesman = leading or found.witness or next(iter(told), None)
    state = _state(world, told)
    return JobReport(
        job=job.job,
        asked=found.asked,
        state=state,
        generation=world.generation if world is not None else 0,
        phase_s=_phase_age(world, told),
        world_size=world.size if world is not None else 0,
        group_world_size=len(world.members) if world is not None else 0,
        master=world.master if world is not None else None,
        result=world.result if world is not None else None,
        cause=_cause(world) if world is not None else None,
        restarts=_restarts(world, spokesman),
        step=max([status.step for status in told], default=0) or _written_step(job),
        checkpoint=_newest(status.checkpoint for status in told),
        coordinator=job.coordinator,
        waiting_for=spokesman.waiting_for
        if spokesman is not None and state in ("waiting", "stopping")
        else "",
        complete=job.complete,
        nodes=nodes,
        notes=(*found.notes, *_differences(job)),
    )


def _differences(job: JobStatus) -> Iterable[str]:
    """Whom the world leaves out, and who was told something else than the job goes by."""
    world = job.world
    if world is None or world.phase is Phase.ENDED:
        return
    for one in world.aside:
        yield f"node {one.node} is {blame.in_words(one)}"
    yield from told_otherwise(world, job.nodes)


def _nodes(
    found: Found, answers: Mapping[str, Answer], silent_for: Mapping[str, float]
) -> Iterable[NodeReport]:
    job, world, witness = found.job, found.job.world, found.witness
    records = {record.incarnation: record for record in job.nodes}
    members = world.members if world is not None and world.phase is not Phase.ENDED else ()

    def node(of: Member | NodeRecord, first_rank: int | None) -> NodeReport:
        record, answer = records.get(of.incarnation), answers.get(of.incarnation, Silence.HIDDEN)
        if isinstance(answer, Silence) and witness is not None and witness.incarnation == of.incarnation:
            answer = witness
        status = answer if isinstance(answer, NodeStatus) else None
        return NodeReport(
            node=of.node,
            incarnation=of.incarnation,
            slots=of.slots,
            first_rank=first_rank,
            http=record.http if record is not None else of.http,
            coordinates=record is not None and record.node == job.coordinator,
            leaving=record is not None and record.leaving,
            has_lease=True if record is not None else (False if job.complete else None),
            silence=answer if isinstance(answer, Silence) else None,
            silent_s=silent_for.get(of.incarnation) if status is None else None,
            status=status,
        )

    yield from (node(member, member.first_rank) for member in members)
    inside = {member.incarnation for member in members}
    yield from (node(record, None) for record in job.nodes if record.incarnation not in inside)
    if witness is not None and witness.incarnation not in inside | records.keys():
        yield NodeReport(
            witness.node, witness.incarnation, 0, None, None, False, False, None, None, None, witness
        )


def _state(world: World | None, told: Iterable[NodeStatus]) -> str:
    if world is None:
        return "waiting"
    if world.phase is Phase.ENDED:
        return "succeeded" if world.result is Result.SUCCEEDED else "failed"
    if world.trains:
        return "running"
    told = list(told)
    return "waiting" if told and not any(status.workers for status in told) else "stopping"


def _phase_age(world: World | None, told: Iterable[NodeStatus]) -> float | None:
    """Whoever has known of it longest comes nearest."""
    if world is None:
        return None
    now = (world.generation, world.phase.value)
    ages = [status.phase_s for status in told if (status.world, status.phase) == now]
    return max((age for age in ages if age is not None), default=None)


def _cause(world: World) -> CauseReport:
    cause, worker = world.cause, worker_failure(world)
    if cause.kind is CauseKind.START:
        text = "the job started"
    elif worker is not None:
        text = f"rank {worker.rank} on node {cause.node} failed in generation {worker.generation}: {worker.cause}"
    elif cause.kind is CauseKind.FAILURE:
        text = f"node {cause.node} failed: {cause.detail}"
    else:
        text = cause.detail
    return CauseReport(cause.kind, cause.node, worker.rank if worker is not None else None, text)


def _restarts(world: World | None, spokesman: NodeStatus | None) -> RestartReport:
    used = world.restarts if world is not None else Restarts()
    if spokesman is None:
        return RestartReport(used.failures, used.fruitless)
    limit = spokesman.max_restarts if world is None else world.max_restarts(spokesman.max_restarts)
    backoff_s = spokesman.backoff_s
    return RestartReport(used.failures, used.fruitless, limit, known=True, backoff_s=backoff_s)


def _written_step(job: JobStatus) -> int:
    """What the store says, where steps are written only together with other changes."""
    steps = [node.step for node in job.nodes] + ([job.world.step] if job.world is not None else [])
    return max(steps, default=0)


def _newest(checkpoints: Iterable[Checkpoint | None]) -> Checkpoint | None:
    """Of one that several know, its age: only the node that saved it can tell."""
    known = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    if not known:
        return None
    step = max(checkpoint.step for checkpoint in known)
    ages = [checkpoint.age_s for checkpoint in known if checkpoint.step == step]
    return Checkpoint(step, min((age for age in ages if age is not None), default=None))


# --- The JSON form


def _node_json(node: NodeReport) -> dict[str, Any]:
    status = node.status
    return {
        "node": node.node,
        "incarnation": node.incarnation,
        "member": node.first_rank is not None,
        "first_rank": node.first_rank,
        "slots": node.slots,
        "address": str(node.http) if node.http is not None else None,
        "state": node.state,
        "coordinates": node.coordinates,
        "leaving": node.leaving,
        "has_lease": node.has_lease,
        "silence": node.silence.value if node.silence is not None else None,
        "silent_s": _rounded(node.silent_s),
        "generation": status.generation if status is not None else None,
        "workers": status.workers if status is not None else None,
        "running_s": _rounded(status.running_s) if status is not None else None,
        "step": status.step if status is not None else None,
        "step_age_s": _rounded(status.step_s) if status is not None else None,
        "checkpoint": _checkpoint_json(status.checkpoint) if status is not None else None,
        "lease_age_s": _rounded(status.lease_s) if status is not None else None,
        "lease_ttl_s": status.lease_ttl_s if status is not None else None,
        "waiting_for": status.waiting_for if status is not None else None,
        "agent_age_s": _rounded(status.up_s) if status is not None else None,
        "version": status.version if status is not None else None,
    }


def _cause_json(cause: CauseReport | None) -> dict[str, Any] | None:
    if cause is None:
        return None
    return {"kind": cause.kind.value, "node": cause.node or None, "rank": cause.rank, "text": cause.text}


def _checkpoint_json(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    return {"step": checkpoint.step, "age_s": _rounded(checkpoint.age_s)}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
