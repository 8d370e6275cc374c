"""What can happen to a job, as one agent writes it down: one JSON object a line, which other programs read, too.

    {"schema":1,"number":7,"at":1790000000.1,"node":"b","generation":2,"kind":"failure","rank":3,"about":"b",
     "cause":"exit_code","text":"exit code 1: ValueError: lr < 0","seconds":{},"counts":{}}

A reader skips lines that it cannot read: of a kind or a schema that it does not know, or cut short by a full disk.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ....codec import Count, Document, Invalid, Positive, Seconds, Within
from ....rendezvous.text import Name, line

EVENTS_PATH = "/events"
"""Of an agent's HTTP address: the newest, as `{"schema", "job", "node", "incarnation", "newest", "events"}`."""

SCHEMA = 1
MAX_EVENT_TEXT = 1000
MAX_EVENT_CHARS = 16 * 1024
"""Of one line."""


class Kind(enum.Enum):
    AGENT_STARTED = "agent_started"
    """One life of this node's agent begins; numbers count from here."""
    WORLD = "world"
    """A generation is formed. `text` is what ended the one before, `cause` its reason."""
    WORKERS_STARTED = "workers_started"
    FAILURE = "failure"
    """The failure that ends a generation; on the nodes of all members."""
    SUSPICION = "suspicion"
    """The workers of the node `about` seem to hang."""
    VERDICT = "verdict"
    """Whose fault the hang is."""
    EVIDENCE = "evidence"
    """`text` is the path of what was kept."""
    EXCLUSION = "exclusion"
    """The node `about` is left out of the next worlds."""
    READMISSION = "readmission"
    STRAGGLER = "straggler"
    """The rank `rank` of the node `about` is slower than the others."""
    NOTICE = "notice"
    """This machine is about to go away, or stays after all."""
    DRAIN = "drain"
    """A planned change: workers end between two steps."""
    SAVE = "save"
    """`counts` are of the saves since the event before: `saves`, `failed`, `bytes`, and the newest `step`; `seconds`:
    how long they took, and how long training stood still for them (`blocked`). `cause` is the tier."""
    LOAD = "load"
    """`cause` is the tier; `counts` has the `step`."""
    RECOVERY = "recovery"
    """Training goes on. `seconds` by phase: `goodput.PHASES`."""
    ACCOUNTING = "accounting"
    """Each minute, whenever workers begin or cease to step, and at the end, all since the start of this agent:
    `seconds` of each `goodput.Activity`, `counts` of `steps` and `steps_redone`."""
    JOB_ENDED = "job_ended"
    """`cause` is the result."""
    AGENT_ENDED = "agent_ended"
    """`counts` has the exit `code`."""


ROUTINE = frozenset({Kind.SAVE, Kind.LOAD, Kind.ACCOUNTING, Kind.WORKERS_STARTED})
"""What comes again and again in a job that goes well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    number: Positive
    """Counts the events of one life of an agent, without gaps: where one is missing, it was dropped."""
    at: Annotated[float, Within(0, 2**40)]
    """Of the writer's wall clock, in seconds since the epoch. Of the clocks of two nodes nothing is known."""
    node: Name
    """Whose agent writes."""
    generation: Count
    """0 before the first."""
    kind: Kind
    rank: Count | None = None
    about: Annotated[str, line(128)] = ""
    """The node that it is about, where it is about one."""
    cause: Annotated[str, line(64)] = ""
    text: Annotated[str, line(MAX_EVENT_TEXT)]
    """A sentence for a person."""
    seconds: dict[Name, Seconds] = field(default_factory=dict)
    counts: dict[Name, Count] = field(default_factory=dict)


EVENT = Document(JobEvent, SCHEMA, MAX_EVENT_CHARS, version_key="schema")


def read_events(lines: Iterable[str]) -> Iterator[JobEvent]:
    """Those that can be read."""
    for text in lines:
        try:
            yield EVENT.decode(text)
        except Invalid:
            continue


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}
