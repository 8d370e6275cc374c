"""A leave has one time for its last saves."""

from __future__ import annotations

import math

import pytest

from elastic_agent.agent.configuration.stopping import LAST_SAVE_S, LEAST_SAVE_S, last_saves_s, whole_stop_s

# --- The last saves of a leave, at 100


@pytest.mark.parametrize(
    ("grace_s", "rescues", "handing_since", "saved_by", "within_s"),
    [
        (30.0, False, math.inf, math.inf, LAST_SAVE_S),  # there was no handover
        (30.0, True, math.inf, math.inf, 30.0),
        (5.0, True, math.inf, math.inf, LAST_SAVE_S),
        (30.0, True, 100.0, math.inf, 30.0),  # the handover itself
        (5.0, True, 100.0, math.inf, LAST_SAVE_S),
        (30.0, True, 88.0, math.inf, 18.0),  # what it has left
        (30.0, False, 88.0, math.inf, LAST_SAVE_S),
        (30.0, True, 60.0, math.inf, LEAST_SAVE_S),  # nothing
        (30.0, True, 88.0, 103.0, 3.0),  # the machine goes away before
        (30.0, True, 60.0, 100.4, 0.4),
        (30.0, True, math.inf, 99.0, 0.0),
    ],
)
def test_a_handover_and_the_last_saves_share_one_time(
    grace_s: float, rescues: bool, handing_since: float, saved_by: float, within_s: float
) -> None:
    found = last_saves_s(100.0, grace_s, rescues=rescues, handing_since=handing_since, saved_by=saved_by)
    assert found == pytest.approx(within_s)


@pytest.mark.parametrize("grace_s", [0.0, 5.0, 30.0, 300.0])
def test_handovers_and_last_saves_end_within_a_whole_stop(grace_s: float) -> None:
    for took_s in (0.0, 1.0, grace_s, grace_s + LAST_SAVE_S):
        handed_s = min(took_s, last_saves_s(0.0, grace_s, rescues=True, handing_since=0.0))
        saved_s = last_saves_s(handed_s, grace_s, rescues=True, handing_since=0.0)
        assert grace_s + handed_s + saved_s < whole_stop_s(grace_s)
