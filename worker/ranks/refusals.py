"""Errors that all ranks share: a rank that raised alone would leave the others waiting in the next collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from .. import errors
from ..errors import BadCheckpoint, CheckpointError
from ..wire.messages import MAX_REASON_CHARS, ErrorName, Reason
from .group import Group

_T = TypeVar("_T")

_TYPES = {
    name: kind
    for name, kind in vars(errors).items()
    # One that is made of more than a text is its base here.
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind is not BadCheckpoint
}


_UNDONE, _DONE, _FAILED = (bytes([number]) for number in range(3))


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What one rank raises; `error` is the name of a type in `_TYPES`, empty: nothing."""

    error: ErrorName = ""
    reason: Reason = ""


def raise_together(group: Group, error: CheckpointError | None) -> None:
    """Raise on every rank when one has an error: its own there, and the first rank's on those without.

    The others get the nearest type of `worker/errors.py`: they may not have a script's own.
    """
    own = _Refusal(_name_of(error), str(error)[:MAX_REASON_CHARS]) if error is not None else _Refusal()
    refusals = group.exchange(own)
    if error is not None:
        raise error
    for rank, refusal in enumerate(refusals):
        if refusal.error:
            raise _TYPES.get(refusal.error, CheckpointError)(f"rank {rank}: {refusal.reason}")


def _name_of(error: CheckpointError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if _TYPES.get(kind.__name__) is kind)


def together(group: Group, part: Callable[[], object], otherwise: str) -> None:
    """Do this rank's part, wait for the others, and raise on every rank when one has an error.

    An error of another kind becomes a CheckpointError whose text begins with `otherwise`.
    """
    raise_together(group, tried(part, otherwise)[1])


def all_did(group: Group, part: Callable[[], bool], otherwise: str) -> bool:
    """As `together`, of a part that can be left undone: whether all ranks have done it.

    One collective of a byte where no rank has an error. Only for ranks that have seen that they have the same version.
    """
    done, error = tried(part, otherwise)
    found = group.gather_fixed(_FAILED if error is not None else _DONE if done else _UNDONE)
    if _FAILED in found:
        raise_together(group, error)
    return _UNDONE not in found


def tried(part: Callable[[], _T], otherwise: str) -> tuple[_T | None, CheckpointError | None]:
    """What it returns, or raises: the other ranks are waiting, and must get an error before it ends this one."""
    try:
        return part(), None
    except CheckpointError as refusal:
        return None, refusal
    except Exception as failure:
        return None, because(CheckpointError, f"{otherwise}: {failure!r}", failure)


def because(kind: type[CheckpointError], text: str, cause: Exception) -> CheckpointError:
    error = kind(text)
    error.__cause__ = cause
    return error
