"""What an agent answers an operator who asks how the job is: `/status`, its own part, and `/job`, what it knows of all.

`elastic-agent status` asks one agent for `/job`, which names all nodes, and then each node for its `/status`: only a
node itself knows how old its lease and its checkpoint are, and it counts these ages when it answers.

No secret can be on these pages: they hold what nodes write to the store anyway, without the traceback and the output of
a failed worker, and nothing of the configuration but --max-restarts and --lease-ttl.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ....rendezvous.fields import Fields
from ....rendezvous.node.snapshot import NodeSnapshot
from ....rendezvous.records import MAX_RECORD_BYTES, MAX_TEXT, NodeRecord, Phase, World
from ....worker.wire.messages import Report, SaveReport
from ...workers.processes.failures import FailureInvalid, WorkerFailure
from ...workers.processes.workers import WorkerGroup

STATUS_PATH = "/status"
JOB_PATH = "/job"
SCHEMA = 2
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What one agent says of itself. Ages are None where nothing has happened yet."""

    job: str
    node: str
    incarnation: str
    version: str
    up_s: float
    """Age of this agent."""
    state: str = "init"
    """A state of the metric elastic_agent_state."""
    waiting_for: str = "the rendezvous store"
    """Empty while its workers run."""
    coordinates: bool = False
    world: int = 0
    """The generation of the world that it knows; 0 when there is none."""
    phase: str = ""
    """Its phase; empty when there is none."""
    phase_s: float | None = None
    """Since when it has known of this phase."""
    generation: int = 0
    """The generation whose workers are on this node; 0 when there are none."""
    workers: int = 0
    """How many of them are alive."""
    running_s: float | None = None
    """Age of these workers."""
    step: int = 0
    step_s: float | None = None
    checkpoint: Checkpoint | None = None
    lease_s: float | None = None
    """Age of the newest confirmation of its lease; None without a lease."""
    lease_ttl_s: float
    max_restarts: int | None
    backoff_s: float = 0.0

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


_AGES = ("up_s", "phase_s", "running_s", "step_s", "lease_s")


def _aged(status: NodeStatus, now: float) -> NodeStatus:
    """`status` has instants in the place of ages."""

    def age(instant: float | None) -> float | None:
        return max(0.0, now - instant) if instant is not None else None

    ages: dict[str, Any] = {name: age(getattr(status, name)) for name in _AGES}
    if status.checkpoint is not None:
        ages["checkpoint"] = replace(status.checkpoint, age_s=age(status.checkpoint.age_s))
    return replace(status, **ages)


class StatusPages:
    """Fed by the main loop through the observer; the pages are for any thread, each made of one frozen object."""

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
        self._clock = clock
        self._status = NodeStatus(
            job=job,
            node=node,
            incarnation=incarnation,
            version=version,
            up_s=clock(),
            lease_ttl_s=lease_ttl_s,
            max_restarts=max_restarts,
        )
        """With instants, monotonic, in the place of ages: those are counted when the page is asked for."""
        self._job = JobStatus(job, None, (), None, complete=False)
        self._job_page = ""
        self._job_page_due_at = clock()

    def look(self, snapshot: NodeSnapshot, group: WorkerGroup | None, state: str, now: float) -> None:
        """After every turn."""
        before, world = self._status, snapshot.world
        generation = group.generation if group is not None else 0
        since = before.running_s if generation == before.generation else now
        self._status = replace(
            before,
            incarnation=snapshot.incarnation,
            state=state,
            waiting_for="" if snapshot.undisturbed or _over(world) else snapshot.waiting_for[:MAX_TEXT],
            coordinates=snapshot.coordinates,
            world=world.generation if world is not None else 0,
            phase=world.phase.value if world is not None else "",
            phase_s=snapshot.world_since if world is not None else None,
            generation=generation,
            workers=group.running if group is not None else 0,
            running_s=since if generation else None,
            lease_s=snapshot.confirmed_at,
            backoff_s=snapshot.backoff_s,
        )
        nodes, coordinator = snapshot.known_nodes, snapshot.coordinator
        self._job = JobStatus(before.job, world, nodes, coordinator, snapshot.coordinates)

    def stepped(self, step: int, at: float) -> None:
        """A worker of the present generation has finished this step."""
        self._status = replace(self._status, step=step, step_s=at)

    def reported(self, report: Report, now: float) -> None:
        """A worker of the present generation has."""
        known = self._status.checkpoint
        if report.tier != "local" or report.result != "ok":
            return  # what is in memory ends with the agent
        if isinstance(report, SaveReport):
            self._status = replace(self._status, checkpoint=Checkpoint(report.step, now))
        elif known is None or report.step != known.step:
            self._status = replace(self._status, checkpoint=Checkpoint(report.step, None))

    def node(self) -> str:
        return _aged(self._status, self._clock()).to_json()

    def job(self) -> str:
        """Of the last moment or two, where there are many nodes. Called by one thread."""
        now = self._clock()
        if now >= self._job_page_due_at:
            self._job_page = self._job.to_json()
            self._job_page_due_at = now + PAGE_RESTS * (self._clock() - now)
        return self._job_page


def _over(world: World | None) -> bool:
    return world is not None and world.phase is Phase.ENDED
