"""The rules of the checks that an excluded node must pass, in addition to those before each join."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ....codec import AtMost, Checked, Count, Text
from ..finding import Finding, Outcome
from ..needs import MOST_PEERS, NodeNeeds

WRONG_ADVICE = (
    "the device, its driver or the installation of torch is broken: look at dmesg, reset the device or reboot this"
    " machine, and have it replaced"
)
SILENT_ADVICE = "look at this machine's network and at what stands between it and the other nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticFacts(Checked):
    problem: Annotated[str, Text(1024)] = ""
    """Why there is no result; empty where there is one."""
    devices: Annotated[tuple[Annotated[str, Text(64)], ...], AtMost(257)] = ()
    wrong: Annotated[tuple[Annotated[str, Text(64)], ...], AtMost(257)] = ()
    """Devices whose copies or products are wrong."""
    sees_no_gpu: bool = False
    """torch is built for CUDA, and finds no device: broken ones may not be shown at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts(Checked):
    asked: Count
    silent: Annotated[tuple[Annotated[str, Text(280)], ...], AtMost(MOST_PEERS)] = ()


def judge_arithmetic(facts: ArithmeticFacts, needs: NodeNeeds) -> Finding:
    if facts.problem:
        return Finding("arithmetic", Outcome.FAIL, facts.problem, WRONG_ADVICE)
    if facts.sees_no_gpu and needs.gpus:
        return Finding(
            "arithmetic", Outcome.FAIL, f"torch finds none of the {len(needs.gpus)} GPUs", WRONG_ADVICE
        )
    if facts.wrong:
        wrong = ", ".join(facts.wrong)
        return Finding(
            "arithmetic", Outcome.FAIL, f"{wrong}: copies or matrix products come back wrong", WRONG_ADVICE
        )
    return Finding(
        "arithmetic", Outcome.OK, f"copies and matrix products agree on {', '.join(facts.devices)}"
    )


def judge_peers(facts: PeerFacts, needs: NodeNeeds) -> Finding:
    """Most peers have to answer: a single silent one may itself be gone."""
    silent = ", ".join(facts.silent)
    if 2 * len(facts.silent) > facts.asked:
        return Finding("peers", Outcome.FAIL, f"no answer over HTTP from {silent}", SILENT_ADVICE)
    if facts.silent:
        return Finding("peers", Outcome.WARN, f"no answer over HTTP from {silent}", SILENT_ADVICE)
    return Finding("peers", Outcome.OK, f"{facts.asked} other nodes answer over HTTP")
