"""The spans of a recovery: one for the whole recovery on this node, and in it one for each phase.

The nodes of a job recover at the same time. Without asking each other they compute the same trace id, from the run and
the generation in which training goes on. So the spans of all nodes for one recovery are one trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...output.masking import masked
from ..accounting.goodput import Activity
from ..accounting.training_account import Recovered

_NAMES = {Activity.FIRST_STEP: "first step"}
"""The phases whose spans have another name than in the metrics."""


@dataclass(frozen=True, slots=True)
class RecoverySpans:
    """The spans of one recovery. Instants are seconds since the epoch."""

    trace_id: int
    spans: tuple[Span, ...]
    """The first is the whole recovery; the others are parts of it."""
    attributes: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    began_at: float
    ended_at: float


def trace_id(run: str, generation: int) -> int:
    """128 bits, never 0."""
    digest = hashlib.sha256(f"{run}\0{generation}".encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1


def spans_of(recovered: Recovered, epoch: float, secrets: Collection[str]) -> RecoverySpans | None:
    """`epoch`: the wall clock's time when the monotonic clock was 0. `secrets` are masked in texts that a worker may
    have printed: they must not leave this node. None: the recovery took no time."""
    recovery = recovered.recovery
    if not recovery.stages:
        return None
    ended_at = recovery.stages[-1].ended_at
    whole = Span("recovery", epoch + ended_at - recovery.duration_s, epoch + ended_at)
    phases = (
        Span(_NAMES.get(stage.phase, stage.phase.value), epoch + stage.began_at, epoch + stage.ended_at)
        for stage in recovery.stages
    )
    attributes: dict[str, str | int] = {
        "elastic_agent.run": recovered.run,
        "elastic_agent.generation": recovered.generation,
        "elastic_agent.cause": recovered.cause,
    }
    if recovered.because:
        attributes["elastic_agent.because"] = masked(recovered.because, secrets)
    return RecoverySpans(trace_id(recovered.run, recovered.generation), (whole, *phases), attributes)
