"""Where the benchmarks put their tables."""

from __future__ import annotations

import pytest

from report import README, insert


def test_inserting_a_table_replaces_the_one_before_and_nothing_else() -> None:
    empty = "above\n<!-- table: begin -->\n<!-- table: end -->\nbelow\n"
    once = insert(empty, "| old |", "table")
    assert once == "above\n<!-- table: begin -->\n| old |\n<!-- table: end -->\nbelow\n"
    assert insert(once, "| new |", "table") == once.replace("old", "new")
    with pytest.raises(ValueError, match="nowhere to put the table"):
        insert("no markers", "| new |", "table")


@pytest.mark.parametrize("place", ["table", "scale", "step"])
def test_the_readme_has_a_place_for_each_table(place: str) -> None:
    assert "| new |" in insert(README.read_text(), "| new |", place)
