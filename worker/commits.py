"""May this generation still commit? What a worker asks its agent, and the three answers.

    {"v": 1, "generation": 7}

    {"v": 1, "answer": "granted", "valid_s": 2.4}
    {"v": 1, "answer": "refused", "reason": "generation 9 has replaced it"}
    {"v": 1, "answer": "undecided", "reason": "the rendezvous store gave no answer for 5 s"}

One line of JSON each way, over a connection of its own to the UNIX stream socket that `ELASTIC_AGENT_COMMITS` names.
Both ends use this file: `permit` in the worker, the commit gate in the agent. The constructors check every field, and
the decoders accept nothing that they would not.

No torch here: the agent imports this module.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from .lines import MessageError, body_of, to_line

VERSION = 1
MAX_REASON_CHARS = 500
"""A longer reason is refused, so its writer cuts it. JSON makes at most 12 bytes of a character."""


@dataclass(frozen=True, slots=True)
class Question:
    """Is `generation` still the one that may change what a checkpoint directory shows?"""

    generation: int

    def __post_init__(self) -> None:
        # bool is an int to isinstance.
        if type(self.generation) is not int or not 0 <= self.generation < 2**63:
            raise MessageError(f"question: generation is {self.generation!r}, expected an integer from 0 on")


@dataclass(frozen=True, slots=True)
class Granted:
    """It is, and no other can begin within `valid_s` seconds of the instant at which the question was sent."""

    kind: ClassVar[str] = "granted"
    valid_s: float

    def __post_init__(self) -> None:
        # The upper bound refuses infinity too; NaN fails every comparison.
        if type(self.valid_s) not in (int, float) or not 0 < self.valid_s < 2**31:
            raise MessageError(f"granted: valid_s is {self.valid_s!r}, expected seconds above 0")


@dataclass(frozen=True, slots=True)
class Refused:
    """It is over, for ever."""

    kind: ClassVar[str] = "refused"
    reason: str

    def __post_init__(self) -> None:
        _check_reason(self)


@dataclass(frozen=True, slots=True)
class Undecided:
    """Nobody can say now: ask again at the next save."""

    kind: ClassVar[str] = "undecided"
    reason: str

    def __post_init__(self) -> None:
        _check_reason(self)


Answer = Granted | Refused | Undecided
_KINDS: dict[str, type[Answer]] = {cls.kind: cls for cls in (Granted, Refused, Undecided)}


def encode_question(question: Question) -> bytes:
    return to_line(VERSION, asdict(question))


def decode_question(line: bytes) -> Question:
    """Raises MessageError, never anything else."""
    body = body_of(line, VERSION)
    if body.keys() != {"generation"}:
        raise MessageError(f"question with the fields {sorted(body)}")
    return Question(**body)


def encode_answer(answer: Answer) -> bytes:
    return to_line(VERSION, {"answer": answer.kind, **asdict(answer)})


def decode_answer(line: bytes) -> Answer:
    """Raises MessageError, never anything else."""
    body = body_of(line, VERSION)
    kind = body.pop("answer", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"answer of unknown kind {kind!r}, expected one of {sorted(_KINDS)}")
    if body.keys() != {field.name for field in fields(cls)}:
        raise MessageError(f"{kind} with the fields {sorted(body)}")
    return cls(**body)


def _check_reason(answer: Refused | Undecided) -> None:
    if not isinstance(answer.reason, str) or len(answer.reason) > MAX_REASON_CHARS:
        raise MessageError(f"{answer.kind}: the reason is no text of at most {MAX_REASON_CHARS} characters")
