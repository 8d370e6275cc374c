"""The state of a node, one document from which an agent answers for operators: `/status`, its own part, `/job`, what
it knows of all nodes, and the levels among its metrics. All of it is made when it is asked for.

`elastic-agent status` reads `/job` of one agent, which names all nodes, and then `/status` of each node: only a node
itself knows the age of its lease and its checkpoint, and counts it when it answers. A reader bounds the size of a page,
checks every field, cleans the texts, and refuses any other version.

The pages hold what nodes write to the store anyway, without the traceback and the output of a failed worker, and of the
configuration only --lease-ttl. In the texts of failures secrets are masked as in the journal: more
people read these pages than the store.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ...codec import AtMost, Count, Document, Seconds, Within
from ...health.checks.finding import Finding, Outcome, worst_first
from ...health.checks.runner import AT_JOIN
from ...health.http import Probe
from ...health.metrics import LOST_TIME_CAUSES, SAVE_TIERS, Metrics
from ...rendezvous.messages import MAX_EXCLUSION_REASON
from ...rendezvous.node.session import NodeSnapshot
from ...rendezvous.records import MAX_EXCEPTION, MAX_RECORD_BYTES, MAX_TEXT, Failure, NodeRecord, Phase, World
from ...rendezvous.text import Name, line
from ...worker.wire.messages import MOST_PARTNERS, ReplicationReport, Report, SaveReport
from ..output.masking import masked
from ..workers.processes.workers import WorkerGroup

STATUS_PATH = "/status"
JOB_PATH = "/job"
SCHEMA = 11
"""Version of both pages."""

MAX_STATUS_BYTES = 256 * 1024
MAX_JOB_BYTES = 8 * MAX_RECORD_BYTES + MAX_STATUS_BYTES
"""As many nodes as fit into a world, each with its record; and the status of who tells it."""

MOST_CHECKS = 32


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: Count
    age_s: Seconds | None
    """None when workers of this node have loaded it, and another agent knows when it was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The status of one agent, of itself. Ages are None where nothing has happened yet."""

    node: Name
    incarnation: Name
    state: Name
    """A state of the metric elastic_agent_state."""
    waiting_for: Annotated[str, line(MAX_TEXT)]
    """Empty while its workers run."""
    phase_s: Seconds | None
    """Since when it has known the present phase of the world."""
    workers: Annotated[int, Within(0, 4096)]
    """How many are alive on this node."""
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
    backoff_s: Seconds
    notice: Annotated[str, line(MAX_TEXT)]
    """Who says that this machine goes away; empty: it stays."""
    notice_s: Seconds | None
    """What is left of it then."""
    checks: Annotated[tuple[Finding, ...], AtMost(MOST_CHECKS)]
    """Of the node before it joined, those that failed or warned, the worst first."""
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
    agent: NodeStatus | None = None
    """The status of the agent that says this; None: the store does."""


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


class StepRate:
    """The main thread adds, any thread reads. Instants are monotonic. Totals are new steps, and steps that an earlier
    generation had done already.

    The rate since the start of the agent is kept in bounded memory, as totals at some instants. When there are too
    many, every second one goes: the whole job is always there, in less detail the longer it lasts.
    """

    def __init__(self, every_s: float = 2.0, most: int = 240) -> None:
        self._lock = threading.Lock()
        self._every_s = every_s
        self._most = most
        self._kept: list[tuple[float, int, int]] = []
        self._newest: tuple[float, int, int] | None = None

    def add(self, since: float, until: float, new: int, again: int) -> None:
        """`new` steps were done between these instants, and `again` more that an earlier generation had done."""
        with self._lock:
            _, all_new, all_again = self._newest or (since, 0, 0)
            self._keep((since, all_new, all_again))
            self._newest = (until, all_new + new, all_again + again)
            self._keep(self._newest)

    def _keep(self, totals: tuple[float, int, int]) -> None:
        if not self._kept or totals[0] - self._kept[-1][0] >= self._every_s:
            self._kept.append(totals)
        if len(self._kept) > self._most:
            self._kept, self._every_s = self._kept[::2], 2 * self._every_s

    def read(self, now: float) -> list[tuple[float, int, int]]:
        """Seconds ago, and the totals then, the oldest first; the last one is of the newest step."""
        with self._lock:
            totals = [*self._kept, *([self._newest] if self._newest is not None else [])]
        return [(round(max(0.0, now - at), 3), new, again) for at, new, again in totals]


@dataclass(frozen=True, slots=True)
class _Saved:
    step: int
    at: float | None
    """Monotonic. None: another agent knows."""

    def seen(self, now: float) -> Checkpoint:
        return Checkpoint(self.step, age(self.at, now))


class NodeState:
    """Updated by the main thread, above all by the observer; any thread may ask for a page. Instants are monotonic."""

    def __init__(
        self,
        job: str,
        node: str,
        incarnation: str,
        metrics: Metrics,
        *,
        lease_ttl_s: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        secrets: Collection[str] = (),
    ) -> None:
        """`secrets` are known values, which no page has. `wall_clock` is for dashboards."""
        self._job_name, self._metrics, self.secrets = job, metrics, secrets
        self._lease_ttl_s = lease_ttl_s
        self.clock, self.wall_clock = clock, wall_clock
        self._lock = threading.Lock()
        """Of what a turn changes together: the next three."""
        self.snapshot = NodeSnapshot(node, incarnation, waiting_for="the rendezvous store")
        self.state = "init"
        self._workers = 0
        self.started: World | None = None
        """The newest world whose workers were started here."""
        self.trains = False
        """They are not gone."""
        self.step = _Saved(0, None)
        """The newest that a worker here has finished."""
        self.rate = StepRate()
        self.spent = dict.fromkeys(("productive", *LOST_TIME_CAUSES), 0.0)
        """Seconds since the start of the agent: productive ones, and lost ones by cause."""
        self.saved: dict[str, _Saved] = {}
        """The newest copy of each tier (SAVE_TIERS), and of `replica`."""
        self.partners_unreachable: tuple[str, ...] | None = None
        """None: no replicas are made."""
        self.hangs: tuple[str, float | None] = "off", None
        """The state of the detector (HANG_STATES), and its limit; None: without one."""
        self.notice: tuple[str, float | None] = "", None
        """Who says that this machine goes away, and at which instant."""
        self.findings: Sequence[Finding] = ()
        """Of the checks of this node before it joined."""
        self.failure: Failure | None = None
        """The newest failure that ended a generation, with its node's details."""

    def update(self, snapshot: NodeSnapshot, group: WorkerGroup | None, state: str) -> None:
        """After every turn."""
        with self._lock:
            self.snapshot, self.state = snapshot, state
            self._workers = group.running if group is not None else 0
            failure = snapshot.world.cause.failure if snapshot.world is not None else None
            self.failure = failure or self.failure

    def stepped(self, step: int, at: float) -> None:
        """A worker of the present generation has finished this step."""
        self.step = _Saved(step, at)

    def reported(self, report: Report, now: float) -> None:
        """A worker has saved or loaded."""
        if report.result != "ok":
            return
        known = self.saved.get(report.tier)
        if isinstance(report, SaveReport):
            self.saved[report.tier] = _Saved(report.step, now)
        elif known is None or known.step != report.step:
            self.saved[report.tier] = _Saved(report.step, None)

    def replicated(self, report: ReplicationReport) -> None:
        """The memory server has brought copies to other nodes, or taken some, or cannot."""
        known = self.saved.get("replica")
        if report.step and (known is None or report.step != known.step):
            self.saved["replica"] = _Saved(report.step, self.clock())
        self.partners_unreachable = report.unreachable

    # ---------------------------------------------------------------- pages

    def node(self) -> str:
        with self._lock:
            return STATUS_PAGE.encode(self._status(self.clock()))

    def _status(self, now: float) -> NodeStatus:
        snapshot, world = self.snapshot, self.snapshot.world
        over = world is not None and world.phase is Phase.ENDED
        seen = {tier: saved.seen(now) for tier, saved in self.saved.copy().items()}
        notice, ends_at = self.notice
        waiting_for = "" if snapshot.undisturbed or over else snapshot.waiting_for
        bad = [one for one in worst_first(self.findings) if one.outcome in (Outcome.FAIL, Outcome.WARN)]
        return NodeStatus(
            node=snapshot.node,
            incarnation=snapshot.incarnation,
            state=self.state,
            waiting_for=_masked(waiting_for, MAX_TEXT, self.secrets),
            phase_s=age(snapshot.world_since, now) if world is not None else None,
            workers=self._workers,
            step=self.step.step,
            step_age_s=age(self.step.at, now),
            checkpoint=seen.get("local"),
            memory=seen.get("memory"),
            replica=seen.get("replica"),
            lease_age_s=age(snapshot.confirmed_at, now),
            lease_ttl_s=self._lease_ttl_s,
            backoff_s=snapshot.backoff_s,
            notice=notice[:MAX_TEXT],
            notice_s=max(0.0, ends_at - now) if ends_at is not None else None,
            checks=tuple(bad[:MOST_CHECKS]),
            partners_unreachable=self.partners_unreachable or (),
        )

    def job(self) -> str:
        seen = self.snapshot
        job = JobStatus(
            *(self._job_name, seen.world, seen.known_nodes, seen.coordinator),
            complete=seen.coordinates,
            agent=self._status(self.clock()),
        )
        return job_page(job, self.secrets)

    def readiness(self) -> Probe:
        """Does this node train, or stand ready to?"""
        snapshot, world = self.snapshot, self.snapshot.world
        if snapshot.undisturbed:
            return Probe(True, f"running generation {snapshot.undisturbed}")
        outside = world is not None and world.member(snapshot.incarnation) is None
        if world is not None and world.trains and outside and snapshot.lease_good(self.clock()):
            return Probe(True, f"standing by: generation {world.generation} is running")
        return Probe(False, f"waiting: {masked(snapshot.waiting_for, self.secrets)}")

    def introduction(self) -> str:
        """The answer to a peer that asks who this node is."""
        return self.snapshot.introduction(self.clock()).to_json()

    # ---------------------------------------------------------------- metrics

    def metrics(self) -> bytes:
        """The answer to `GET /metrics`: what was counted until now, and all levels as they are."""
        with self._lock, self._metrics.lock:
            self._set_levels(self.clock())
        return self._metrics.render()

    def _set_levels(self, now: float) -> None:
        metrics, snapshot, world = self._metrics, self.snapshot, self.snapshot.world
        metrics.state.choose(self.state)
        metrics.coordinator.set(snapshot.coordinates)
        metrics.backoff_seconds.set(snapshot.backoff_s)
        metrics.lease_age_seconds.set(age(snapshot.confirmed_at, now))
        metrics.node_excluded.set(world is not None and world.exclusion(snapshot.node) is not None)
        self._count_nodes(snapshot)
        if self.started is not None:
            limit = self.started.max_restarts(None)
            left = limit - self.started.restarts.failures if limit is not None else math.inf
            metrics.restart_budget_remaining.set(left, kind="failure")
            metrics.rendezvous_generation.set(self.started.generation)
            metrics.world_size.set(self.started.size if self.trains else 0)
            metrics.group_world_size.set(len(self.started.members) if self.trains else 0)
        if self.step.at is not None:
            metrics.step.set(self.step.step)
            metrics.last_step_timestamp_seconds.set(self._on_the_wall(self.step.at, now))
        for tier, saved in ((tier, self.saved.get(tier)) for tier in SAVE_TIERS):
            if saved is not None:
                metrics.checkpoint_last_step.set(saved.step, tier=tier)
                at_s = self._on_the_wall(saved.at, now)
                metrics.checkpoint_last_success_timestamp_seconds.set(at_s, tier=tier)
        spent = dict(self.spent)
        metrics.productive_time_seconds_total.reach(spent.pop("productive"))
        for cause, seconds in spent.items():
            metrics.lost_time_seconds_total.reach(seconds, cause=cause)
        detector, limit_s = self.hangs
        metrics.hang_detector_state.choose(detector)
        metrics.hang_timeout_seconds.set(limit_s)
        severities = {finding.check: finding.outcome.severity for finding in self.findings}
        for check in AT_JOIN:
            metrics.check_outcome.set(severities.get(check), check=check)
        if self.partners_unreachable is not None:
            metrics.replica_partners_unreachable.set(len(self.partners_unreachable))
        self._compare_ranks(snapshot)

    def _on_the_wall(self, instant: float | None, now: float) -> float | None:
        """In seconds since the epoch."""
        return self.wall_clock() - (now - instant) if instant is not None else None

    def _count_nodes(self, snapshot: NodeSnapshot) -> None:
        """Only the coordinator knows those that are in no world."""
        world = snapshot.world
        members = {member.incarnation for member in world.members} if world is not None else set()
        here = {node.incarnation for node in snapshot.known_nodes}
        running = world is not None and world.trains
        counts: dict[str, int | None] = {
            "standby": len(here - members) if running else 0,
            "waiting": 0 if running else len(here),
            "lost": len(members - here),
        }
        known = counts if snapshot.coordinates else dict.fromkeys(counts)
        for state, count in {"active": len(members) if running else 0, **known}.items():
            self._metrics.nodes.set(count, state=state)

    def _compare_ranks(self, snapshot: NodeSnapshot) -> None:
        """This node's: the time that each needs for a step, beside the median."""
        metrics, compared, paces = self._metrics, snapshot.comparison, snapshot.paces
        member = snapshot.world.member(snapshot.incarnation) if snapshot.world is not None else None
        ratios: dict[int, float] = {}
        slow: set[int] = set()
        if member and compared and compared.usual_us and paces and paces.generation == compared.generation:
            ratios = {rank: own_us / compared.usual_us for rank, own_us in enumerate(paces.own_us)}
            slow = {straggler.rank - member.first_rank for straggler in compared.stragglers}
        for rank in range(len(metrics.straggler.labels["local_rank"])):
            metrics.step_time_skew_ratio.set(ratios.get(rank), local_rank=rank)
            metrics.straggler.set(rank in slow, local_rank=rank)


def age(instant: float | None, now: float) -> float | None:
    return max(0.0, now - instant) if instant is not None else None
