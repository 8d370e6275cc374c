"""What all nodes of a job should be started with: how many nodes and restarts it may have, and what it runs.

Each node writes its own into its record, and the first world takes over those of the node that coordinates it. They are
in force, whichever node coordinates later, as long as one member lives (`decide`). A node with other options
can neither shrink a healthy job nor end it. In no world is one that would run another script, or that judges by other
times who is gone: it would take a node that lives for lost, or go on in a place that another has been given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ...codec import Count, Positive
from ..text import Age, line


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
