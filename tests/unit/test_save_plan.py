"""Which way a state takes: every occasion, for each rank, with and without memory and a disk writer."""

from __future__ import annotations

import itertools

import pytest

from elastic_agent.worker.checkpointing.replicated.saver import Occasion, SavePlan, ToDisk, plan_save

NEVER, NOW, BEHIND, AFTERWARDS = ToDisk.NEVER, ToDisk.NOW, ToDisk.BEHIND, ToDisk.AFTERWARDS
FULL = {"has_memory": True, "has_writer": True}
NO_WRITER = {"has_memory": True, "has_writer": False}
DISK_ONLY = {"has_memory": False, "has_writer": False}
FIRST = {"rank": 0, "copies_for_node": True}
FIRST_OF_ITS_NODE = {"rank": 4, "copies_for_node": True}
ANOTHER = {"rank": 5, "copies_for_node": False}


@pytest.mark.parametrize(
    ("occasion", "rank", "node", "plan"),
    [
        (Occasion.SAVE, FIRST, FULL, SavePlan(True, BEHIND, NOW, False)),
        (Occasion.SAVE, FIRST, NO_WRITER, SavePlan(True, NOW, NOW, False)),
        (Occasion.SAVE, FIRST, DISK_ONLY, SavePlan(False, NOW, NOW, False)),
        (Occasion.SAVE, FIRST_OF_ITS_NODE, FULL, SavePlan(True, NEVER, NEVER, False)),
        (Occasion.SAVE, FIRST_OF_ITS_NODE, DISK_ONLY, SavePlan(False, NEVER, NEVER, False)),
        (Occasion.SAVE, ANOTHER, FULL, SavePlan(False, NEVER, NEVER, False)),
        (Occasion.REMEMBER, FIRST, FULL, SavePlan(True, NEVER, NEVER, False)),
        (Occasion.REMEMBER, ANOTHER, FULL, SavePlan(False, NEVER, NEVER, False)),
        (Occasion.LAST_STEP, FIRST, FULL, SavePlan(True, AFTERWARDS, NOW, False)),
        (Occasion.LAST_STEP, FIRST, NO_WRITER, SavePlan(True, NEVER, NOW, False)),
        (Occasion.LAST_STEP, FIRST, DISK_ONLY, SavePlan(False, NOW, NOW, False)),
        (Occasion.LAST_STEP, FIRST_OF_ITS_NODE, FULL, SavePlan(True, NEVER, NEVER, False)),
        (Occasion.LAST_STEP, ANOTHER, FULL, SavePlan(False, NEVER, NEVER, False)),
        (Occasion.LAST_STEP_ALONE, FIRST, FULL, SavePlan(True, NEVER, NEVER, True)),
        (Occasion.LAST_STEP_ALONE, ANOTHER, FULL, SavePlan(False, NEVER, NEVER, True)),
        (Occasion.FAILURE, FIRST, FULL, SavePlan(True, NEVER, NEVER, True)),
        (Occasion.FAILURE, ANOTHER, FULL, SavePlan(True, NEVER, NEVER, True)),
    ],
)
def test_the_plan_is(occasion: Occasion, rank: dict[str, int], node: dict[str, bool], plan: SavePlan) -> None:
    assert plan_save(occasion, **rank, **node) == plan  # type: ignore[arg-type]


def test_in_every_combination() -> None:
    flags = (False, True)
    for occasion, rank, has_memory, copies_for_node, has_writer in itertools.product(
        Occasion, (0, 1), flags, flags, flags
    ):
        plan = plan_save(
            occasion, rank=rank, has_memory=has_memory, copies_for_node=copies_for_node, has_writer=has_writer
        )
        assert has_memory or not plan.copies
        assert rank == 0 or plan.way_to_disk(copied=False) is NEVER, "only rank 0 writes to the directory"
        assert plan.without_copy in (NOW, NEVER), "the writer reads a copy"
        if occasion is Occasion.SAVE and rank == 0:
            assert NEVER not in (plan.disk, plan.without_copy), "a save is durable in the end"
        if plan.disk in (BEHIND, AFTERWARDS):
            assert plan.copies
            assert has_writer
