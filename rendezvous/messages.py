"""What is inside the records: with which options a node was started, and which nodes no world includes for a while.

Each node writes its own `Limits` and `Program` into its record, and the first world takes over those of the node that
coordinates it. They are in force, whichever node coordinates later, as long as one member lives (`decide`). A node with
other options can neither shrink a healthy job nor end it. In no world is one that would run another script, or that
judges by other times who is gone: it would take a node that lives for lost, or go on in a place that another has been
given.

An `Exclusion` is a row of the world, written by the coordinator or by `elastic-agent exclude`. The excluded node
reports its check in its own record (`Recheck`), and the coordinator then ends the exclusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ..codec import Count, Positive
from .text import Age, CauseName, Name, NameOrNone, line


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows the job, as far as the coordinator applies it for all nodes."""

    min_nodes: Positive
    max_nodes: Positive
    last_call_s: Age
    max_restarts: Count | None
    """None: any number while generations make progress."""
    nodes_multiple_of: Positive = 1
    """The number of nodes of each world."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a node would run, for the comparison with others'. An empty digest is compared with none."""

    name: Annotated[str, line(256)]
    """For people."""
    digest: Annotated[str, line(64)]
    """Of the script's content, or of the name of what is no script."""
    arguments: Annotated[str, line(64)] = ""
    """Digest of its arguments, which may be secrets: another one in each job."""
    lease_ttl_s: Age = 0.0
    outage_grace_s: Age = 0.0
    """How long a world may outlive its leases while the store is away."""


def fits(mine: Program | None, others: Program | None) -> bool:
    """May a node that would run `mine` train with those that run `others`?"""
    if mine is None or others is None:
        return True
    return not _other_script(mine, others) and not any(_other_times(mine, others))


def why_not(mine: Program, others: Program, of: str) -> str:
    """For the operator of a node that may not join; `of` is the node whose options hold."""
    times = tuple(_other_times(mine, others))
    if times:
        return (
            f"this node was started with {'; '.join(times)}, as node {of} was started: by these times nodes judge who "
            "is gone, so all must have the same. Give this node the job's; to change it, stop all agents of the job"
        )
    return (
        f"this node would run {mine.name} (content {mine.digest[:12]}), and the job runs {others.name} "
        f"({others.digest[:12]}) as node {of} does: give all nodes the same script. A new version of it gets in when "
        "all nodes of the old one have left"
    )


def differences(
    limits: Limits | None, program: Program | None, job: Limits | None, runs: Program | None
) -> Iterator[str]:
    """Each difference of a node's options (`limits`, `program`) from those of the job, in words."""
    if limits is not None and job is not None:
        for option, mine, theirs in (
            ("--min-nodes", limits.min_nodes, job.min_nodes),
            ("--max-nodes", limits.max_nodes, job.max_nodes),
            ("--nodes-multiple-of", limits.nodes_multiple_of, job.nodes_multiple_of),
            ("--max-restarts", _restarts(limits), _restarts(job)),
        ):
            if mine != theirs:
                yield f"{option} {mine}, where the job has {theirs}"
    if program is None or runs is None:
        return
    if _other_script(program, runs):
        yield f"another script, {program.name} ({program.digest[:12]} for {runs.digest[:12]})"
    if program.arguments != runs.arguments:
        yield "other arguments for the script"
    yield from _other_times(program, runs)


def _other_script(mine: Program, others: Program) -> bool:
    return bool(mine.digest and others.digest and mine.digest != others.digest)


def _other_times(mine: Program, others: Program) -> Iterator[str]:
    for option, here, there in (
        ("--lease-ttl", mine.lease_ttl_s, others.lease_ttl_s),
        ("--store-outage-grace", mine.outage_grace_s, others.outage_grace_s),
    ):
        if here != there:
            yield f"{option} {here:g}s, where the job has {there:g}s"


def _restarts(limits: Limits) -> str:
    return "auto" if limits.max_restarts is None else str(limits.max_restarts)


MAX_EXCLUSIONS = 64
"""Nodes of which a world remembers that they are excluded, or were."""
MAX_EXCLUSION_REASON = 200


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A node that is, or was, left out of all worlds, though its agent goes on and stands ready."""

    node: Name
    life: NameOrNone
    """The life of the node's agent at the exclusion. An agent started later need not wait for the cool-down. Empty: the
    job knew nothing of the node when an operator excluded it."""
    cause: CauseName
    """The cause of the failure, or `operator`."""
    reason: Annotated[str, line(MAX_EXCLUSION_REASON)]
    """A sentence for people."""
    fingerprint: Annotated[str, line(32)] = ""
    """`exclusions.digest` of the failure: the same failure on another node shows that this node is not to blame."""
    times: Positive = 1
    """How often this node has been excluded in this job: the cool-down is twice as long each time."""
    by_operator: bool = False
    """Until an operator readmits it."""
    readmitted: bool = False
    """The exclusion is over; the row is history."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """How an excluded node's newest check of itself went, after its cool-down."""

    times: Positive
    """The number of the node's exclusion that the check is about (`Exclusion.times`)."""
    passed: bool
    summary: Annotated[str, line(MAX_EXCLUSION_REASON)] = ""
