"""Every message between the workers of a node, its agent and the agent's disk writer, each declared once.

Each is one line of JSON that names the version of all messages and its own kind:

    {"v": 4, "kind": "save_report", "generation": 7, "local_rank": 0, "step": 120, "result": "ok", ...}

    reports        worker, disk writer -> agent    SaveReport, LoadReport, LentLock         datagrams
                   memory server -> agent          ReplicationReport
    commits        worker, disk writer -> agent    CommitQuestion, answered once
    planned leave  worker -> agent                 StepEnded, answered by StepAnswer
    just in time   worker <-> agent                Guarding, and then both speak until the generation has ended
    disk writes    worker -> disk writer           ShardOrder, and of rank 0 CommitOrder: answered by WriteOutcome;
                                                   CancelWrite
                   agent -> disk writer            FinishWrites, answered by UnsavedSteps at each change

A message that cannot be read is refused where it is made, and where it arrives. The steps of a worker are no messages
but words in memory (`shared_progress`).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from ...codec import AtMost, Checked, Codec, Count, Positive, Seconds, Text, Within
from .environment import RUN_NAME, RunName

VERSION = 9
MAX_BYTES = 8192
"""Of one message."""
MAX_UNSAVED_BYTES = 2**20
"""Of UnsavedSteps, which lists all directories with their paths."""
MAX_REASON_CHARS = 500
"""A longer reason is refused, so its writer cuts it. JSON makes at most 12 bytes of a character."""

Reason = Annotated[str, Text(MAX_REASON_CHARS)]
MOST_DIRECTORY_CHARS = 500
ShownDirectory = Annotated[str, Text(MOST_DIRECTORY_CHARS)]
"""The end of a path, for a reader; empty: not known."""
RunNameOrNone = Annotated[str, Text(128, re.compile(f"({RUN_NAME.pattern})?"))]
"""Empty: a run without a name."""
NodeName = Annotated[str, Text(256, re.compile(r"(?s).+"))]
MOST_PARTNERS = 8
"""Nodes that keep replicas for one node."""
SLOT_NAMES = ("a", "b")
SlotName = Annotated[str, Text(1, re.compile("|".join(SLOT_NAMES)))]
ErrorName = Annotated[str, Text(64, re.compile(r"\w*"))]
"""Of a type in `worker/errors.py`; empty: none."""
SaveResult = Literal["ok", "error"]
LoadResult = Literal["ok", "corrupt", "error", "none"]
Tier = Literal["memory", "local", "part"]
"""Where a checkpoint is: in the node's memory, or on disk; one rank's part of a sharded one, which may come to be."""


# ---------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class SaveReport(Checked):
    """The checkpoint of `step` was to be made; `bytes` is its size if that went well.

    On disk: by rank 0, or by the disk writer in its place. In memory: by the first rank of this node. Training stood
    still for `blocked_s` of it. `directory` tells several Checkpointers apart.
    """

    generation: Count
    local_rank: Count
    step: Count
    result: SaveResult
    duration_s: Seconds
    bytes: Count
    tier: Tier = "local"
    blocked_s: Seconds = 0.0
    directory: ShownDirectory = ""


@dataclass(frozen=True, slots=True)
class LoadReport(Checked):
    """The worker has looked for a checkpoint.

    `ok`: training goes on from `step`; `none`: there is none, it begins at 0; `corrupt`: the checkpoint of `step`
    did not verify and the next older one is tried; `error`: nothing could be loaded and the worker gives up.
    """

    generation: Count
    local_rank: Count
    step: Count
    result: LoadResult
    duration_s: Seconds
    tier: Tier = "local"


@dataclass(frozen=True, slots=True)
class LentLock(Checked):
    """Comes with the open lock file of a checkpoint directory, which the agent keeps open until it ends.

    Without one it says that the worker is of this `run`: locks that another run's workers have lent are let go.
    """

    generation: Count
    local_rank: Count
    run: RunName


@dataclass(frozen=True, slots=True)
class ReplicationReport(Checked):
    """Of the memory server: all partners have the copies of `step`; those that are `unreachable` take none now."""

    generation: Count
    step: Count
    unreachable: Annotated[tuple[NodeName, ...], AtMost(MOST_PARTNERS)]


Report = SaveReport | LoadReport
"""Hints for metrics and hang detection, sent over a lossy socket; no decision about correctness may rest on one.

Nor does one about what workers do: saves that were refused change the agent's exit code, when all is over."""


# ---------------------------------------------------------------- commits


@dataclass(frozen=True, slots=True)
class CommitQuestion(Checked):
    """Is `generation` still the one that may change what a checkpoint directory shows?"""

    generation: Count


@dataclass(frozen=True, slots=True)
class CommitGranted(Checked):
    """It is, and no other can begin within `valid_s` seconds of the instant at which the question was sent."""

    valid_s: Annotated[float, Within(0, 2**31, above=True)]


@dataclass(frozen=True, slots=True)
class CommitRefused(Checked):
    """It is over, for ever."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class CommitUndecided(Checked):
    """This cannot be found out now: ask again at the next save."""

    reason: Reason


CommitAnswer = CommitGranted | CommitRefused | CommitUndecided


# ---------------------------------------------------------------- planned leave


class StepStatus(enum.Enum):
    FINISHED = "finished"
    """The step has just been finished. May this rank begin the next one?"""
    PAUSING = "pausing"
    """It was the last one finished, the next has not been begun, and this process could keep its state alone."""
    KEPT = "kept"
    """This was the last step, and its state is kept. No question."""


class Verdict(enum.Enum):
    GO_ON = "go on"
    END = "end"
    """Keep the state together with all ranks, and end."""
    END_ALONE = "end alone"
    """Some ranks may never come here: keep the state without them, and end."""


@dataclass(frozen=True, slots=True)
class StepEnded(Checked):
    """A worker between two steps, while a planned change waits for it."""

    generation: Count
    rank: Count
    local_rank: Count
    step: Count
    status: StepStatus


@dataclass(frozen=True, slots=True)
class StepAnswer(Checked):
    """`leaves`: this node leaves at the end of the generation, as far as is known now; False in an answer to KEPT."""

    verdict: Verdict
    leaves: bool


Question = CommitQuestion | StepEnded
"""What is answered once."""


# ---------------------------------------------------------------- just in time


@dataclass(frozen=True, slots=True)
class Guarding(Checked):
    """The first message of a worker that can save its last step when its generation fails."""

    generation: Count
    local_rank: Count


@dataclass(frozen=True, slots=True)
class Broken(Checked):
    """A collective has failed here: this worker leaves at `Go`."""


@dataclass(frozen=True, slots=True)
class Held(Checked):
    """No step can begin here, and `step` was the last one; None: the state is not whole."""

    step: Count | None


@dataclass(frozen=True, slots=True)
class Kept(Checked):
    """The state after `step` is in memory; None: that could not be."""

    step: Count | None


@dataclass(frozen=True, slots=True)
class Hold(Checked):
    """Let no optimizer step begin, and say which step was the last."""

    within_s: Seconds
    finished: Count | None = None
    """The newest that a worker of this node has finished, even one that is dead now: this one may be about to."""


@dataclass(frozen=True, slots=True)
class Keep(Checked):
    """Copy your state to memory: it is the newest on this node."""


@dataclass(frozen=True, slots=True)
class Go(Checked):
    """All is done that can be."""


FromGuard = Guarding | Broken | Held | Kept
ToGuard = Hold | Keep | Go


# ---------------------------------------------------------------- disk writes


@dataclass(frozen=True, slots=True)
class ShardOrder(Checked):
    """Write one rank's copy, as its part of the attempt with that name (`shard_files`): its shards, or all of a state.

    It is of `step`, and generation `copied_by` has left it in a slot of that `folder`. `twin_of`: the rank that writes
    the same shards; only what this one has for itself is written here.
    """

    memory: str
    directory: str
    folder: Annotated[str, Text(64, re.compile(r"[0-9a-f.]+"))]
    slot: SlotName
    step: Count
    copied_by: Count
    generation: Count
    run: RunName
    attempt: Annotated[str, Text(256)]
    rank: Count
    twin_of: Count | None


@dataclass(frozen=True, slots=True)
class CommitOrder(Checked):
    """Make a checkpoint of all `parts`, once they are there, at most `within_s` from now.

    With it comes an open file that holds DCP's index. `good` are steps in the directory that are known to be whole:
    they count among the `keep` to retain. `given_up` are those that a load of this generation has left for an older
    one.
    """

    directory: str
    step: Count
    generation: Count
    run: RunName
    attempt: Annotated[str, Text(256)]
    world_size: Positive
    parts: Positive
    keep: Count
    good: tuple[Count, ...]
    within_s: Seconds
    given_up: tuple[Count, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelWrite(Checked):
    """From now on nothing is published: rank 0 may have gone on to newer checkpoints by itself."""


@dataclass(frozen=True, slots=True)
class WriteOutcome(Checked):
    """What became of an order: `error` is empty when the checkpoint of `size` bytes is durable."""

    step: Count
    size: Count = 0
    error: ErrorName = ""
    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class FinishWrites(Checked):
    """The agent ends: do what was ordered, try again what has failed, and list what is not on disk yet."""


@dataclass(frozen=True, slots=True)
class UnsavedStep(Checked):
    """The newest step that was ordered to be written to that directory, and that is not there.

    `reason` is why the last try failed, empty while none has; `final`: no other try can help. `rank`: it is that one's
    part of the step.
    """

    step: Count
    directory: str
    reason: Reason = ""
    final: bool = False
    rank: Count | None = None


@dataclass(frozen=True, slots=True)
class UnsavedSteps(Checked):
    """All of them; none: everything is on disk."""

    unsaved: tuple[UnsavedStep, ...]


# ---------------------------------------------------------------- what is read where

FROM_WORKERS: Codec[Question | FromGuard] = Codec(
    (CommitQuestion, StepEnded, Guarding, Broken, Held, Kept), VERSION, MAX_BYTES
)
"""On a stream socket of the agent. A question has a connection of its own; a guard keeps its."""
REPORTS: Codec[Report | LentLock | ReplicationReport] = Codec(
    (SaveReport, LoadReport, LentLock, ReplicationReport), VERSION, MAX_BYTES
)
COMMIT_ANSWERS: Codec[CommitAnswer] = Codec(
    (CommitGranted, CommitRefused, CommitUndecided), VERSION, MAX_BYTES
)
STEP_ANSWERS = Codec((StepAnswer,), VERSION, MAX_BYTES)
TO_GUARDS: Codec[ToGuard] = Codec((Hold, Keep, Go), VERSION, MAX_BYTES)
WRITE_ORDERS: Codec[ShardOrder | CommitOrder | FinishWrites] = Codec(
    (ShardOrder, CommitOrder, FinishWrites), VERSION, MAX_BYTES
)
WRITE_CANCELS = Codec((CancelWrite,), VERSION, MAX_BYTES)
WRITE_OUTCOMES = Codec((WriteOutcome,), VERSION, MAX_BYTES)
UNSAVED_STEPS = Codec((UnsavedSteps,), VERSION, MAX_UNSAVED_BYTES)

_ALL = Codec[Checked]((), VERSION, MAX_BYTES)


def encode(message: Checked) -> bytes:
    """One line."""
    return _ALL.encode(message)
