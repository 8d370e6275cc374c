"""The page that shows what becomes of a job under torchrun has the rows of the program that runs both."""

from __future__ import annotations

import re
from pathlib import Path

from comparison import ROWS

PAGE = Path(__file__).parents[2] / "docs/comparison.md"


def test_each_row_can_be_run() -> None:
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE.read_text(), re.MULTILINE) == list(ROWS)
