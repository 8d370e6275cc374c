"""What the pages take from the code is as the code has it: tables, the diff of two examples, lines of the log."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

import pytest

from docs.tables import PAGES, TABLES, with_tables
from elastic_agent.agent.common.exits import ExitCode
from tests.names import ONLY_OF_COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_code(page: Path) -> None:
    text = page.read_text()
    assert text == with_tables(text), "make tables"


def test_each_table_is_on_one_page() -> None:
    named = re.findall(r"<!-- table: (\S+) -->", "\n".join(page.read_text() for page in PAGES))
    assert sorted(named) == sorted(TABLES)


def test_a_table_that_differs_is_seen() -> None:
    page = "<!-- table: exit-codes -->\n\n| 0 | LUCK |\n\n<!-- end -->\n"
    assert "| 0 | SUCCESS |" in with_tables(page)
    assert "LUCK" not in with_tables(page)


def code(name: str) -> list[str]:
    """The lines of an example without its docstring."""
    return (ROOT / "examples" / name).read_text().split('"""\n', 1)[1].splitlines()


def test_the_page_shows_what_the_library_changes_in_a_plain_script() -> None:
    whole = difflib.unified_diff(code("plain_ddp.py"), code("elastic_ddp.py"), n=1, lineterm="")
    shown = re.search(r"```diff\n(.*?)```", (ROOT / "docs/worker.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == [line for line in whole if not line.startswith(("---", "+++"))]


def texts(folder: str) -> set[str]:
    """All that the modules of a folder may say, without the values in it."""
    nodes = (node for file in (ROOT / folder).rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_runbook_quotes_lines_that_are_written() -> None:
    """Who meets one at night looks it up as it is: `...` stands for a value."""
    page = (ROOT / "docs/runbook.md").read_text().partition("\n## Log lines\n")[2].partition("\n## Causes")[0]
    quoted = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.+?) \| ", page, re.MULTILINE)))
    longest = [max(line.split("..."), key=len).strip(" ,:;").removeprefix("waiting: ") for line in quoted]
    said = set[str]().union(*map(texts, ("agent", "rendezvous", "worker")))
    assert len(longest) > 15
    assert [part for part in longest if not any(part in text for text in said)] == []


def test_the_runbook_says_what_to_do_about_each_exit_code() -> None:
    section = (ROOT / "docs/runbook.md").read_text().partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    codes = ",".join(re.findall(r"^\| ([0-9, ]+) \| ", section, re.MULTILINE)).split(",")
    asked = {ExitCode.SUCCESS, ExitCode.STOPPED_BY_SIGINT, ExitCode.STOPPED_BY_SIGTERM}
    assert sorted(map(int, codes)) == sorted(set(ExitCode) - ONLY_OF_COMMANDS - asked)


def test_the_files_that_pages_name_exist() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "tests/torch_cases.md",
        ROOT / "tests/mutations.txt",
    ]
    named = {name for page in pages for name in re.findall(r"tests/\w+/\w+\.py", page.read_text())}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
