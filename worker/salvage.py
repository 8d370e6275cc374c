"""What an agent and its workers say to each other when a generation has failed and its last step shall be kept.

    worker   {"v": 1, "said": "guarding", "generation": 7, "local_rank": 0}    first, and then it waits
             {"v": 1, "said": "broken"}      a collective has failed here: this worker leaves once it hears "go"
             {"v": 1, "said": "held", "step": 120}      no step can begin here; null: the state is not whole
             {"v": 1, "said": "kept", "step": 120}      the state is in memory; null: that could not be
    agent    {"v": 1, "said": "hold", "within_s": 2.0}  let no optimizer step begin, and say which step was the last
             {"v": 1, "said": "keep", "within_s": 1.5}  copy your state to memory: it is the newest here
             {"v": 1, "said": "go"}          all is done that can be

One line of JSON each, over one connection for each worker to the UNIX stream socket that `ELASTIC_AGENT_SALVAGE` names.
Both ends use this file: `just_in_time` in the worker, the salvage gate in the agent.

No torch here: the agent imports this module.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

VARIABLE = "ELASTIC_AGENT_SALVAGE"
VERSION = 1
MAX_BYTES = 256


class MessageError(ValueError):
    """What the other end sent is no message; the text says why not."""


@dataclass(frozen=True, slots=True)
class Guarding:
    said: ClassVar[str] = "guarding"
    generation: int
    local_rank: int

    def __post_init__(self) -> None:
        _check_count(self.said, self.generation)
        _check_count(self.said, self.local_rank)


@dataclass(frozen=True, slots=True)
class Broken:
    said: ClassVar[str] = "broken"


@dataclass(frozen=True, slots=True)
class Held:
    said: ClassVar[str] = "held"
    step: int | None

    def __post_init__(self) -> None:
        if self.step is not None:
            _check_count(self.said, self.step)


@dataclass(frozen=True, slots=True)
class Kept:
    said: ClassVar[str] = "kept"
    step: int | None

    def __post_init__(self) -> None:
        if self.step is not None:
            _check_count(self.said, self.step)


@dataclass(frozen=True, slots=True)
class Hold:
    said: ClassVar[str] = "hold"
    within_s: float

    def __post_init__(self) -> None:
        _check_seconds(self.said, self.within_s)


@dataclass(frozen=True, slots=True)
class Keep:
    said: ClassVar[str] = "keep"
    within_s: float

    def __post_init__(self) -> None:
        _check_seconds(self.said, self.within_s)


@dataclass(frozen=True, slots=True)
class Go:
    said: ClassVar[str] = "go"


FromWorker = Guarding | Broken | Held | Kept
FromAgent = Hold | Keep | Go
Message = FromWorker | FromAgent

FROM_WORKER: tuple[type[FromWorker], ...] = (Guarding, Broken, Held, Kept)
FROM_AGENT: tuple[type[FromAgent], ...] = (Hold, Keep, Go)
_KINDS: dict[str, type[Message]] = {kind.said: kind for kind in (*FROM_WORKER, *FROM_AGENT)}


def encode(message: Message) -> bytes:
    return json.dumps({"v": VERSION, "said": message.said, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises MessageError, never anything else."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"message is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise MessageError(f"message is a JSON {type(body).__name__}, expected an object")
    version, said = body.pop("v", None), body.pop("said", None)
    if type(version) is not int or version != VERSION:
        raise MessageError(f"message of version {version!r}, this one reads {VERSION}")
    kind = _KINDS.get(said) if isinstance(said, str) else None
    if kind is None:
        raise MessageError(f"message of unknown kind {said!r}, expected one of {sorted(_KINDS)}")
    if body.keys() != {field.name for field in fields(kind)}:
        raise MessageError(f"{said} with the fields {sorted(body)}")
    return kind(**body)


class Lines:
    """The whole lines in what has come so far."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[Message]:
        """Raises MessageError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*lines, self._rest))) > MAX_BYTES:
            raise MessageError(f"message of more than {MAX_BYTES} bytes")
        return [decode(line) for line in lines]


def _check_count(said: str, value: object) -> None:
    # bool is an int to isinstance.
    if type(value) is not int or not 0 <= value < 2**63:
        raise MessageError(f"{said}: {value!r} is no integer from 0 on")


def _check_seconds(said: str, value: object) -> None:
    # The upper bound refuses infinity too; NaN fails every comparison.
    if type(value) not in (int, float) or not 0 <= value < 2**31:  # type: ignore[operator]
        raise MessageError(f"{said}: {value!r} is no number of seconds from 0 on")
