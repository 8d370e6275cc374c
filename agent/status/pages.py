"""What an agent answers an operator who asks how the job is: `/status`, its own part, and `/job`, what it knows of all.

`elastic-agent status` asks one agent for `/job`, which names all nodes, and then each node for its `/status`: only a
node itself knows how old its lease and its checkpoint are, and ages are counted by whoever knows, when they are said.

No secret can be on these pages: they hold what nodes tell each other anyway, without the traceback and the output of
a failed worker, and nothing of the configuration but --max-restarts and --lease-ttl.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from ...rendezvous.fields import Fields
from ...rendezvous.participant import Participant
from ...rendezvous.records import MAX_RECORD_BYTES, MAX_TEXT, NodeRecord, Phase, World
from ...worker.reports import LoadReport, Report, SaveReport
from ..processes.failures import FailureInvalid, WorkerFailure
from ..processes.workers import WorkerGroup

STATUS_PATH = "/status"
JOB_PATH = "/job"
SCHEMA = 1
"""Version of both pages. A reader refuses any other."""

MAX_STATUS_BYTES = 64 * 1024
MAX_JOB_BYTES = 8 * MAX_RECORD_BYTES
"""As many nodes as fit into a world, each with its record."""

PAGE_RESTS = 30.0
"""A page is not made again before so many times the time that it took: a client that asks and asks takes 3 % of a
processor from the main loop, at most. With 1,000 nodes, 32 ms each time, the page is a second old."""

_PAGE = "its answer"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    age_s: float | None
    """None when workers of this node have loaded it, and another agent knows when it was saved."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What one agent says of itself. Ages are None where nothing has happened yet."""

    job: str
    node: str
    incarnation: str
    version: str
    up_s: float
    """Age of this agent."""
    state: str
    """A state of the metric elastic_agent_state."""
    waiting_for: str
    """Empty while its workers run."""
    coordinates: bool
    world: int
    """The generation of the world that it knows; 0 when there is none."""
    phase: str
    """Its phase; empty when there is none."""
    phase_s: float | None
    """Since when it has known of this phase."""
    generation: int
    """The generation whose workers are on this node; 0 when there are none."""
    workers: int
    """How many of them are alive."""
    running_s: float | None
    """Age of these workers."""
    step: int
    step_s: float | None
    checkpoint: Checkpoint | None
    lease_s: float | None
    """Age of the newest confirmation of its lease; None without a lease."""
    lease_ttl_s: float
    max_restarts: int | None
    backoff_s: float

    def to_json(self) -> str:
        return json.dumps({"v": SCHEMA, **asdict(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> NodeStatus:
        """Raises RecordInvalid."""
        fields = Fields.of_text(_PAGE, text, SCHEMA, MAX_STATUS_BYTES)
        return NodeStatus(
            job=fields.name("job"),
            node=fields.name("node"),
            incarnation=fields.name("incarnation"),
            version=fields.text("version", 64),
            up_s=fields.duration("up_s"),
            state=fields.name("state"),
            waiting_for=fields.text("waiting_for", MAX_TEXT),
            coordinates=fields.boolean("coordinates"),
            world=fields.integer("world"),
            phase=fields.text("phase", 16),
            phase_s=fields.age("phase_s"),
            generation=fields.integer("generation"),
            workers=fields.integer("workers", 0, 4096),
            running_s=fields.age("running_s"),
            step=fields.integer("step"),
            step_s=fields.age("step_s"),
            checkpoint=fields.optional("checkpoint", _checkpoint),
            lease_s=fields.age("lease_s"),
            lease_ttl_s=fields.duration("lease_ttl_s"),
            max_restarts=fields.integer_or_none("max_restarts"),
            backoff_s=fields.duration("backoff_s"),
        )


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Which nodes a job has, as one agent or the store knows it."""

    job: str
    world: World | None
    nodes: tuple[NodeRecord, ...]
    """Oldest first."""
    coordinator: str | None
    complete: bool
    """`nodes` holds every node that has a lease."""

    def to_json(self) -> str:
        world = _without_output(self.world).to_json() if self.world is not None else "null"
        nodes = ",".join(replace(node, failure=None).to_json() for node in self.nodes)
        head = json.dumps(
            {"v": SCHEMA, "job": self.job, "coordinator": self.coordinator, "complete": self.complete}
        )
        return f'{head[:-1]}, "world": {world}, "nodes": [{nodes}]}}'

    @staticmethod
    def from_json(text: str) -> JobStatus:
        """Raises RecordInvalid."""
        fields = Fields.of_text(_PAGE, text, SCHEMA, MAX_JOB_BYTES)
        return JobStatus(
            job=fields.name("job"),
            world=fields.optional("world", World.read),
            nodes=fields.many("nodes", NodeRecord.read),
            coordinator=None if fields.value("coordinator") is None else fields.name("coordinator"),
            complete=fields.boolean("complete"),
        )


def worker_failure(world: World) -> WorkerFailure | None:
    """The worker that is the cause of the world's phase; None when there is none, or it is not told."""
    failure = world.cause.failure
    if failure is None or not failure.detail:
        return None
    try:
        return WorkerFailure.from_json(failure.detail)
    except FailureInvalid:
        return None


def _without_output(world: World) -> World:
    if world.cause.failure is None:
        return world
    worker = worker_failure(world)
    detail = "" if worker is None else replace(worker, traceback=None, log_tail=(), log_file=None).to_json()
    return replace(world, cause=replace(world.cause, failure=replace(world.cause.failure, detail=detail)))


def _checkpoint(fields: Fields) -> Checkpoint:
    return Checkpoint(fields.integer("step"), fields.age("age_s"))


@dataclass(frozen=True, slots=True)
class _Progress:
    """What this node's workers have reported last; instants are monotonic."""

    step: int = 0
    step_at: float | None = None
    checkpoint: int | None = None
    checkpoint_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """The main loop's state after a turn: whole, so that another thread may read it. Instants are monotonic."""

    incarnation: str
    state: str = "init"
    waiting_for: str = "the rendezvous store"
    coordinates: bool = False
    generation: int = 0
    workers: int = 0
    running_since: float | None = None
    lease_at: float | None = None
    backoff_s: float = 0.0
    world: World | None = None
    world_since: float = 0.0
    nodes: tuple[NodeRecord, ...] = ()
    coordinator: str | None = None


class StatusPages:
    """Fed by the main loop through the observer; the pages are for any thread."""

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
    ) -> None:
        self._job = job
        self._node = node
        self._version = version
        self._lease_ttl_s = lease_ttl_s
        self._max_restarts = max_restarts
        self._clock = clock
        self._made_at = clock()
        self._seen = _Seen(incarnation)
        self._progress = _Progress()
        self._job_page = ""
        self._job_page_due_at = self._made_at

    def look(self, participant: Participant, group: WorkerGroup | None, state: str, now: float) -> None:
        """After every turn."""
        before, world = self._seen, participant.world
        generation = group.generation if group is not None else 0
        undisturbed = group is not None and not group.stopping
        self._seen = _Seen(
            incarnation=participant.incarnation,
            state=state,
            waiting_for="" if undisturbed or _over(world) else participant.waiting_for,
            coordinates=participant.coordinates,
            generation=generation,
            workers=group.running if group is not None else 0,
            running_since=before.running_since if generation == before.generation else now,
            lease_at=participant.confirmed_at,
            backoff_s=participant.backoff_s,
            world=world,
            world_since=participant.world_since,
            nodes=participant.known_nodes,
            coordinator=participant.coordinator,
        )

    def stepped(self, step: int, at: float) -> None:
        """A worker of the present generation has finished this step."""
        self._progress = replace(self._progress, step=step, step_at=at)

    def reported(self, report: Report, now: float) -> None:
        """A worker of the present generation has."""
        progress = self._progress
        if report.tier != "local":
            return  # what is in memory ends with the agent
        if isinstance(report, SaveReport) and report.result == "ok":
            self._progress = replace(progress, checkpoint=report.step, checkpoint_at=now)
        elif isinstance(report, LoadReport) and report.result == "ok" and report.step != progress.checkpoint:
            self._progress = replace(progress, checkpoint=report.step, checkpoint_at=None)

    def node(self) -> str:
        now, seen, progress = self._clock(), self._seen, self._progress

        def age(instant: float | None) -> float | None:
            return max(0.0, now - instant) if instant is not None else None

        checkpoint = progress.checkpoint
        return NodeStatus(
            job=self._job,
            node=self._node,
            incarnation=seen.incarnation,
            version=self._version,
            up_s=now - self._made_at,
            state=seen.state,
            waiting_for=seen.waiting_for[:MAX_TEXT],
            coordinates=seen.coordinates,
            world=seen.world.generation if seen.world is not None else 0,
            phase=seen.world.phase.value if seen.world is not None else "",
            phase_s=age(seen.world_since) if seen.world is not None else None,
            generation=seen.generation,
            workers=seen.workers,
            running_s=age(seen.running_since) if seen.generation else None,
            step=progress.step,
            step_s=age(progress.step_at),
            checkpoint=Checkpoint(checkpoint, age(progress.checkpoint_at))
            if checkpoint is not None
            else None,
            lease_s=age(seen.lease_at),
            lease_ttl_s=self._lease_ttl_s,
            max_restarts=self._max_restarts,
            backoff_s=seen.backoff_s,
        ).to_json()

    def job(self) -> str:
        """Of the last moment or two, where there are many nodes. Called by one thread."""
        now = self._clock()
        if now >= self._job_page_due_at:
            seen = self._seen
            job = JobStatus(self._job, seen.world, seen.nodes, seen.coordinator, seen.coordinates)
            self._job_page = job.to_json()
            self._job_page_due_at = now + PAGE_RESTS * (self._clock() - now)
        return self._job_page


def _over(world: World | None) -> bool:
    return world is not None and world.phase is Phase.ENDED
