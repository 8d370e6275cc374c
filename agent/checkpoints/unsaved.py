"""What is not on disk yet: told by the disk writer while it finishes, one line of JSON at each change.

    {"v": 1, "unsaved": [{"step": 54, "directory": "/runs/x", "reason": "No space left on device", "final": false}]}

Each line is the whole of it; a last line with an empty list says that all is done. Both ends use this file.
No torch here, nor anything else that takes long to import.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ...worker.lines import MessageError, body_of, to_line

VERSION = 1


@dataclass(frozen=True, slots=True)
class Unsaved:
    """The newest step that was ordered to be written to that directory, and that is not there.

    `reason` is why the last try failed, empty while none has; `final`: no other try can help.
    """

    step: int
    directory: str
    reason: str = ""
    final: bool = False

    def __post_init__(self) -> None:
        kinds = (int, str, str, bool)
        for value, kind in zip((self.step, self.directory, self.reason, self.final), kinds, strict=True):
            if type(value) is not kind:
                raise MessageError(f"unsaved: {value!r} is no {kind.__name__}")


def encode(unsaved: Iterable[Unsaved]) -> bytes:
    return to_line(VERSION, {"unsaved": [asdict(one) for one in unsaved]})


def decode(line: bytes) -> tuple[Unsaved, ...]:
    """Raises MessageError, never anything else."""
    body: dict[str, Any] = body_of(line, VERSION)
    found = body.get("unsaved")
    if not isinstance(found, list):
        raise MessageError("unsaved: no list")
    try:
        return tuple(Unsaved(**one) for one in found)
    except TypeError as error:
        raise MessageError(f"unsaved: {error}") from error
