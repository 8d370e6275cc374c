"""The messages about workers that seem to hang.

One node's agent finds that its workers are still (`HangSuspicion`, in its record). The coordinator numbers an inquiry
in the world (`HangProbe`), and each member looks at its own workers while all of them still run, and says what each of
them does (`HangReport`, in its record). One pure function of all reports names the rank that the others wait for
(`Diagnosis`).

Ages are counted by the node that writes them, when it writes; no field holds an instant.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Annotated

from ..codec import AtMost, Count, Positive, Text
from ..rendezvous.text import Age, NameOrNone, line

HANG = "hang"
"""Cause and fingerprint of a failure that is a hang."""
ANSWER_S = 2.0
"""How long the coordinator waits for the members' reports, from when it first sees its inquiry in the world."""
LOOK_S = 1.5
"""Of these, what a node's own look at its workers may take."""
MAX_RANKS = 128
"""In one report. Of a node with more workers it has those that are the most telling: see `telling`."""
MAX_WHERE = 200
MAX_GROUPS = 6
"""Process groups of one rank. Of a rank in more of them those in which it waits, and those used last, are told."""
LABEL = re.compile(r"[ !#-\[\]-~]{1,48}")
"""Printable ASCII that takes as many bytes in JSON."""
Label = Annotated[str, Text(48, LABEL)]


class Urgency(enum.Enum):
    """How long the workers have been still, by the limits in force. It decides which findings may end them."""

    EARLY = "early"
    """Only a rank that can never go on by itself ends the generation."""
    OVERDUE = "overdue"
    """A rank that most likely will not go on by itself ends it, too."""
    LAST = "last"
    """A rank that may be slow or at work ends it, too, and so does a hang in which no rank stands out."""


@dataclass(frozen=True, slots=True)
class HangSuspicion:
    """The workers of this node in `generation` are still, and have been active before."""

    generation: Positive
    why: Annotated[str, line(512)]
    """For people: which signs, and for how long."""
    urgency: Urgency = Urgency.EARLY


class RankActivity(enum.Enum):
    """What one worker does, as far as it can be seen from outside, from the most certain to the least."""

    GONE = "gone"
    """Its process has ended, or is a zombie, and the agent has not acted on that yet."""
    STOPPED = "stopped"
    """By SIGSTOP or a frozen cgroup."""
    UNINTERRUPTIBLE = "uninterruptible"
    """It waits in the kernel for a disk, a file server or a device."""
    IN_SAVE = "in_save"
    IN_COLLECTIVE = "in_collective"
    """It waits for other ranks: `collective` says in which one; empty: it most likely does."""
    WAITS = "waits"
    """For something of its own: time, a lock, bytes, a child. `where` says for what."""
    WORKS = "works"
    """It uses the processor."""
    OTHER = "other"
    """Nothing of the above can be said, as of one that computes on a GPU, or only waits for it."""


@dataclass(frozen=True, slots=True)
class InGroup:
    """What torch's flight recorder shows of one rank in one process group. A group counts its collectives from 1, on
    all its ranks alike; a rank has entered one when its script has called it, whatever its GPU still does before."""

    group: Label
    """The same on all its ranks, and on no rank of another group."""
    size: Count | None
    """Its ranks; None: all of the world; 0: this is of sends and recvs, whose numbers differ from rank to rank."""
    entered: Count
    """The newest."""
    waits_in: Count | None
    """The oldest that has not ended; None: all have."""
    collective: Label
    """`waits_in`, or else the newest, as torch calls it: all_reduce."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What torch's flight recorder shows of one rank."""

    still_s: Age
    """For at least so long it has shown just this: the rank has entered no collective and none has ended."""
    fresh: bool
    """It was asked for this inquiry, and not for one before."""
    groups: Annotated[tuple[InGroup, ...], AtMost(MAX_GROUPS)]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one worker does."""

    rank: Count
    doing: RankActivity
    step: Count | None = None
    """The newest that it has finished; None when it reports none."""
    still_s: Age | None = None
    """For so long it has made no step, written no output, and used no processor time or network. None: not known."""
    collective: Annotated[str, line(64)] = ""
    """The one that it is in, as torch calls it: all_reduce; empty: not known, or none."""
    where: Annotated[str, line(MAX_WHERE)] = ""
    """One line: the innermost frame of the user's code, or what the kernel says; empty: not known."""
    recorded: Recorded | None = None
    """None: not known, as on gloo."""


@dataclass(frozen=True, slots=True)
class HangReport:
    """One node's answer to inquiry `inquiry` of `generation`."""

    generation: Positive
    inquiry: Positive
    ranks: Annotated[tuple[RankReport, ...], AtMost(MAX_RANKS)]


class HangFinding(enum.Enum):
    """The conclusion from all reports."""

    HEALTHY = "healthy"
    """Some rank is at work, and the others may well wait for it: that one may be named."""
    UNCLEAR = "unclear"
    """Nothing moves, and no rank stands out."""
    DOUBTFUL = "doubtful"
    """One rank is not where the others wait, but may be slow: it waits for a disk, saves, or gets bytes; or it is at
    work, and all others have waited long for it. Or several are in another collective, and may exchange bytes."""
    LIKELY = "likely"
    """One rank is not where the others wait, and nothing shows that it will come: it sleeps, waits for a lock, or is
    alone in another collective."""
    CERTAIN = "certain"
    """One rank is not where the others wait, and can never come by itself: stopped, or gone."""


@dataclass(frozen=True, slots=True)
class HangProbe:
    """In the world: the newest of its generation."""

    number: Positive
    urgency: Urgency = Urgency.EARLY
    """The highest of all suspicions when it was made."""
    finding: HangFinding | None = None
    """Its result; None while the members are to answer."""
    why: Annotated[str, line(512)] = ""
    """The verdict's own words."""
    node: NameOrNone = ""
    """That of `rank`; empty where no rank is named."""
    rank: Count | None = None
    """The rank that the verdict names."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    finding: HangFinding
    why: str
    """A sentence for people, which names rank and node where the finding does."""
    node: str = ""
    """That of `rank`; empty where no rank is named."""
    rank: int | None = None
    """None where no rank is named."""


_TELLING = {doing: place for place, doing in enumerate(RankActivity)}


def telling(states: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
    """As many states as a report may have, by rank. Ranks that wait for no other rank are kept before others."""
    if len(states) <= MAX_RANKS:
        return states
    waits = RankActivity.IN_COLLECTIVE
    chosen = sorted(states, key=lambda one: (one.doing is waits, _TELLING[one.doing], one.rank))[:MAX_RANKS]
    return tuple(sorted(chosen, key=lambda one: one.rank))
