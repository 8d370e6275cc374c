"""How far the workers of a node are together: the last one counts until one has finished a step, then that one."""

from __future__ import annotations

import pytest

from elastic_agent.agent.observability.training_account import NodeProgress, Step, node_progress
from elastic_agent.worker.wire.shared_progress import Reading

BEGUN = Reading(script_at=1.0)
LOADING = Reading(script_at=1.5, load_at=2.0)
LOADED = Reading(script_at=1.5, load_at=2.0, loaded_at=3.0, loaded_step=40)
LATER = Reading(script_at=1.5, load_at=2.5, loaded_at=3.5, loaded_step=40)
STEPPED = Reading(41, 5.0, 41, 5.0, script_at=1.0, load_at=2.0, loaded_at=3.0, loaded_step=40)
FURTHER = Reading(43, 7.0, 41, 5.25, script_at=1.0, load_at=2.0, loaded_at=3.0, loaded_step=40)
PLAIN = Reading(7, 6.0, 1, 4.0)
"""Started and stepping, and says no more."""


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        pytest.param([], NodeProgress(), id="no workers"),
        pytest.param([Reading(), Reading()], NodeProgress(), id="nothing yet"),
        pytest.param([BEGUN, Reading()], NodeProgress(), id="one is not there yet"),
        pytest.param([BEGUN, LOADING], NodeProgress(began_at=1.5), id="the last one counts"),
        pytest.param([LOADED, LOADING], NodeProgress(1.5, 2.0), id="one still loads"),
        pytest.param([LOADED, LATER], NodeProgress(1.5, 2.5, Step(40, 3.5)), id="loaded"),
        pytest.param(
            [STEPPED, LATER],
            NodeProgress(1.5, 2.5, Step(40, 3.5), Step(41, 5.0), Step(41, 5.0)),
            id="one has stepped",
        ),
        pytest.param(
            [STEPPED, LOADING],
            NodeProgress(1.5, 2.0, Step(40, 3.0), Step(41, 5.0), Step(41, 5.0)),
            id="one has stepped and nobody waits for the other",
        ),
        pytest.param(
            [STEPPED, FURTHER],
            NodeProgress(1.0, 2.0, Step(40, 3.0), Step(41, 5.0), Step(43, 7.0)),
            id="the first and the furthest",
        ),
        pytest.param(
            [PLAIN], NodeProgress(first=Step(1, 4.0), newest=Step(7, 6.0)), id="no library but step()"
        ),
        pytest.param(
            [Reading(1, 4.0, 1, 4.0), Reading(script_at=9.0, load_at=9.5)],
            NodeProgress(4.0, 4.0, None, Step(1, 4.0), Step(1, 4.0)),
            id="nothing before the first step lies after it",
        ),
        pytest.param(
            [Reading(9, 8.0, 9, 8.0), Reading(9, 7.0, 9, 7.0)],
            NodeProgress(first=Step(9, 7.0), newest=Step(9, 7.0)),
            id="a step is done when the first worker has done it",
        ),
    ],
)
def test_how_far_they_are(readings: list[Reading], expected: NodeProgress) -> None:
    assert node_progress(readings) == expected
    assert node_progress(readings[::-1]) == expected
