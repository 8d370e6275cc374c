"""The events of a job's journal: one JSON object a line, a published format that other programs read, too.

    {"schema":1,"number":7,"at":1790000000.1,"node":"b","generation":2,"kind":"failure","rank":3,"about":"b",
     "cause":"exit_code","text":"exit code 1: ValueError: lr < 0","seconds":{},"counts":{}}

A reader skips lines that it cannot read: of a kind or a schema that it does not know, or cut short by a full disk.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ...codec import Count, Document, Invalid, Positive, Seconds, Within
from ...rendezvous.text import Name, line

EVENTS_PATH = "/events"
"""The path of an agent's newest events: `{"schema", "job", "node", "incarnation", "newest", "events"}`."""

SCHEMA = 1
MAX_EVENT_TEXT = 1000
MAX_EVENT_CHARS = 16 * 1024
"""The longest line."""


class Kind(enum.Enum):
    AGENT_STARTED = "agent_started"
    """One life of this node's agent begins; numbers count from here."""
    WORLD = "world"
    """A generation is formed. `text` says why the one before ended, `cause` is the name of that reason."""
    WORKERS_STARTED = "workers_started"
    FAILURE = "failure"
    """The failure that ends a generation; the agents of all members write it."""
    SUSPICION = "suspicion"
    """The workers of the node `about` seem to hang."""
    VERDICT = "verdict"
    """The result of an inquiry into a hang: `rank` and `about` are the guilty rank and its node, if one is found;
    `cause` is the finding."""
    EVIDENCE = "evidence"
    """`text` is the folder in which evidence was kept."""
    EXCLUSION = "exclusion"
    """The node `about` is excluded from the next worlds, which `counts` has as its `times`-th exclusion. An agent that
    comes later notes those in force once more."""
    READMISSION = "readmission"
    STRAGGLER = "straggler"
    """The rank `rank` of the node `about` is slower than the others."""
    NOTICE = "notice"
    """The cloud or scheduler is about to take this machine away, or has withdrawn that notice."""
    DRAIN = "drain"
    """A planned change: workers end between two steps."""
    SAVE = "save"
    """The saves of one tier (`cause`) since the event before. `counts`: `saves`, `failed`, `bytes`, and the newest
    `step`; `seconds`: how long they took (`duration`), and how long training stood still for them (`blocked`)."""
    LOAD = "load"
    """`cause` is the tier; `counts` has the `step`."""
    RECOVERY = "recovery"
    """Training goes on. `seconds` by phase: `goodput.PHASES`."""
    ACCOUNTING = "accounting"
    """Totals since the start of this agent, written each minute, whenever workers begin or cease to step, and at the
    end: `seconds` of each `goodput.Activity`, `counts` of `steps` and `steps_redone`."""
    JOB_ENDED = "job_ended"
    """`cause` is the result."""
    AGENT_ENDED = "agent_ended"
    """`counts` has the exit `code`."""


ROUTINE = frozenset({Kind.SAVE, Kind.LOAD, Kind.ACCOUNTING, Kind.WORKERS_STARTED})
"""Kinds that come again and again in a job that goes well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    number: Positive
    """Counts the events of one life of an agent from 1; a gap means that an event was dropped."""
    at: Annotated[float, Within(0, 2**40)]
    """Seconds since the epoch, by the wall clock of `node`. The clocks of two nodes may differ."""
    node: Name
    """The node whose agent writes."""
    generation: Count
    """0 before the first."""
    kind: Kind
    rank: Count | None = None
    about: Annotated[str, line(128)] = ""
    """The node that the event is about; empty: none, or the job."""
    cause: Annotated[str, line(64)] = ""
    text: Annotated[str, line(MAX_EVENT_TEXT)]
    """A sentence for a person."""
    seconds: dict[Name, Seconds] = field(default_factory=dict)
    counts: dict[Name, Count] = field(default_factory=dict)


EVENT = Document(JobEvent, SCHEMA, MAX_EVENT_CHARS, version_key="schema")


def read_events(lines: Iterable[str]) -> Iterator[JobEvent]:
    """The events in these lines, without lines that cannot be read."""
    for text in lines:
        try:
            yield EVENT.decode(text)
        except Invalid:
            continue


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}
