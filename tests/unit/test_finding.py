"""Findings: their order for a person, and what of them travels between processes and nodes."""

from __future__ import annotations

import itertools

import pytest

from elastic_agent.codec import Codec, Invalid
from elastic_agent.health.checks.finding import Finding, Outcome, worst, worst_first

CODEC: Codec[Finding] = Codec((Finding,), version=1, most_bytes=16_384)


def _finding(outcome: Outcome, check: str = "gpu-ecc") -> Finding:
    return Finding(check, outcome, "found")


@pytest.mark.parametrize(("better", "worse"), list(itertools.combinations(reversed(Outcome), 2)))
def test_the_worst_is_the_first_of_fail_warn_unknown_ok(better: Outcome, worse: Outcome) -> None:
    assert worst([_finding(better), _finding(worse), _finding(better)]) is worse


def test_of_one_outcome_the_order_stays() -> None:
    given = [
        _finding(Outcome.OK, "a"),
        _finding(Outcome.WARN, "b"),
        _finding(Outcome.OK, "c"),
        _finding(Outcome.FAIL, "d"),
        _finding(Outcome.WARN, "e"),
    ]
    assert [finding.check for finding in worst_first(given)] == ["d", "b", "e", "a", "c"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"check": "GPU ecc"}, "check"),
        ({"outcome": "broken"}, "outcome"),
        ({"summary": "x" * 7000}, "summary"),
    ],
)
def test_what_is_no_finding_is_refused(changed: dict[str, object], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        CODEC.unpack({**CODEC.pack(_finding(Outcome.OK)), **changed})
