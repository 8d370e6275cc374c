"""What a worker tells the agent of its checkpoints: small messages, each one datagram of JSON.

    {"v": 2, "kind": "checkpoint_save", "generation": 7, "local_rank": 0, "step": 120, "result": "ok",
     "duration_s": 0.8, "bytes": 4096, "tier": "memory", "blocked_s": 0.8}
    {"v": 2, "kind": "checkpoint_load", ..., "step": 120, "result": "ok", "duration_s": 0.3, "tier": "local"}
    {"v": 2, "kind": "directory_lock", ..., "run": "3f2a"}, and an open file with it

Its steps are no messages but words in memory (`page`).

Both ends use this file: `progress` in the worker encodes, the agent decodes. An illegal message cannot exist: the
constructors check every field, and `decode` accepts nothing that they would not. Reports are hints for metrics and
hang detection, sent over a lossy socket; no decision about correctness may rest on one.

No torch here: the agent imports this module.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Literal, get_args

from .ownership import RUN_NAME

VERSION = 2
MAX_BYTES = 4096

SaveResult = Literal["ok", "error"]
LoadResult = Literal["ok", "corrupt", "error", "none"]
Tier = Literal["memory", "local"]
"""Where a checkpoint is: in the node's memory, or on disk."""


class ReportError(ValueError):
    """A report is malformed; the text names the field. The agent counts and drops it."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The checkpoint of `step` was to be made; `bytes` is its size if that went well.

    On disk: by rank 0, or by the disk writer in its place. In memory: by the first rank of this node. Training stood
    still for `blocked_s` of it.
    """

    kind: ClassVar[str] = "checkpoint_save"
    generation: int
    local_rank: int
    step: int
    result: SaveResult
    duration_s: float
    bytes: int
    tier: Tier = "local"
    blocked_s: float = 0.0

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_outcome(self.result, get_args(SaveResult), self.tier, self.duration_s, self.blocked_s)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The worker has looked for a checkpoint.

    `ok`: training goes on from `step`; `none`: there is none, it begins at 0; `corrupt`: the checkpoint of `step`
    did not verify and the next older one is tried; `error`: nothing could be loaded and the worker gives up.
    """

    kind: ClassVar[str] = "checkpoint_load"
    generation: int
    local_rank: int
    step: int
    result: LoadResult
    duration_s: float
    tier: Tier = "local"

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_outcome(self.result, get_args(LoadResult), self.tier, self.duration_s)


@dataclass(frozen=True, slots=True)
class LentLock:
    """Comes with the open lock file of a checkpoint directory, which the agent keeps open until it ends.

    Without one it says that the worker is of this `run`: locks that another run's workers have lent are let go.
    """

    kind: ClassVar[str] = "directory_lock"
    generation: int
    local_rank: int
    run: str

    def __post_init__(self) -> None:
        _check_counts(self)
        if not isinstance(self.run, str) or not RUN_NAME.fullmatch(self.run):
            raise ReportError(f"{self.kind} report: {self.run!r} is no name of a run")


Report = SaveReport | LoadReport
Message = Report | LentLock
_KINDS: dict[str, type[Message]] = {cls.kind: cls for cls in (SaveReport, LoadReport, LentLock)}


def encode(report: Message) -> bytes:
    return json.dumps({"v": VERSION, "kind": report.kind, **asdict(report)}).encode()


def decode(datagram: bytes) -> Message:
    """The message in a datagram, from whoever sent it. Raises ReportError, never anything else."""
    if len(datagram) > MAX_BYTES:
        raise ReportError(f"report of {len(datagram)} bytes, at most {MAX_BYTES} are allowed")
    try:
        body = json.loads(datagram)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"report is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ReportError(f"report is a JSON {type(body).__name__}, expected an object")
    version, kind = body.pop("v", None), body.pop("kind", None)
    if type(version) is not int or version != VERSION:
        raise ReportError(f"report of version {version!r}, this agent reads {VERSION}")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ReportError(f"report of unknown kind {kind!r}, expected one of {sorted(_KINDS)}")
    if body.keys() != {field.name for field in fields(cls)}:
        raise ReportError(f"{kind} report with the fields {sorted(body)}")
    return cls(**body)


def _check_counts(report: Message) -> None:
    for name in ("generation", "local_rank", "step", "bytes"):
        value = getattr(report, name, 0)
        # bool is an int to isinstance, and numpy's integers do not go through JSON.
        if type(value) is not int or not 0 <= value < 2**63:
            raise ReportError(f"{report.kind} report: {name} is {value!r}, expected an integer from 0 on")


def _check_outcome(result: str, results: tuple[str, ...], tier: str, *durations_s: float) -> None:
    if result not in results:
        raise ReportError(f"report: result is {result!r}, expected one of {results}")
    if tier not in get_args(Tier):
        raise ReportError(f"report: tier is {tier!r}, expected one of {get_args(Tier)}")
    for duration_s in durations_s:
        # The upper bound refuses infinity too; NaN fails every comparison.
        if type(duration_s) not in (int, float) or not 0 <= duration_s < 2**63:
            raise ReportError(f"report: a duration is {duration_s!r}, expected seconds from 0 on")
