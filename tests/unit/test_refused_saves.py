"""Which saves that the disk refused still count when a job has ended with success."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_agent.agent.rendezvous_io.worker_links import RefusedSaves
from elastic_agent.worker.wire.messages import SaveReport


def report(step: int, result: Any, *, generation: int = 1, rank: int = 0, **more: Any) -> SaveReport:
    return SaveReport(generation, rank, step, result, 0.1, 10, **{"directory": "/runs/x", **more})


OK_5, OK_6, REFUSED_5, REFUSED_6 = (report(step, result) for result in ("ok", "error") for step in (5, 6))


@pytest.mark.parametrize(
    ("reports", "lost"),
    [
        ([], None),
        ([OK_5], None),
        ([REFUSED_5], 5),
        ([OK_5, REFUSED_6], 6),
        ([REFUSED_5, REFUSED_6], 6),
        ([REFUSED_5, OK_6], None),
        ([REFUSED_5, OK_5], None),
        ([REFUSED_6, OK_5], 6),
        ([OK_6, REFUSED_5], None),
        ([OK_5, REFUSED_5], None),
        ([report(5, "error", tier="memory"), report(5, "error", tier="part")], None),
        ([REFUSED_5, report(6, "ok", tier="memory"), report(6, "ok", tier="part")], 5),
        ([REFUSED_5, report(6, "ok", directory="/runs/best")], 5),
        ([REFUSED_5, report(6, "ok", rank=1)], 5),
        ([report(5, "error", directory=""), report(6, "ok", directory="")], None),
        ([report(9, "error", generation=0), OK_5], None),
        ([OK_5, report(9, "error", generation=0)], None),
        ([report(9, "ok", generation=0), REFUSED_5], 5),
    ],
)  # fmt: skip
def test_the_newest_refused_save_counts_until_it_is_on_disk(
    reports: list[SaveReport], lost: int | None
) -> None:
    saves = RefusedSaves()
    for one in reports:
        saves.add(one)
    expected = "" if lost is None else (
        f"step {lost} is NOT on disk in /runs/x: its save was refused, a warning of its worker says why"
    )  # fmt: skip
    assert saves.lost_in(1) == expected


def test_what_another_generation_could_not_save_is_not_lost() -> None:
    """This node had no rank 0 in the last one, or no worker at all."""
    saves = RefusedSaves()
    saves.add(REFUSED_5)
    assert saves.lost_in(2) == ""


def test_a_save_of_the_scripts_own_has_no_directory() -> None:
    saves = RefusedSaves()
    saves.add(report(5, "error", directory=""))
    assert saves.lost_in(1).startswith("step 5 is NOT on disk: its save")
