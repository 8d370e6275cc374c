"""What nodes tell each other: in the store one `NodeRecord` per node, one `World` and one `StopAt` per job, and an
`Introduction` from node to node.

All are small frozen values with one JSON form and one validating reader each (`from_json`), because anybody who
can reach the store or a port can write there: unknown schema, wrong types, sizes and ranges raise `RecordInvalid`,
which names the key. Durations are seconds; no field holds an instant, since clocks of two nodes are never compared.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import RecordInvalid
from .fields import NAME, Fields, clean
from .terms import Limits, Program

SCHEMA = 7
"""Version of all records. A reader refuses any other: half an understanding is worse than none."""

MAX_RECORD_BYTES = 1024 * 1024
"""Less than a store takes in one request, evictions included."""
MAX_MEMBERS_BYTES = 704 * 1024
"""Of these, the members of a world: 4,096 nodes, the most that a job can be told to have, have 176 bytes each. The rest
is room for the longest failure, and for those that were put aside."""
MAX_ROW_BYTES = 4096
"""Of one member at most."""
MAX_ASIDE = 32
MAX_ASIDE_REASON = 512
MAX_TEXT = 4096
"""Characters of a text for people; a longer one is refused, so its writer cuts it."""
MAX_RDMA_PORTS = 64
WORLD_KEY = "world"
STOP_KEY = "stop_at"
INTRODUCTION = "the answer of a peer"
"""Stands for the key in what is said of an introduction that cannot be read."""
NODES_PREFIX = "nodes/"
DRAIN_PREFIX = "drain/"


def node_key(node: str) -> str:
    return NODES_PREFIX + node


def drain_key(node: str) -> str:
    return DRAIN_PREFIX + node


def life_of(incarnation: str) -> str:
    """The agent's, whatever the number of times that it has joined."""
    return incarnation.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Failure:
    """The first worker of a node that failed in `generation`.

    `fingerprint` is the same text for the same failure in another generation; `summary` is for people and only
    passed on; `detail` is the agent's own JSON form of it, opaque here. `final`: no restart of the job helps.
    """

    generation: int
    fingerprint: str
    summary: str
    detail: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    address: str
    port: int

    @staticmethod
    def read(fields: Fields) -> Endpoint:
        return Endpoint(fields.text("address", 256), fields.integer("port", 0, 65535))

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The interface that this node's workers use, for the comparison with others'. 0 Mbit/s: not known."""

    interface: str
    speed_mbps: int
    mtu: int
    rdma_ports: tuple[str, ...] = ()
    """All ACTIVE ones of the node, like "mlx5_0:1"."""

    @staticmethod
    def read(fields: Fields) -> NetworkFacts:
        return NetworkFacts(
            fields.text("interface", 64),
            fields.integer("speed_mbps", 0, 2**31 - 1),
            fields.integer("mtu", 0, 2**31 - 1),
            fields.texts("rdma_ports", MAX_RDMA_PORTS, 80),
        )


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """How far the workers of one generation have come on one node."""

    generation: int
    loaded: int | None = None
    """The step of the state that they have loaded; None when they have told of none."""
    reached: int | None = None
    """The highest step that they have finished or saved since; None before the first."""

    @staticmethod
    def read(fields: Fields) -> GenerationProgress:
        return GenerationProgress(
            fields.integer("generation"),
            fields.integer_or_none("loaded"),
            fields.integer_or_none("reached"),
        )


class Condition(enum.Enum):
    """What may hold for one node's workers in one generation."""

    STABLE = "stable"
    """They have run for longer than a minute."""
    NOTIFIED = "notified"
    """All of them have been told that a planned change waits for them."""
    POLLING = "polling"
    """All of them have asked for such news at a step's end, and so will again."""
    DRAINED = "drained"
    """They have ended by themselves at the step that all agreed on, or need not."""
    STATE_SAVED = "state_saved"
    """This node keeps the state after that step."""
    SUCCEEDED = "succeeded"
    """All of them have ended with success."""
    STOPPED = "stopped"
    """None of them is left, nor of an earlier generation, and `port` is fresh since."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What one node says about itself, under its lease."""

    node: str
    incarnation: str
    address: str
    """Where peers reach this node's workers' store, should the node become the world's master."""
    port: int
    """A port bound and listening at `address`, never used by any generation before."""
    slots: int
    """Workers that this node runs."""
    http: Endpoint | None = None
    """Where this node's agent introduces itself to its peers; None when they cannot reach it."""
    network: NetworkFacts | None = None
    limits: Limits | None = None
    """With which this node was started. None: it has nothing to say about it."""
    program: Program | None = None
    hosts_store: bool = False
    """The rendezvous store ends with this node's agent."""
    leaving: bool = False
    ready: bool = False
    """Workers can start here at once: what takes seconds has been done before anybody needs it."""
    generation: int = 0
    """The newest generation on whose workers here `conditions` has something to report."""
    conditions: frozenset[Condition] = frozenset()
    failure: Failure | None = None
    step: int = 0
    """Highest training step that this node's workers have reported (finished or saved); 0 when they do not."""
    progress: GenerationProgress | None = None
    seen: int = 0
    """The highest generation that earlier incarnations have known, perhaps in a store that is no more. The next one is
    higher."""

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

    def to_json(self) -> str:
        return _dump(self)

    @staticmethod
    def from_json(key: str, text: str) -> NodeRecord:
        record = NodeRecord.read(_fields(key, text))
        if key != node_key(record.node):
            raise RecordInvalid(key, f"it is the record of node {record.node!r}")
        return record

    @staticmethod
    def read(fields: Fields) -> NodeRecord:
        return NodeRecord(
            node=fields.name("node"),
            incarnation=fields.name("incarnation"),
            address=fields.text("address", 256),
            port=fields.integer("port", 0, 65535),
            slots=fields.integer("slots", 1, 4096),
            http=fields.optional("http", Endpoint.read),
            network=fields.optional("network", NetworkFacts.read),
            limits=fields.optional("limits", Limits.read),
            program=fields.optional("program", Program.read),
            hosts_store=fields.boolean("hosts_store"),
            leaving=fields.boolean("leaving"),
            ready=fields.boolean("ready"),
            generation=fields.integer("generation"),
            conditions=_conditions(fields),
            failure=fields.optional("failure", _failure),
            step=fields.integer("step"),
            progress=fields.optional("progress", GenerationProgress.read),
            seen=fields.integer("seen"),
        )


@dataclass(frozen=True, slots=True)
class Member:
    """One node's place in a world: workers `first_rank` to `first_rank + slots - 1` are its."""

    node: str
    incarnation: str
    slots: int
    first_rank: int
    http: Endpoint | None = None

    @property
    def row(self) -> tuple[str | int, ...]:
        """Its form in JSON: every node reads every member of every world. `first_rank` follows from the others."""
        http = (self.http.address, self.http.port) if self.http is not None else ()
        return (self.node, self.incarnation, self.slots, *http)


class Phase(enum.Enum):
    RUNNING = "running"
    """The members train."""
    DRAINING = "draining"
    """They train on, and notify their workers that a planned change waits."""
    LAST_STEP = "last_step"
    """All workers know of it: they end by themselves at the step that `StopAt` names, and no agent signals them."""
    STOPPING = "stopping"
    """The members stop their workers and say so; the next generation closes when all have, or are gone."""
    ENDED = "ended"
    """The job is over; `result` says how."""


TRANSITIONS: Mapping[Phase | None, frozenset[Phase]] = {
    None: frozenset({Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.RUNNING, Phase.DRAINING, Phase.STOPPING, Phase.ENDED}),
    Phase.DRAINING: frozenset({Phase.LAST_STEP, Phase.STOPPING, Phase.ENDED}),
    Phase.LAST_STEP: frozenset({Phase.STOPPING, Phase.ENDED, Phase.RUNNING}),
    Phase.STOPPING: frozenset({Phase.ENDED, Phase.RUNNING}),
    Phase.ENDED: frozenset({Phase.RUNNING}),
}
"""Which phase may follow in the key `world`; None: it is not there. RUNNING begins the next generation, but for RUNNING
itself, which only learns that some workers have ended with success. What an empty store begins with is `carried_over`,
and no step of this table."""


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
    node: str = ""
    detail: str = ""
    failure: Failure | None = None
    """The first failure of the generation; it stays the cause until another change."""


@dataclass(frozen=True, slots=True)
class BadState:
    """States of `step` or beyond, of `generation` or an earlier one, which end the workers that load them."""

    generation: int
    step: int

    @staticmethod
    def read(fields: Fields) -> BadState:
        return BadState(fields.integer("generation", 1), fields.integer("step"))


@dataclass(frozen=True, slots=True)
class Restarts:
    """The job's restart budget as used so far; planned changes and lost nodes do not count."""

    failures: int = 0
    without_progress: int = 0
    """Failures in a row without progress in between."""
    fingerprint: str = ""
    same_fingerprint: int = 0
    """How many of the newest of these failures share `fingerprint`."""
    at_load: int = 0
    """How many of these came before any step beyond the state that was loaded."""
    bad_state: BadState | None = None
    """What the workers are told not to load, until there is progress."""
    culprit: str = ""
    """The node on which every failure since the last healthy generation began; empty when there are several."""
    blamed: int = 0
    """How many these are."""


@dataclass(frozen=True, slots=True)
class Aside:
    """A life of a node's agent that is left out of all worlds, though it stands ready."""

    node: str
    life: str
    reason: str

    @staticmethod
    def read(fields: Fields) -> Aside:
        return Aside(fields.name("node"), fields.name("life"), fields.text("reason", MAX_ASIDE_REASON))


@dataclass(frozen=True, slots=True)
class World:
    """The ordered members of one generation, and the phase this generation is in."""

    job: str
    generation: int
    phase: Phase
    members: tuple[Member, ...]
    master: Endpoint
    cause: Cause
    restarts: Restarts = field(default_factory=Restarts)
    step: int = 0
    """Highest step that any node had reported before this generation: it makes progress by passing it."""
    result: Result | None = None
    final_saver: str = ""
    """The member that brings the state after the last step to disk now: no generation goes on with it at once."""
    limits: Limits | None = None
    """The job's, whichever node coordinates: those of the node that `limits_of` names."""
    limits_of: str = ""
    program: Program | None = None
    """What the job runs: that of the same node."""
    proven: int = 0
    """So many members, the first ones, were in the last healthy generation."""
    aside: tuple[Aside, ...] = ()
    finishing: bool = False
    """Some members' workers have all ended with success for a while now, and others' have not."""
    run: str = ""
    """The same for all generations of this job until it ends, and no other job's: its checkpoints bear this name."""

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

    def max_restarts(self, own: int | None) -> int | None:
        """The job's; a world that names no limits leaves each node its own."""
        return own if self.limits is None else self.limits.max_restarts

    def member(self, incarnation: str) -> Member | None:
        return next((member for member in self.members if member.incarnation == incarnation), None)

    def carried_over(self) -> World:
        """What an empty store that takes the place of this world's begins with: all of its members may still train."""
        cause = Cause(CauseKind.LOST, detail=f"the store that held generation {self.generation} is gone")
        return replace(self, phase=Phase.STOPPING, cause=cause, final_saver="")

    def to_json(self) -> str:
        return _dump(self)

    @staticmethod
    def from_json(text: str) -> World:
        return World.read(_fields(WORLD_KEY, text))

    @staticmethod
    def read(fields: Fields) -> World:
        world = World(
            job=fields.name("job"),
            generation=fields.integer("generation", 1),
            phase=fields.choice("phase", Phase),
            members=_members(fields),
            master=fields.one("master", Endpoint.read),
            cause=fields.one("cause", _cause),
            restarts=fields.one("restarts", _restarts),
            step=fields.integer("step"),
            result=None if fields.value("result") is None else fields.choice("result", Result),
            final_saver=fields.text("final_saver", 128),
            finishing=fields.boolean("finishing"),
            limits=fields.optional("limits", Limits.read),
            limits_of=fields.text("limits_of", 128),
            program=fields.optional("program", Program.read),
            proven=fields.integer("proven"),
            aside=fields.many("aside", Aside.read),
            run=fields.text("run", 128),
        )
        if not world.members:
            raise RecordInvalid(WORLD_KEY, "it has no members")
        if world.run and not NAME.fullmatch(world.run):
            raise fields.bad("run", "not a name of letters, digits, '.', '_' and '-'")
        for names in ({m.node for m in world.members}, {m.incarnation for m in world.members}):
            if len(names) != len(world.members):
                raise RecordInvalid(WORLD_KEY, "it lists a node twice")
        if (world.phase is Phase.ENDED) != (world.result is not None):
            raise RecordInvalid(WORLD_KEY, f"phase {world.phase.value!r} with result {world.result}")
        if world.cause.kind is CauseKind.FAILURE and world.cause.failure is None:
            raise RecordInvalid(WORLD_KEY, "its cause is a failure that it does not name")
        return world


@dataclass(frozen=True, slots=True)
class StopAt:
    """Under `STOP_KEY`: all workers of `generation` end after this step, which none of them can have passed."""

    generation: int
    step: int
    paused: bool = False
    """Rank 0 said so between two steps: others may be in the next one already, and wait there for rank 0 in vain."""

    def to_json(self) -> str:
        return _dump(self)

    @staticmethod
    def from_json(text: str) -> StopAt:
        fields = _fields(STOP_KEY, text)
        return StopAt(fields.integer("generation", 1), fields.integer("step"), fields.boolean("paused"))


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Under `drain_key`: an operator asks this life of the node's agent to leave the job. It means no other life."""

    incarnation: str

    def to_json(self) -> str:
        return _dump(self)

    @staticmethod
    def from_json(key: str, text: str) -> DrainRequest:
        return DrainRequest(_fields(key, text).name("incarnation"))


@dataclass(frozen=True, slots=True)
class Introduction:
    """What an agent says of itself to a peer that asks it over HTTP. Ages are counted when it is said."""

    node: str
    incarnation: str
    generation: int
    """The generation whose workers run on this node; 0 when there are none, or when they are being stopped."""
    confirmed_s: float | None = None
    """Age of the newest confirmation of this node's lease by the store; None without a lease."""
    whole_s: float | None = None
    """Age of the newest sign that every member of this generation still runs it; None when there is none."""

    def to_json(self) -> str:
        return _dump(self)

    @staticmethod
    def from_json(text: str) -> Introduction:
        fields = _fields(INTRODUCTION, text)
        return Introduction(
            fields.name("node"),
            fields.name("incarnation"),
            fields.integer("generation"),
            fields.age("confirmed_s"),
            fields.age("whole_s"),
        )


def row_bytes(node: NodeRecord) -> int:
    """At least as many as the node takes among the members of a world."""
    at = node.http.address if node.http is not None else ""
    return len(node.node) + len(node.incarnation) + len(json.dumps(at)) + 40


def newest(one: World | None, other: World | None) -> World | None:
    """The one of the higher generation; of one generation `other`."""
    if one is None or (other is not None and other.generation >= one.generation):
        return other
    return one


def line_up(nodes: tuple[NodeRecord, ...]) -> tuple[Member, ...]:
    """Members with dense ranks: rank = first_rank + local_rank, in the order given (I3)."""
    members: list[Member] = []
    first_rank = 0
    for node in nodes:
        members.append(Member(node.node, node.incarnation, node.slots, first_rank, node.http))
        first_rank += node.slots
    return tuple(members)


def _fields(key: str, text: str) -> Fields:
    return Fields.of_text(key, text, SCHEMA, MAX_RECORD_BYTES)


def _dump(record: NodeRecord | World | StopAt | DrainRequest | Introduction) -> str:
    return json.dumps({"v": SCHEMA, **_plain(record)}, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, Member):
        return value.row
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def _conditions(fields: Fields) -> frozenset[Condition]:
    names = fields.texts("conditions", len(Condition), 16)
    try:
        return frozenset(map(Condition, names))
    except ValueError:
        raise fields.bad("conditions", "not a list of conditions that this agent knows") from None


def _failure(fields: Fields) -> Failure:
    return Failure(
        fields.integer("generation", 1),
        fields.text("fingerprint", 1024),
        fields.text("summary", MAX_TEXT),
        fields.text("detail", 16384),
        fields.boolean("final"),
    )


_ROW, _ROW_WITH_HTTP = [str, str, int], [str, str, int, str, int]


def _members(fields: Fields) -> tuple[Member, ...]:
    """Written for speed: there may be a thousand, and each change of the world brings them all."""
    is_name = NAME.fullmatch
    members: list[Member] = []
    first_rank = 0
    for row in fields.rows("members"):
        types, http = [*map(type, row)], None
        fits = types in (_ROW, _ROW_WITH_HTTP) and is_name(row[0]) and is_name(row[1]) and 1 <= row[2] <= 4096
        if fits and types == _ROW_WITH_HTTP:
            http = Endpoint(clean(row[3]), row[4])
            fits = len(http.address) <= 256 and 0 <= http.port <= 65535
        if not fits:
            expected = "name, incarnation, slots from 1 to 4096, and perhaps address and port"
            raise fields.bad("members", f"no list of [{expected}]: {str(row)[:200]}")
        members.append(Member(row[0], row[1], row[2], first_rank, http))
        first_rank += row[2]
    return tuple(members)


def _cause(fields: Fields) -> Cause:
    return Cause(
        fields.choice("kind", CauseKind),
        fields.text("node", 128),
        fields.text("detail", MAX_TEXT),
        fields.optional("failure", _failure),
    )


def _restarts(fields: Fields) -> Restarts:
    return Restarts(
        fields.integer("failures"),
        fields.integer("without_progress"),
        fields.text("fingerprint", 1024),
        fields.integer("same_fingerprint"),
        fields.integer("at_load"),
        fields.optional("bad_state", BadState.read),
        fields.text("culprit", 128),
        fields.integer("blamed"),
    )
