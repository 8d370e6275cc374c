"""What becomes of a job under torchrun, and torch's own cases: what these pages name is there to be run."""

from __future__ import annotations

import re
from pathlib import Path

from comparison import ROWS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/migrating.md"
CASES = ROOT / "tests/torch_cases.md"


def test_each_row_can_be_run() -> None:
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE.read_text(), re.MULTILINE) == list(ROWS)


def test_each_test_that_is_named_can_be_run() -> None:
    named = re.findall(r"`(tests/\S+\.py)(?: -k (?:(\w+)|\"([^\"]*)\"))?`", CASES.read_text())
    assert len(named) > 30
    for file, word, words in named:
        text = (ROOT / file).read_text()
        for one in filter(None, [word, *words.split(" or ")]):
            assert re.search(rf"^def test_\w*{one}", text, re.MULTILINE), f"{file} -k {one}"
