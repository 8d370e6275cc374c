"""The pages of an agent for operators: `/status`, its own part, and `/job`, what it knows of all nodes.

`elastic-agent status` reads `/job` of one agent, which names all nodes, and then `/status` of each node: only a node
itself knows the age of its lease and its checkpoint, and counts it when it answers. A reader bounds the size of a page,
checks every field, cleans the texts, and refuses any other version.

The pages hold what nodes write to the store anyway, without the traceback and the output of a failed worker, and of the
configuration only --max-restarts and --lease-ttl. In the texts of failures secrets are masked as in the journal: more
people read these pages than the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ...codec import AtMost, Count, Document, Seconds, Within
from ...health.checks.finding import Finding, Outcome, worst_first
from ...rendezvous.node.snapshot import NodeSnapshot
from ...rendezvous.records import MAX_EXCEPTION, MAX_RECORD_BYTES, MAX_TEXT, Failure, NodeRecord, Phase, World
from ...rendezvous.statements.exclusion import MAX_EXCLUSION_REASON
from ...rendezvous.text import Name, line
from ...worker.wire.messages import MOST_PARTNERS, ReplicationReport, Report, SaveReport
from ..output.masking import masked
from ..workers.processes.workers import WorkerGroup

STATUS_PATH = "/status"
JOB_PATH = "/job"
SCHEMA = 8
"""Version of both pages."""

MAX_STATUS_BYTES = 64 * 1024
MAX_JOB_BYTES = 8 * MAX_RECORD_BYTES
"""As many nodes as fit into a world, each with its record."""

MOST_CHECKS = 32
MAX_CHECK_TEXT = 512


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: Count
    age_s: Seconds | None
    """None when workers of this node have loaded it, and another agent knows when it was saved."""


@dataclass(frozen=True, slots=True)
class CheckStatus:
    """A check of the node before it joined that failed or warned."""

    check: Name
    outcome: Annotated[str, line(16)]
    summary: Annotated[str, line(MAX_CHECK_TEXT)]
    advice: Annotated[str, line(MAX_CHECK_TEXT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The status of one agent, of itself. Ages are None where nothing has happened yet."""

    job: Name
    node: Name
    incarnation: Name
    version: Annotated[str, line(64)]
    agent_age_s: Seconds
    """Age of this agent."""
    state: Name
    """A state of the metric elastic_agent_state."""
    waiting_for: Annotated[str, line(MAX_TEXT)]
    """Empty while its workers run."""
    coordinates: bool
    world: Count
    """The generation of the world that it knows; 0 when there is none."""
    phase: Annotated[str, line(16)]
    """Its phase; empty when there is none."""
    phase_s: Seconds | None
    """Since when it has known of this phase."""
    generation: Count
    """The generation whose workers are on this node; 0 when there are none."""
    workers: Annotated[int, Within(0, 4096)]
    """How many of them are alive."""
    running_s: Seconds | None
    """Age of these workers."""
    step: Count
    step_age_s: Seconds | None
    checkpoint: Checkpoint | None
    """The newest on disk."""
    memory: Checkpoint | None
    """The newest in this node's memory."""
    replica: Checkpoint | None
    """The newest of this node's shards in the memory of its partners."""
    lease_age_s: Seconds | None
    """Age of the newest confirmation of its lease; None without a lease."""
    lease_ttl_s: Seconds
    max_restarts: Count | None
    backoff_s: Seconds
    notice: Annotated[str, line(MAX_TEXT)]
    """Who says that this machine goes away; empty: it stays."""
    notice_s: Seconds | None
    """What is left of it then."""
    checks: Annotated[tuple[CheckStatus, ...], AtMost(MOST_CHECKS)]
    """The worst first; none where all is well or nothing was checked."""
    partners_unreachable: Annotated[tuple[Name, ...], AtMost(MOST_PARTNERS)]
    """The nodes that should keep replicas of its shards and do not take them now."""


STATUS_PAGE = Document(NodeStatus, SCHEMA, MAX_STATUS_BYTES)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Which nodes a job has, as one agent or the store knows it."""

    job: Name
    world: World | None
    nodes: tuple[NodeRecord, ...]
    """Oldest first."""
    coordinator: Name | None
    complete: bool
    """`nodes` holds every node that has a lease."""


JOB_PAGE = Document(JobStatus, SCHEMA, MAX_JOB_BYTES)


def job_page(job: JobStatus, secrets: Collection[str] = ()) -> str:
    """Without the output of failed workers, which stays in the store, and without the values `secrets`."""
    nodes = tuple(replace(node, failure=None) for node in job.nodes)
    world = _shown(job.world, secrets) if job.world is not None else None
    return JOB_PAGE.encode(replace(job, world=world, nodes=nodes))


def _shown(world: World, secrets: Collection[str]) -> World:
    """A fingerprint is a failure's text in another form, which nobody reads here."""
    cause = replace(world.cause, detail=_masked(world.cause.detail, MAX_TEXT, secrets))
    if cause.failure is not None:
        failure = replace(
            cause.failure,
            fingerprint="",
            summary=_masked(cause.failure.summary, MAX_TEXT, secrets),
            exception=_masked(cause.failure.exception or "", MAX_EXCEPTION, secrets) or None,
            traceback=None,
            log_tail=(),
            log_file=None,
        )
        cause = replace(cause, failure=failure)
    exclusions = tuple(
        replace(one, reason=_masked(one.reason, MAX_EXCLUSION_REASON, secrets)) for one in world.exclusions
    )
    return replace(
        world, cause=cause, restarts=replace(world.restarts, fingerprint=""), exclusions=exclusions
    )


def _masked(text: str, most_chars: int, secrets: Collection[str]) -> str:
    return masked(text, secrets)[:most_chars]


@dataclass(frozen=True, slots=True)
class _Saved:
    step: int
    at: float | None
    """Monotonic. None: another agent knows."""

    def seen(self, now: float) -> Checkpoint:
        return Checkpoint(self.step, max(0.0, now - self.at) if self.at is not None else None)


class StatusPages:
    """Updated by the main loop through the observer; any thread may ask for a page."""

    def __init__(
        self,
        job: str,
        node: str,
        incarnation: str,
        version: str,
        *,
        lease_ttl_s: float,
        max_restarts: int | None,
        clock: Callable[[], float],
        secrets: Collection[str] = (),
    ) -> None:
        """`secrets` are known values, which no page has."""
        self._job_name, self._version = job, version
        self._secrets = secrets
        self._lease_ttl_s, self._max_restarts = lease_ttl_s, max_restarts
        self._clock = clock
        self._lock = threading.Lock()
        """Of all that follows. Instants are monotonic."""
        self._snapshot = NodeSnapshot(node, incarnation, waiting_for="the rendezvous store")
        self._state = "init"
        self._generation = self._workers = 0
        self._step = _Saved(0, None)
        self._tiers: dict[str, _Saved] = {}
        """The newest copy of each: `checkpoint`, `memory`, `replica`."""
        self._at = {"agent_age_s": clock()}
        """The instants behind ages, by their names."""
        self._notice: tuple[str, float | None] = "", None
        """With the instant at which this machine goes away."""
        self._checks: tuple[CheckStatus, ...] = ()
        self._partners_unreachable: tuple[str, ...] = ()
        self.failure: Failure | None = None
        """The newest failure that ended a generation, with its node's details."""

    def update(self, snapshot: NodeSnapshot, group: WorkerGroup | None, state: str, now: float) -> None:
        """After every turn."""
        with self._lock:
            generation = group.generation if group is not None else 0
            if generation != self._generation:
                self._at["running_s"] = now
            self._snapshot, self._state, self._generation = snapshot, state, generation
            self._workers = group.running if group is not None else 0
            failure = snapshot.world.cause.failure if snapshot.world is not None else None
            self.failure = failure or self.failure

    def stepped(self, step: int, at: float) -> None:
        """A worker of the present generation has finished this step."""
        self._step = _Saved(step, at)

    def reported(self, report: Report, now: float) -> None:
        """A worker of the present generation has."""
        if report.result != "ok" or report.tier == "part":
            return
        tier = "memory" if report.tier == "memory" else "checkpoint"
        known = self._tiers.get(tier)
        if isinstance(report, SaveReport):
            self._tiers[tier] = _Saved(report.step, now)
        elif known is None or known.step != report.step:
            self._tiers[tier] = _Saved(report.step, None)

    def noticed(self, text: str, ends_at: float | None) -> None:
        """This machine goes away then. No text: it stays."""
        self._notice = text, ends_at

    def replicated(self, report: ReplicationReport) -> None:
        """The memory server has brought copies to other nodes, or cannot."""
        known = self._tiers.get("replica")
        if report.step and (known is None or report.step != known.step):
            self._tiers["replica"] = _Saved(report.step, self._clock())
        self._partners_unreachable = report.unreachable

    def checked(self, findings: Sequence[Finding]) -> None:
        """The checks of this node have run."""
        bad = [one for one in worst_first(findings) if one.outcome in (Outcome.FAIL, Outcome.WARN)]
        self._checks = tuple(
            CheckStatus(
                one.check, one.outcome.value, one.summary[:MAX_CHECK_TEXT], one.advice[:MAX_CHECK_TEXT]
            )
            for one in bad[:MOST_CHECKS]
        )

    def node(self) -> str:
        with self._lock:
            return STATUS_PAGE.encode(self._status(self._clock()))

    def _status(self, now: float) -> NodeStatus:
        snapshot, world = self._snapshot, self._snapshot.world
        over = world is not None and world.phase is Phase.ENDED
        tiers = {tier: saved.seen(now) for tier, saved in self._tiers.copy().items()}
        notice, ends_at = self._notice

        def age(instant: float | None) -> float | None:
            return max(0.0, now - instant) if instant is not None else None

        waiting_for = "" if snapshot.undisturbed or over else snapshot.waiting_for
        return NodeStatus(
            job=self._job_name,
            node=snapshot.node,
            incarnation=snapshot.incarnation,
            version=self._version,
            agent_age_s=now - self._at["agent_age_s"],
            state=self._state,
            waiting_for=_masked(waiting_for, MAX_TEXT, self._secrets),
            coordinates=snapshot.coordinates,
            world=world.generation if world is not None else 0,
            phase=world.phase.value if world is not None else "",
            phase_s=age(snapshot.world_since) if world is not None else None,
            generation=self._generation,
            workers=self._workers,
            running_s=age(self._at["running_s"]) if self._generation else None,
            step=self._step.step,
            step_age_s=age(self._step.at),
            checkpoint=tiers.get("checkpoint"),
            memory=tiers.get("memory"),
            replica=tiers.get("replica"),
            lease_age_s=age(snapshot.confirmed_at),
            lease_ttl_s=self._lease_ttl_s,
            max_restarts=self._max_restarts,
            backoff_s=snapshot.backoff_s,
            notice=notice[:MAX_TEXT],
            notice_s=max(0.0, ends_at - now) if ends_at is not None else None,
            checks=self._checks,
            partners_unreachable=self._partners_unreachable,
        )

    def job(self) -> str:
        seen = self._snapshot
        job = JobStatus(
            self._job_name, seen.world, seen.known_nodes, seen.coordinator, complete=seen.coordinates
        )
        return job_page(job, self._secrets)
