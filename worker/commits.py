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

import json
import socket
import time
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

VERSION = 1
MAX_BYTES = 8192
MAX_REASON_CHARS = 500
"""A longer reason is refused, so its writer cuts it. JSON makes at most 12 bytes of a character."""


class MessageError(ValueError):
    """What the other end sent is no question and no answer; the text says why not."""


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
    return _line(asdict(question))


def decode_question(line: bytes) -> Question:
    """Raises MessageError, never anything else."""
    body = _body(line)
    if body.keys() != {"generation"}:
        raise MessageError(f"question with the fields {sorted(body)}")
    return Question(**body)


def encode_answer(answer: Answer) -> bytes:
    return _line({"answer": answer.kind, **asdict(answer)})


def decode_answer(line: bytes) -> Answer:
    """Raises MessageError, never anything else."""
    body = _body(line)
    kind = body.pop("answer", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"answer of unknown kind {kind!r}, expected one of {sorted(_KINDS)}")
    if body.keys() != {field.name for field in fields(cls)}:
        raise MessageError(f"{kind} with the fields {sorted(body)}")
    return cls(**body)


def send_line(connection: socket.socket, line: bytes, timeout_s: float) -> None:
    """Raises OSError."""
    connection.settimeout(timeout_s)
    connection.sendall(line)


def receive_line(connection: socket.socket, timeout_s: float) -> bytes:
    """The one line that the other end sends. Raises OSError, also when it takes longer; MessageError."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            chunk = connection.recv(MAX_BYTES)
        except TimeoutError as error:
            raise TimeoutError(f"no whole message within {timeout_s:g} s") from error
        if not chunk:
            raise MessageError(f"it ended the connection after {len(line)} bytes of a message")
        line += chunk
        if len(line) > MAX_BYTES:
            raise MessageError(f"message of more than {MAX_BYTES} bytes")
    return line


def _line(body: dict[str, Any]) -> bytes:
    return json.dumps({"v": VERSION, **body}).encode() + b"\n"


def _body(line: bytes) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"message is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise MessageError(f"message is a JSON {type(body).__name__}, expected an object")
    version = body.pop("v", None)
    if type(version) is not int or version != VERSION:
        raise MessageError(f"message of version {version!r}, this one reads {VERSION}")
    return body


def _check_reason(answer: Refused | Undecided) -> None:
    if not isinstance(answer.reason, str) or len(answer.reason) > MAX_REASON_CHARS:
        raise MessageError(f"{answer.kind}: the reason is no text of at most {MAX_REASON_CHARS} characters")
