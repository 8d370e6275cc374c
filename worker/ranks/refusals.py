"""Errors that all ranks share: a rank that raised alone would leave the others waiting in the next collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .. import errors
from ..errors import CheckpointError
from ..wire.messages import MAX_REASON_CHARS, ErrorName, Reason
from .group import Group


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What one rank raises; `error` is the name of its type, empty: nothing."""

    error: ErrorName = ""
    reason: Reason = ""


def raise_together(group: Group, error: CheckpointError | None) -> None:
    """Raise on every rank when one has an error: its own there, and the first rank's on those without."""
    own = _Refusal(type(error).__name__, str(error)[:MAX_REASON_CHARS]) if error else _Refusal()
    refusals = group.exchange(own)
    if error is not None:
        raise error
    for rank, refusal in enumerate(refusals):
        if refusal.error:
            raise getattr(errors, refusal.error)(f"rank {rank}: {refusal.reason}")


def together(group: Group, part: Callable[[], object], otherwise: str) -> None:
    """Do this rank's part, wait for the others, and raise on every rank when one has an error.

    An error of another kind becomes a CheckpointError whose text begins with `otherwise`.
    """
    error: CheckpointError | None = None
    try:
        part()
    except CheckpointError as refusal:
        error = refusal
    except Exception as failure:
        # The other ranks are waiting: they must get this error before it ends this one.
        error = because(CheckpointError, f"{otherwise}: {failure!r}", failure)
    raise_together(group, error)


def because(kind: type[CheckpointError], text: str, cause: Exception) -> CheckpointError:
    error = kind(text)
    error.__cause__ = cause
    return error
