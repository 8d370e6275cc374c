"""What docstrings show is what happens."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = [
    path.relative_to(ROOT)
    for folder in ("agent", "health", "pool", "rendezvous", "worker")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "    >>> " in path.read_text()
]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_an_example(path: Path) -> None:
    module = importlib.import_module(".".join(("elastic_agent", *path.with_suffix("").parts)))
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed
