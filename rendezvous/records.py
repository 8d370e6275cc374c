"""What nodes write for each other: in the store one `NodeRecord` per node, one `World` and one `StopAt` per job, and an
`PeerStatus` from node to node.

All are small frozen values. Their annotations declare their JSON form (see `codec`), and `from_json` checks it, because
whatever can reach the store or a port can write there: an unknown schema, a wrong type, size or range raises
`RecordInvalid`, which names the key and the field. Texts are cleaned as they are read. Durations are seconds; no field
holds an instant, since clocks of two nodes are never compared.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

from ..codec import AtMost, Count, Document, Invalid, Positive, Row, Within, shown
from ..health.hang_report import HangProbe, HangReport, HangSuspicion
from ..health.stragglers import PaceComparison, Paces
from .errors import RecordInvalid
from .messages import MAX_EXCLUSIONS, Exclusion, Limits, Program, Recheck
from .text import NAME, ROLE, Age, CauseName, Name, NameOrNone, Role, clean, line, lines

SCHEMA = 21
"""Version of all records. A reader refuses any other: half an understanding is worse than none."""

MAX_RECORD_BYTES = 1024 * 1024
"""Less than a store takes in one request, evictions included. 4,096 members, the most that a job may have, fit with
names as clouds give them, beside the longest failure."""
MAX_STANDBYS = 512
"""Nodes that stand by with copies in their memory, in one world."""
MAX_TEXT = 4096
"""Characters of a text for people; a longer one is refused, so its writer cuts it."""
MAX_EXCEPTION = 1000
MAX_TRACEBACK = 3000
MAX_LOG_LINE = 200
MAX_LOG_LINES = 20
MAX_LOG_FILE = 500
"""Of what is told of the end of a failed worker. Its node's own log has more."""
MAX_SEEN = 2**62
"""Half of what a generation can be: however high a node says that it was, all nodes can read the next ones."""
WORLD_KEY = "world"
STOP_KEY = "stop_at"
INTRODUCTION = "the answer of a peer"
"""Takes the place of the key in the error of an introduction that cannot be read."""
NODES_PREFIX = "nodes/"
DEFAULT_ROLE = "default"
"""Of the workers of a node that names none, as under torchrun."""

Port = Annotated[int, Within(0, 65535)]
Slots = Annotated[int, Within(1, 4096)]


def node_key(node: str) -> str:
    return NODES_PREFIX + node


def life_of(incarnation: str) -> str:
    """The agent's, whatever the number of times that it has joined."""
    return incarnation.partition(".")[0]


_Self = TypeVar("_Self", bound="Record")


class Record:
    """Base of what has a key of its own in the store, or is an answer."""

    __slots__ = ()
    schema: ClassVar[int] = SCHEMA
    most_chars: ClassVar[int] = MAX_RECORD_BYTES

    def to_json(self) -> str:
        return Document(type(self), self.schema, self.most_chars).encode(self)

    @classmethod
    def read(cls: type[_Self], key: str, text: str) -> _Self:
        """Raises RecordInvalid."""
        try:
            return Document(cls, cls.schema, cls.most_chars).decode(text)
        except Invalid as error:
            raise RecordInvalid(key, str(error)) from error


class Action(enum.Enum):
    """What follows a failure, by its cause; see `coordinator/restarts`."""

    RESTART = "restart"
    STOP = "stop"
    """The script or its settings are wrong: no restart helps if it happens a second time without progress."""
    END = "end"
    """No restart of the job helps."""
    EXCLUDE_NODE = "exclude-node"
    """Its machine is broken: a restart elsewhere helps."""
    FREE = "free"
    """Chance, and no fault of script or node: it costs no budget."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a node's workers in `generation`: of those that are no `collateral` the first, else the first.

    `fingerprint` is the same text for the same failure in another generation; `summary` is one line that stands alone.
    From `local_rank` on it is for people, and only passed on: how the worker ended that is to blame.
    """

    generation: Positive
    fingerprint: Annotated[str, line(1024)]
    summary: Annotated[str, line(MAX_TEXT)]
    cause: CauseName = "unknown"
    action: Action = Action.RESTART
    collateral: bool = False
    """It follows from the end of another worker, maybe on another node: a broken collective, a peer that is gone."""
    outside: bool = False
    """The worker was killed from outside the job: the failure says nothing about script, state or node."""
    node: NameOrNone = ""
    """That of the worker that is to blame; empty: no worker is."""
    rank: Count | None = None
    """Of this worker."""
    local_rank: Count | None = None
    """None: nothing is known of its end."""
    returncode: Annotated[int, Within(-128, 255)] = 0
    exception: Annotated[str, lines(MAX_EXCEPTION)] | None = None
    """`Type: message`."""
    traceback: Annotated[str, lines(MAX_TRACEBACK)] | None = None
    log_tail: Annotated[tuple[Annotated[str, line(MAX_LOG_LINE)], ...], AtMost(MAX_LOG_LINES)] = ()
    log_file: Annotated[str, line(MAX_LOG_FILE)] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    address: Annotated[str, line(256)]
    port: Port

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """How far the workers of one generation have come on one node."""

    generation: Count
    loaded: Count | None = None
    """The step of the state that they have loaded; None when they have reported none."""
    reached: Count | None = None
    """The highest step that they have finished or saved since; None before the first."""


class Condition(enum.Enum):
    """What may hold for one node's workers in one generation."""

    STABLE = "stable"
    """They have run for longer than a minute."""
    NOTIFIED = "notified"
    """All of them have been notified that a planned change waits for them."""
    POLLING = "polling"
    """All of them have asked for such news at a step's end, and so will again."""
    OVERDUE = "overdue"
    """They have not ended by themselves in the time that this node has: its machine goes away."""
    DRAINED = "drained"
    """They have ended by themselves at the step that all agreed on, or need not."""
    STATE_SAVED = "state_saved"
    """This node keeps the state after that step."""
    SUCCEEDED = "succeeded"
    """All of them have ended with success."""
    STOPPED = "stopped"
    """None of them is left, nor of an earlier generation, and `port` is fresh since."""


@dataclass(frozen=True, slots=True)
class NodeRecord(Record):
    """What one node reports about itself, under its lease."""

    node: Name
    incarnation: Name
    address: Annotated[str, line(256)]
    """Where peers reach this node's workers' store, should the node become the world's master."""
    port: Port
    """A port bound and listening at `address`, never used by any generation before."""
    slots: Slots
    """Workers that this node runs."""
    http: Endpoint | None = None
    """Where this node's agent answers its peers; None when they cannot reach it."""
    limits: Limits | None = None
    """With which this node was started; None when it names none."""
    program: Program | None = None
    node_rank: Count | None = None
    """Orders nodes that join together; those without one come after the others."""
    hosts_store: bool = False
    """The rendezvous store ends with this node's agent."""
    leaving: bool = False
    ready: bool = False
    """Workers can start here at once: what takes seconds is done before a world needs it."""
    generation: Count = 0
    """The newest generation for whose workers here `conditions` hold."""
    conditions: Annotated[frozenset[Condition], AtMost(len(Condition))] = frozenset()
    failure: Failure | None = None
    step: Count = 0
    """Highest training step that this node's workers have reported (finished or saved); 0 when they do not."""
    progress: GenerationProgress | None = None
    seen: Annotated[int, Within(0, MAX_SEEN)] = 0
    """The highest generation that earlier incarnations have known, perhaps in a store that is no more. The next one is
    higher."""
    role: Role = DEFAULT_ROLE
    """What its workers are called; those of one role are also counted by themselves."""
    memory: Port = 0
    """Where this node's memory server is, at `address`; 0: it has none."""
    recheck: Recheck | None = None
    suspicion: HangSuspicion | None = None
    """This node's workers seem to hang; None while they do not."""
    hang_report: HangReport | None = None
    """The answer to the newest inquiry that this node was asked."""

    paces: Paces | None = None
    """How fast its workers are; None before that is known."""
    comparison: PaceComparison | None = None
    """The coordinator alone writes it: its comparison of all nodes' paces."""

    def has(self, condition: Condition, generation: int) -> bool:
        """It holds for this node's workers of this generation."""
        return self.generation == generation and condition in self.conditions

    def has_stopped(self, generation: int) -> bool:
        """No worker of this generation or of an earlier one is left on this node."""
        return self.generation > generation or self.has(Condition.STOPPED, generation)

    def having(self, generation: int, *conditions: Condition) -> NodeRecord:
        """With these conditions of the generation; what held for an earlier one is over."""
        known = self.conditions if self.generation == generation else frozenset()
        return replace(self, generation=generation, conditions=known.union(conditions))

    @staticmethod
    def from_json(key: str, text: str) -> NodeRecord:
        record = NodeRecord.read(key, text)
        if key != node_key(record.node):
            raise RecordInvalid(key, f"it is the record of node {record.node!r}")
        return record


@dataclass(frozen=True, slots=True)
class Member(Row):
    """One node's place in a world: it runs the workers `first_rank` to `first_rank + slots - 1`."""

    node: str
    incarnation: str
    slots: int
    first_rank: int
    http: Endpoint | None = None
    role: str = DEFAULT_ROLE

    @property
    def row(self) -> tuple[str | int, ...]:
        """Its form in JSON: every node reads every member of every world. `first_rank` follows from the others."""
        http = (self.http.address, self.http.port) if self.http is not None else ()
        role = self.role if self.role != DEFAULT_ROLE else ""  # thousands may have it
        return (self.node, self.incarnation, self.slots, role, *http)


class Phase(enum.Enum):
    RUNNING = "running"
    """The members train."""
    DRAINING = "draining"
    """They train on, and notify their workers that a planned change waits."""
    LAST_STEP = "last_step"
    """All workers know of it: they end by themselves at the step that `StopAt` names, and no agent signals them."""
    STOPPING = "stopping"
    """The members stop their workers and report it; the next generation closes when all have, or are gone."""
    ENDED = "ended"
    """The job is over; `result` has the way it ended."""


TRANSITIONS: Mapping[Phase | None, frozenset[Phase]] = {
    None: frozenset({Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.RUNNING, Phase.DRAINING, Phase.STOPPING, Phase.ENDED}),
    Phase.DRAINING: frozenset({Phase.LAST_STEP, Phase.STOPPING, Phase.ENDED}),
    Phase.LAST_STEP: frozenset({Phase.STOPPING, Phase.ENDED, Phase.RUNNING}),
    Phase.STOPPING: frozenset({Phase.ENDED, Phase.RUNNING}),
    Phase.ENDED: frozenset({Phase.RUNNING}),
}
"""Which phase may follow in the key `world`; None: it is not there. RUNNING begins the next generation, but for RUNNING
itself, which only asks what workers do that seem to hang, or readmits a node. What an empty store begins with is
`carried_over`, and no step of this table."""


class CauseKind(enum.Enum):
    """Why the world is in its phase."""

    START = "start"
    FAILURE = "failure"
    JOIN = "join"
    LEAVE = "leave"
    LOST = "lost"
    WITHDRAWN = "withdrawn"
    """A member stopped its workers by itself, because it could not confirm its lease."""
    SUCCESS = "success"


class Result(enum.Enum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    RESTARTS_EXHAUSTED = "restarts_exhausted"
    CRASH_LOOP = "crash_loop"
    FINAL_FAILURE = "final_failure"
    STORE_HOST_LEFT = "store_host_left"


@dataclass(frozen=True, slots=True)
class Cause:
    kind: CauseKind
    node: Annotated[str, line(128)] = ""
    detail: Annotated[str, line(MAX_TEXT)] = ""
    failure: Failure | None = None
    """The first failure of the generation; it stays the cause until another change."""


@dataclass(frozen=True, slots=True)
class BadState:
    """States of `step` or beyond, of `generation` or an earlier one, which end the workers that load them."""

    generation: Positive
    step: Count


@dataclass(frozen=True, slots=True)
class Restarts:
    """The job's restart budget as used so far; planned changes and lost nodes do not count."""

    failures: Count = 0
    without_progress: Count = 0
    """Failures in a row without progress in between."""
    fingerprint: Annotated[str, line(1024)] = ""
    same_fingerprint: Count = 0
    """How many of the newest of these failures share `fingerprint`."""
    at_load: Count = 0
    """How many of these came before any step beyond the state that was loaded."""
    bad_state: BadState | None = None
    """What the workers must not load, until there is progress."""
    culprit: Annotated[str, line(128)] = ""
    """The life of the agent on whose node alone the newest failures in a row began; empty: there is none."""
    blamed: Count = 0
    """How many these are."""
    exclusions: Count = 0
    """Nodes excluded for failures, one after the other, while no generation ran for a minute."""
    free_retries: Count = 0
    """Failures that cost no budget since a step beyond all earlier ones."""
    from_outside: Count = 0
    """Failures in a row, without progress in between, in which a worker was killed from outside the job."""


@dataclass(frozen=True, slots=True)
class Standby:
    """A live node outside a world, and its memory server, from which the world's workers load copies only it has."""

    node: Name
    memory: Endpoint


@dataclass(frozen=True, slots=True)
class World(Record):
    """The ordered members of one generation, and the phase this generation is in."""

    job: Name
    generation: Positive
    phase: Phase
    members: Annotated[tuple[Member, ...], _read_members]
    master: Endpoint
    cause: Cause
    restarts: Restarts = field(default_factory=Restarts)
    step: Count = 0
    """Highest step that any node had reported before this generation: it makes progress by passing it."""
    result: Result | None = None
    final_saver: Annotated[str, line(128)] = ""
    """The member that brings the state after the last step to disk now: no generation goes on with it at once."""
    limits: Limits | None = None
    """The job's, whichever node coordinates: those of the node that `limits_of` names."""
    limits_of: Annotated[str, line(128)] = ""
    program: Program | None = None
    """What the job runs: that of the same node."""
    unproven: tuple[Count, ...] = ()
    """Places of the members that were not in the last healthy generation."""
    exclusions: Annotated[tuple[Exclusion, ...], AtMost(MAX_EXCLUSIONS)] = ()
    """At most one of each node, the oldest first."""
    standbys: tuple[Standby, ...] = ()
    run: NameOrNone = ""
    """The same for all generations of this job until it ends, and no other job's: its checkpoints bear this name."""
    inquiry: HangProbe | None = None
    """The newest inquiry of this generation: its members say what their workers do."""

    def __post_init__(self) -> None:
        """Raises Invalid."""
        if not self.members:
            raise Invalid("it has no members")
        for names in ({m.node for m in self.members}, {m.incarnation for m in self.members}):
            if len(names) != len(self.members):
                raise Invalid("it lists a node twice")
        if (self.phase is Phase.ENDED) != (self.result is not None):
            raise Invalid(f"phase {self.phase.value!r} with result {self.result}")
        if self.cause.kind is CauseKind.FAILURE and self.cause.failure is None:
            raise Invalid("its cause is a failure that it does not name")

    @property
    def trains(self) -> bool:
        """Its members' workers go on from step to step."""
        return self.phase in (Phase.RUNNING, Phase.DRAINING)

    @property
    def was_carried_over(self) -> bool:
        """Its store began empty: it is not known of any member that it is gone, only of the store before."""
        return self.cause.kind is CauseKind.LOST and not self.cause.node

    @property
    def drains(self) -> bool:
        """A planned change is under way in which no agent signals the workers."""
        return self.phase in (Phase.DRAINING, Phase.LAST_STEP)

    @property
    def stops(self) -> bool:
        """Its members' workers end, and the next generation waits for that."""
        return self.phase in (Phase.LAST_STEP, Phase.STOPPING)

    @property
    def size(self) -> int:
        """Number of workers: WORLD_SIZE."""
        return sum(member.slots for member in self.members)

    @property
    def node_of_ranks(self) -> tuple[str, ...]:
        """By rank."""
        return tuple(member.node for member in self.members for _ in range(member.slots))

    def comparison_of(self, leader: NodeRecord | None) -> PaceComparison | None:
        """The one in the coordinator's record, if it is of this generation, which trains."""
        found = leader.comparison if leader is not None and self.trains else None
        return found if found is not None and found.generation == self.generation else None

    def max_restarts(self, own: int | None) -> int | None:
        """The job's; a world that names no limits leaves each node its own."""
        return own if self.limits is None else self.limits.max_restarts

    def in_role(self, role: str) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == role)

    def member(self, incarnation: str) -> Member | None:
        return next((member for member in self.members if member.incarnation == incarnation), None)

    def exclusion(self, node: str) -> Exclusion | None:
        """The exclusion of this node that is in force in this world. All exclusions end with the job."""
        rows = self.exclusions if self.phase is not Phase.ENDED else ()
        return next((one for one in rows if one.node == node and not one.readmitted), None)

    def carried_over(self) -> World:
        """What an empty store that takes the place of this world's begins with: all of its members may still train."""
        cause = Cause(CauseKind.LOST, detail=f"the store that held generation {self.generation} is gone")
        return replace(self, phase=Phase.STOPPING, cause=cause, final_saver="")

    @staticmethod
    def from_json(text: str) -> World:
        return World.read(WORLD_KEY, text)


@dataclass(frozen=True, slots=True)
class StopAt(Record):
    """Under `STOP_KEY`: all workers of `generation` end after this step, which none of them can have passed."""

    generation: Positive
    step: Count
    paused: bool = False
    """Rank 0 named it between two steps: others may be in the next one already, and wait there for rank 0 in vain."""

    @staticmethod
    def from_json(text: str) -> StopAt:
        return StopAt.read(STOP_KEY, text)


@dataclass(frozen=True, slots=True)
class PeerStatus(Record):
    """An agent's answer to a peer that asks over HTTP who it is. Ages are counted when it answers."""

    node: Name
    incarnation: Name
    generation: Count
    """The generation whose workers run on this node; 0 when there are none, or when they are being stopped."""
    confirmed_s: Age | None = None
    """Age of the newest confirmation of this node's lease by the store; None without a lease."""
    whole_s: Age | None = None
    """Age of the newest sign that every member of this generation still runs it; None when there is none."""

    @staticmethod
    def from_json(text: str) -> PeerStatus:
        return PeerStatus.read(INTRODUCTION, text)


def standbys_among(nodes: Iterable[NodeRecord], ended: int) -> tuple[Standby, ...]:
    """Those of these nodes outside the world that have a memory server, the first MAX_STANDBYS.

    A node that leaves, and has handed over what it had of generation `ended`, is no standby.
    """
    found = [
        Standby(node.node, Endpoint(node.address, node.memory))
        for node in nodes
        if node.memory and not (node.leaving and node.has(Condition.DRAINED, ended))
    ]
    return tuple(found[:MAX_STANDBYS])


def assign_ranks(nodes: tuple[NodeRecord, ...]) -> tuple[Member, ...]:
    """Members with dense ranks: rank = first_rank + local_rank, in the order given (I3)."""
    members: list[Member] = []
    first_rank = 0
    for node in nodes:
        members.append(Member(node.node, node.incarnation, node.slots, first_rank, node.http, node.role))
        first_rank += node.slots
    return tuple(members)


_ROW, _ROW_WITH_HTTP = [str, str, int, str], [str, str, int, str, str, int]


def _read_members(raw: Any) -> tuple[Member, ...]:
    """Written for speed: there may be a thousand, and each change of the world brings them all."""
    if not isinstance(raw, list):
        raise Invalid(f"{shown(raw)}, expected a list")
    is_name = NAME.fullmatch
    members: list[Member] = []
    first_rank = 0
    for row in raw:
        types, http = [*map(type, row)] if type(row) is list else [], None
        fits = types in (_ROW, _ROW_WITH_HTTP) and is_name(row[0]) and is_name(row[1]) and 1 <= row[2] <= 4096
        fits = fits and (not row[3] or ROLE.fullmatch(row[3]))
        if fits and types == _ROW_WITH_HTTP:
            http = Endpoint(clean(row[4]), row[5])
            fits = len(row[4]) <= 256 and 0 <= http.port <= 65535
        if not fits:
            expected = "[name, incarnation, slots from 1 to 4096, role, and perhaps address and port]"
            raise Invalid(f"{shown(row)}, expected {expected}", f"[{len(members)}]")
        members.append(Member(row[0], row[1], row[2], first_rank, http, row[3] or DEFAULT_ROLE))
        first_rank += row[2]
    return tuple(members)
