"""What tests know of exit codes and findings beyond the product's own tables."""

from __future__ import annotations

from elastic_agent.agent.common.exits import ExitCode

ONLY_OF_COMMANDS = {ExitCode(code) for code in (66, 67, 68, 141)}
"""No agent ends so."""

REQUEUE = {ExitCode(code) for code in (69, 70, 71, 73, 74, 75, 79, 80)}
"""Another start of the job, there or on other nodes, goes on. A person wanted the end of the others, or has to look."""

PEER_CHECKS = (
    "peer-present",
    "peer-reachable",
    "peer-all-reduce",
    "peer-bandwidth",
    "same-network",
    "same-software",
)
"""The names of all findings of several nodes together."""
