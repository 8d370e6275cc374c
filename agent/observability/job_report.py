"""The report of a job by `elastic-agent status` and the page: the state of every node, and what follows for the job.

A pure function of the answers of a source and of the nodes, and one plain form in JSON (`docs/status.md`). Ages are
counted by the node that knows them.

The page itself is one HTML file that loads nothing else. Its content security policy allows only the file's own script
and style, by their digests, and connections to the agent that served it. Texts of other nodes are inserted as text,
never as markup: the script does so, and the policy enforces it (trusted types). Even injected markup could neither run
nor send anything. It asks every few seconds for the journal's events and for this report.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ...health import stragglers
from ...health.http import JSON, TEXT, Page, PageRequest
from ...health.stragglers import PaceComparison, Straggler
from ...rendezvous.coordinator import exclusions
from ...rendezvous.coordinator.restarts import RestartPolicy
from ...rendezvous.messages import Exclusion, differences
from ...rendezvous.records import CauseKind, Endpoint, Member, NodeRecord, Phase, Restarts, Result, World
from ...rendezvous.text import shortened
from ..common.exits import CannotDo
from ..output.journal import EVENT, Journal
from ..output.journal import SCHEMA as EVENTS_SCHEMA
from ..output.masking import masked
from .sources import AT_ONCE, FoundJob, JobSource, NodeAnswer, Unreachable, ask_nodes
from .status import Checkpoint, NodeState, NodeStatus

log = logging.getLogger(__name__)

SCHEMA = 3
"""Of the JSON form. It grows only by new keys; anything else makes a new number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One life of a node. In JSON its fields and those of its status stand side by side."""

    node: str
    incarnation: str
    slots: int = 0
    first_rank: int | None = None
    """None for a node that is not a member of the world."""
    address: Endpoint | None = None
    coordinates: bool = False
    leaving: bool = False
    excluded: bool = False
    """No world includes it until it is readmitted."""
    has_lease: bool | None = None
    """None when the source does not know."""
    silence: Unreachable | None = None
    status: NodeStatus | None
    """None exactly when it does not answer."""

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
    """--max-restarts; None without a limit, and before the first world."""
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
    """The newest on disk."""
    memory: Checkpoint | None
    """The newest in the memory of a node."""
    replica: Checkpoint | None
    coordinator: str | None
    waiting_for: str
    complete: bool
    """`nodes` holds every node of the job."""
    nodes: tuple[NodeReport, ...]
    """Members by rank, then the others, oldest first."""
    exclusions: tuple[Exclusion, ...]
    """In force or over, the oldest first."""
    usual_us: int | None
    """The median over all ranks of their own time for a step; None: not known."""
    stragglers: tuple[Straggler, ...]
    """Ranks that are slower than the others, by rank."""
    notes: tuple[str, ...]
    """What is wrong, in words."""


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
            own = {name: as_json(getattr(value, name)) for name in (*_names(NodeReport), "state")}
            status = {name: as_json(getattr(value.status, name, None)) for name in _names(NodeStatus)}
            return {**status, **own}
    if is_dataclass(value):
        return {name: as_json(getattr(value, name)) for name in _names(type(value))}
    return value


def _names(record: type[Any]) -> list[str]:
    return [field.name for field in fields(record) if field.name != "status"]


def look(source: JobSource, timeout_s: float, at_once: int = AT_ONCE) -> list[JobReport]:
    """Each job of the source, whose nodes are asked by so many threads. Raises CannotDo."""
    return [report(found, ask_nodes(found.job, timeout_s, at_once)) for found in source.jobs()]


def report(found: FoundJob, answers: Mapping[str, NodeAnswer]) -> JobReport:
    """`answers` are by incarnation."""
    job, world = found.job, found.job.world
    nodes = tuple(_nodes(found, answers))
    statuses = [node.status for node in nodes if node.status is not None]
    leading = next((node.status for node in nodes if node.coordinates), None)
    best = leading or job.agent or next(iter(statuses), None)
    state = _state(world, nodes)
    written = [node.step for node in job.nodes] + ([world.step] if world is not None else [])
    step = max([status.step for status in statuses], default=0) or max(written, default=0)
    record = next((node for node in job.nodes if node.node == job.coordinator), None)
    comparison = world.comparison_of(record) if world is not None else None
    waits = best is not None and state in ("waiting", "stopping", "stopped")
    return JobReport(
        job=job.job,
        asked=found.asked,
        state=state,
        generation=world.generation if world is not None else 0,
        phase_age_s=best.phase_s if best is not None and world is not None else None,
        world_size=world.size if world is not None else 0,
        group_world_size=len(world.members) if world is not None else 0,
        master=world.master if world is not None else None,
        result=world.result if world is not None else None,
        cause=_cause(world) if world is not None else None,
        restarts=_restarts(world, best),
        step=step,
        checkpoint=_newest(status.checkpoint for status in statuses),
        memory=_newest(status.memory for status in statuses),
        replica=_newest(status.replica for status in statuses),
        coordinator=job.coordinator,
        waiting_for=best.waiting_for if best is not None and waits else "",
        complete=job.complete,
        nodes=nodes,
        exclusions=world.exclusions if world is not None else (),
        usual_us=comparison.usual_us if comparison is not None else None,
        stragglers=comparison.stragglers if comparison is not None else (),
        notes=tuple(_notes(found, nodes, step, comparison, waits=waits)),
    )


def _nodes(found: FoundJob, answers: Mapping[str, NodeAnswer]) -> Iterator[NodeReport]:
    job, world, asked = found.job, found.job.world, found.job.agent
    records = {record.incarnation: record for record in job.nodes}
    lives = world is not None and world.phase is not Phase.ENDED
    members = world.members if world is not None and lives else ()
    excluded = exclusions.left_out(world.exclusions) if world is not None and lives else {}

    def node(of: Member | NodeRecord, first_rank: int | None) -> NodeReport:
        record, answer = records.get(of.incarnation), answers.get(of.incarnation, Unreachable.HIDDEN)
        if isinstance(answer, Unreachable) and asked is not None and asked.incarnation == of.incarnation:
            answer = asked
        return NodeReport(
            node=of.node,
            incarnation=of.incarnation,
            slots=of.slots,
            first_rank=first_rank,
            address=record.http if record is not None else of.http,
            coordinates=record is not None and record.node == job.coordinator,
            leaving=record is not None and record.leaving,
            excluded=of.node in excluded,
            has_lease=True if record is not None else (False if job.complete else None),
            silence=answer if isinstance(answer, Unreachable) else None,
            status=answer if isinstance(answer, NodeStatus) else None,
        )

    yield from (node(member, member.first_rank) for member in members)
    inside = {member.incarnation for member in members}
    yield from (node(record, None) for record in job.nodes if record.incarnation not in inside)
    if asked is not None and asked.incarnation not in inside | records.keys():
        yield NodeReport(node=asked.node, incarnation=asked.incarnation, status=asked)


def _state(world: World | None, nodes: Iterable[NodeReport]) -> str:
    """The phase of the world, unless no member has a worker: then it waits, or has lost its store."""
    if world is None:
        return "waiting"
    if world.phase is Phase.ENDED:
        return "succeeded" if world.result is Result.SUCCEEDED else "failed"
    nodes = list(nodes)
    statuses = [node.status for node in nodes if node.status is not None]
    members = [node for node in nodes if node.first_rank is not None]
    gone = all(node.status is not None or node.state in ("gone", "lost") for node in members)
    known = gone if world.trains else bool(statuses)
    if not known or any(status.workers for status in statuses):
        return "running" if world.trains else "stopping"
    confirmed = any(s.lease_age_s is not None and s.lease_age_s <= s.lease_ttl_s for s in statuses)
    return "waiting" if confirmed else "stopped"


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
    known_as = worker.cause if cause.kind is CauseKind.FAILURE and worker is not None else None
    return CauseReport(
        cause.kind, cause.node or None, worker.rank if worker is not None else None, text, known_as
    )


def _restarts(world: World | None, best: NodeStatus | None) -> RestartReport:
    used = world.restarts if world is not None else Restarts()
    limit = world.max_restarts(None) if world is not None else None
    fruitless_left = max(0, RestartPolicy().max_without_progress - used.without_progress)
    return RestartReport(
        failures=used.failures,
        fruitless=used.without_progress,
        limit=limit,
        left=max(0, limit - used.failures) if limit is not None else None,
        fruitless_left=fruitless_left if limit is None else None,
        backoff_s=best.backoff_s if best is not None else 0.0,
    )


def _newest(checkpoints: Iterable[Checkpoint | None]) -> Checkpoint | None:
    """Of one that several know, its age: only the node that saved it knows it."""
    known = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    if not known:
        return None
    step = max(checkpoint.step for checkpoint in known)
    ages = [checkpoint.age_s for checkpoint in known if checkpoint.step == step]
    return Checkpoint(step, min((age for age in ages if age is not None), default=None))


def _notes(
    found: FoundJob, nodes: Iterable[NodeReport], step: int, comparison: PaceComparison | None, *, waits: bool
) -> Iterator[str]:
    """`waits`: the report says already for what."""
    job, world = found.job, found.job.world
    for node in nodes:
        yield from _of_node(node, waits=waits)
    if world is not None and world.phase is not Phase.ENDED:
        for one in exclusions.left_out(world.exclusions).values():
            yield f"node {one.node} is {exclusions.in_words(one)}"
        yield from _other_limits(world, job.nodes)
    if comparison is not None:
        yield from (stragglers.in_words(one, comparison.usual_us) for one in comparison.stragglers)
    yield from found.notes
    if not step and any(node.status is not None and node.status.state == "running" for node in nodes):
        yield (
            "no steps reported: call elastic_agent.worker.step() once a step, to see steps, their rate and how long "
            "training stood still (docs/worker.md)"
        )
    if not job.complete:
        yield "the coordinator does not answer: nodes beyond the world may be missing here"


def _of_node(node: NodeReport, *, waits: bool) -> Iterator[str]:
    status = node.status
    if status is None:
        known = {True: "; the store still has its record", False: "; its lease has ended", None: ""}
        if node.silence not in (None, Unreachable.HIDDEN):
            yield f"node {node.node}: {node.silence.sentence.format(http=node.address)}{known[node.has_lease]}"
        return
    if status.waiting_for and node.first_rank is not None and node.state == "joining" and not waits:
        yield f"node {node.node} has no workers, waiting: {status.waiting_for}"
    if status.notice:
        left = f"{status.notice_s:.0f} s are left" if status.notice_s is not None else "no deadline is known"
        yield f"node {node.node}: {status.notice}; {left}"
    for check in status.checks:
        yield f"node {node.node}: check {check.check} {check.outcome.value}s: {check.summary}"
    if status.partners_unreachable:
        yield (
            f"node {node.node}: its shards have no replica on {shortened(status.partners_unreachable)}: if it is lost "
            "now, the job may go back to the newest checkpoint on disk"
        )
    if status.lease_age_s is not None and status.lease_age_s > status.lease_ttl_s:
        yield (
            f"node {node.node}: its lease was last confirmed {status.lease_age_s:.1f} s ago and lives "
            f"{status.lease_ttl_s:g} s: it does not reach the store"
        )


def _other_limits(world: World, nodes: Iterable[NodeRecord]) -> Iterator[str]:
    """A sentence for each node that was started with other limits than the job has."""
    for node in nodes:
        if others := "; ".join(differences(node.limits, node.program, world.limits, world.program)):
            yield f"node {node.node} was started with {others}; what the job has is node {world.limits_of}'s"


# --- The page

PAGE_PATH = "/"
FILE = Path(__file__).with_name("page.html")
_PART = {name: re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("script", "style")}


def policy(html: str) -> str:
    """The content security policy of this page."""

    def digests(name: str) -> str:
        parts = (hashlib.sha256(part.encode()).digest() for part in _PART[name].findall(html))
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in parts)

    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {digests('script')}",
            f"style-src {digests('style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def read_page() -> Page:
    html = FILE.read_text(encoding="utf-8")
    headers = (
        ("Content-Security-Policy", policy(html)),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-store"),
    )
    return Page(HTTPStatus.OK, "text/html; charset=utf-8", html.encode(), headers)


OVERVIEW_PATH = "/overview"
OVERVIEW_SCHEMA = 3
LOOKS_WITHIN_S = 2.0
"""How long other nodes may take to answer for the page."""
ASKS_AT_ONCE = 16
MOST_EVENTS = 500
"""The most events in one answer."""

_NUMBER = re.compile(r"[0-9]{1,18}")


class Board:
    """What the page asks for: the journal's events, and the state of the job, read as `elastic-agent status` does.

    It is read when it is asked for: while no page is open, it costs nothing. For any thread.
    """

    def __init__(self, journal: Journal, about: dict[str, str], node: NodeState, source: JobSource) -> None:
        """`about`: job, node, incarnation and version of this agent."""
        self._journal = journal
        self._about = about
        self._node = node
        self._source = source

    def events(self, request: PageRequest) -> Page:
        """`/events?since=N`: the events with a number above N, at most `MOST_EVENTS`."""
        since = request.query.get("since", "0")
        if not _NUMBER.fullmatch(since):
            text = f"since is {since[:80]!r}, expected a whole number: that of the last event that you have\n"
            return Page(HTTPStatus.BAD_REQUEST, TEXT, text.encode(errors="replace"))
        found = self._journal.since(int(since), MOST_EVENTS)
        head = json.dumps({"schema": EVENTS_SCHEMA, **self._about, "newest": self._journal.newest})
        body = ",".join(EVENT.encode(event) for event in found)
        return Page(HTTPStatus.OK, JSON, f'{head[:-1]}, "events": [{body}]}}'.encode())

    def overview(self, _: PageRequest) -> Page:
        """`/overview`: the state of the job, and what this node has of it alone. It may take as long as other nodes
        do."""
        job, problem = self.look()
        document = {
            "schema": OVERVIEW_SCHEMA,
            "at": round(self._node.wall_clock(), 3),
            "problem": problem,
            "rates": self._node.rate.read(self._node.clock()),
            "failure": self._failure(),
            "job": as_json(job),
        }
        return Page(HTTPStatus.OK, JSON, json.dumps(document, separators=(",", ":")).encode())

    def look(self) -> tuple[JobReport | None, str]:
        """The job, or why it cannot be seen, which is shown on the page."""
        try:
            return look(self._source, LOOKS_WITHIN_S, ASKS_AT_ONCE)[0], ""
        except CannotDo as nothing:
            return None, str(nothing)
        except Exception as error:
            log.exception("the state of the job cannot be shown")
            return None, f"the agent could not look: {error!r}"

    def _failure(self) -> dict[str, Any] | None:
        failure, secrets = self._node.failure, self._node.secrets
        if failure is None:
            return None
        return {
            "generation": failure.generation,
            "summary": masked(failure.summary, secrets),
            "cause": failure.cause,
            "rank": failure.rank,
            "node": failure.node,
            "traceback": masked(failure.traceback or "", secrets),
            "log_tail": masked("\n".join(failure.log_tail), secrets),
            "log_file": failure.log_file,
        }
