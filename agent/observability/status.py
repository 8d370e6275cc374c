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
from typing import Annotated, NamedTuple

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

PAGE_RESTS = 30.0
"""A page is not made again before so many times the time that it took: requests take 3 % of a processor from the main
loop, at most. With 1,000 nodes, 32 ms each time, the page is a second old."""


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


class _Saved(NamedTuple):
    step: int
    at: float | None
    """None: another agent knows."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The newest state, for any thread. Instants are monotonic."""

    snapshot: NodeSnapshot
    state: str = "init"
    generation: int = 0
    running_since: float | None = None
    workers: int = 0
    step: int = 0
    stepped_at: float | None = None
    checkpoint: _Saved | None = None
    memory: _Saved | None = None
    replica: _Saved | None = None
    failure: Failure | None = None
    """The newest failure that ended a generation."""
    notice: str = ""
    ends_at: float | None = None
    checks: tuple[CheckStatus, ...] = ()
    partners_unreachable: tuple[str, ...] = ()


class StatusPages:
    """Updated by the main loop through the observer; any thread may ask for a page, made of one frozen object."""

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
        self._started_at = clock()
        self._seen = _Seen(NodeSnapshot(node, incarnation, waiting_for="the rendezvous store"))
        self._job_page_lock = threading.Lock()
        self._job_page = ""
        self._job_page_due_at = clock()

    def update(self, snapshot: NodeSnapshot, group: WorkerGroup | None, state: str, now: float) -> None:
        """After every turn."""
        generation = group.generation if group is not None else 0
        world = snapshot.world
        failure = world.cause.failure if world is not None else None
        begun_at = self._seen.running_since if generation == self._seen.generation else now
        self._seen = replace(
            self._seen,
            snapshot=snapshot,
            state=state,
            generation=generation,
            running_since=begun_at if generation else None,
            workers=group.running if group is not None else 0,
            failure=failure or self._seen.failure,
        )

    @property
    def failure(self) -> Failure | None:
        """The newest failure that ended a generation, with its node's details."""
        return self._seen.failure

    def stepped(self, step: int, at: float) -> None:
        """A worker of the present generation has finished this step."""
        self._seen = replace(self._seen, step=step, stepped_at=at)

    def reported(self, report: Report, now: float) -> None:
        """A worker of the present generation has."""
        if report.result != "ok" or report.tier == "part":
            return
        if report.tier == "memory":
            saved = isinstance(report, SaveReport)
            self._seen = replace(self._seen, memory=_Saved(report.step, now if saved else None))
        elif isinstance(report, SaveReport):
            self._seen = replace(self._seen, checkpoint=_Saved(report.step, now))
        elif self._seen.checkpoint is None or report.step != self._seen.checkpoint.step:
            self._seen = replace(self._seen, checkpoint=_Saved(report.step, None))

    def noticed(self, text: str, ends_at: float | None) -> None:
        """This machine goes away then. No text: it stays."""
        self._seen = replace(self._seen, notice=text, ends_at=ends_at)

    def replicated(self, report: ReplicationReport) -> None:
        """The memory server has brought copies to other nodes, or cannot."""
        replica = self._seen.replica
        if report.step and (replica is None or report.step != replica.step):
            self._seen = replace(self._seen, replica=_Saved(report.step, self._clock()))
        self._seen = replace(self._seen, partners_unreachable=report.unreachable)

    def checked(self, findings: Sequence[Finding]) -> None:
        """The checks of this node have run."""
        bad = [
            finding for finding in worst_first(findings) if finding.outcome in (Outcome.FAIL, Outcome.WARN)
        ]
        statuses = (
            CheckStatus(
                finding.check,
                finding.outcome.value,
                finding.summary[:MAX_CHECK_TEXT],
                finding.advice[:MAX_CHECK_TEXT],
            )
            for finding in bad[:MOST_CHECKS]
        )
        self._seen = replace(self._seen, checks=tuple(statuses))

    def node(self) -> str:
        seen, now = self._seen, self._clock()
        snapshot, world = seen.snapshot, seen.snapshot.world
        over = world is not None and world.phase is Phase.ENDED

        def age(instant: float | None) -> float | None:
            return max(0.0, now - instant) if instant is not None else None

        def checkpoint(saved: _Saved | None) -> Checkpoint | None:
            return Checkpoint(saved.step, age(saved.at)) if saved is not None else None

        status = NodeStatus(
            job=self._job_name,
            node=snapshot.node,
            incarnation=snapshot.incarnation,
            version=self._version,
            agent_age_s=now - self._started_at,
            state=seen.state,
            waiting_for=""
            if snapshot.undisturbed or over
            else _masked(snapshot.waiting_for, MAX_TEXT, self._secrets),
            coordinates=snapshot.coordinates,
            world=world.generation if world is not None else 0,
            phase=world.phase.value if world is not None else "",
            phase_s=age(snapshot.world_since) if world is not None else None,
            generation=seen.generation,
            workers=seen.workers,
            running_s=age(seen.running_since),
            step=seen.step,
            step_age_s=age(seen.stepped_at),
            checkpoint=checkpoint(seen.checkpoint),
            memory=checkpoint(seen.memory),
            replica=checkpoint(seen.replica),
            lease_age_s=age(snapshot.confirmed_at),
            lease_ttl_s=self._lease_ttl_s,
            max_restarts=self._max_restarts,
            backoff_s=snapshot.backoff_s,
            notice=seen.notice[:MAX_TEXT],
            notice_s=max(0.0, seen.ends_at - now) if seen.ends_at is not None else None,
            checks=seen.checks,
            partners_unreachable=seen.partners_unreachable,
        )
        return STATUS_PAGE.encode(status)

    def job(self) -> str:
        """Of the last moment or two, where there are many nodes."""
        with self._job_page_lock:
            now = self._clock()
            if now >= self._job_page_due_at:
                seen = self._seen.snapshot
                self._job_page = job_page(
                    JobStatus(
                        self._job_name,
                        seen.world,
                        seen.known_nodes,
                        seen.coordinator,
                        complete=seen.coordinates,
                    ),
                    self._secrets,
                )
                self._job_page_due_at = now + PAGE_RESTS * (self._clock() - now)
            return self._job_page
