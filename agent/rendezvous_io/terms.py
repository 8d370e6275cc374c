"""How this node takes part in a job: the policy by which it judges, and what it would run, for others to compare."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from ...rendezvous.coordinator.restarts import RestartPolicy
from ...rendezvous.coordinator.view import Policy
from ...rendezvous.statements.terms import Program
from ..configuration.config import Config
from ..configuration.stopping import drain_timeout_s
from ..configuration.values import Command


def policy_of(config: Config) -> Policy:
    """A store that does not outlive the job has ended with a member's agent when it is away: no world is whole then."""
    kind = config.rendezvous.kind
    outlives_job = config.rendezvous.store_outlives_job
    grace_s = config.rendezvous.store_outage_grace_s if outlives_job else 0.0
    return Policy(
        job=config.rendezvous.job_id,
        min_nodes=config.nodes.min,
        max_nodes=config.nodes.max,
        nodes_multiple_of=config.nodes_multiple_of,
        last_call_s=config.rendezvous.last_call_s,
        join_timeout_s=config.rendezvous.join_timeout_s,
        drain_timeout_s=drain_timeout_s(config.stop),
        store_outlives_job=outlives_job,
        runs_again=False,
        store_outage_grace_s=grace_s,
        unleased_s=config.rendezvous.lease_ttl_s if grace_s or kind.forgets_leases else 0.0,
        restarts=RestartPolicy(max_failures=config.max_restarts),
        cool_down_s=config.rendezvous.cool_down_s,
    )


def program_of(config: Config, outage_grace_s: float) -> Program:
    """A script is known by its content: paths may differ from node to node. What is no script is known by its name.

    `outage_grace_s`: how long this node goes on without the store.
    """
    command = config.command
    return Program(
        name=_name(command)[:256],
        digest=_digest(command),
        arguments=_salted(command.args, config.rendezvous.job_id)[:16],
        lease_ttl_s=config.rendezvous.lease_ttl_s,
        outage_grace_s=outage_grace_s,
    )


def _salted(words: Sequence[str], job_id: str) -> str:
    """A digest that no table of digests holds: every job has another one of the same words."""
    return hashlib.sha256("\0".join((job_id, *words)).encode(errors="surrogateescape")).hexdigest()


def _name(command: Command) -> str:
    if command.kind == "module":
        return f"-m {command.target}"
    return os.path.basename(command.target)


def _digest(command: Command) -> str:
    """Empty for a script that cannot be read: workers will say so."""
    if command.kind in ("module", "binary"):
        return hashlib.sha256(f"{command.kind} {_name(command)}".encode(errors="surrogateescape")).hexdigest()
    try:
        with open(command.target, "rb") as script:
            return hashlib.sha256(script.read()).hexdigest()
    except OSError:
        return ""
