"""docs/worker.md tells the truth about the examples and names everything that the library has."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from elastic_agent import worker

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/worker.md").read_text()


def code(name: str) -> list[str]:
    """The lines of an example without its docstring."""
    return (ROOT / "examples" / name).read_text().split('"""\n', 1)[1].splitlines()


@pytest.mark.parametrize(("number", "kind"), [(0, "ddp"), (1, "fsdp")])
def test_the_page_shows_what_the_library_changes_in_a_plain_script(number: int, kind: str) -> None:
    whole = difflib.unified_diff(code(f"plain_{kind}.py"), code(f"elastic_{kind}.py"), n=1, lineterm="")
    shown = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    expected = [line for line in whole if not line.startswith(("---", "+++"))]
    assert shown[number : number + 1] == ["".join(f"{line}\n" for line in expected)], "\n".join(expected)


def test_the_page_names_everything() -> None:
    missing = [name for name in worker.__all__ if not re.search(rf"\b{name}\b", PAGE)]
    assert missing == []
