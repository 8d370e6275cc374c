"""Links between the pages of this repository point at files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "benchmarks/README.md",
            "tests/torch_cases.md",
        )
    ),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_code(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        repeated = sum(one == anchor or re.fullmatch(rf"{anchor}-\d+", one) is not None for one in found)
        found.add(f"{anchor}-{repeated}" if repeated else anchor)
    return found


def broken(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def gone(page: Path) -> list[str]:
    """Modules in backticks whose file is nowhere in the tree."""
    files = [file.as_posix() for file in ROOT.rglob("*.py") if ".venv" not in file.as_posix()]
    named = re.findall(r"`(\w[\w/]*\.py)`", page.read_text())
    return [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_modules_that_a_page_names_exist(page: Path) -> None:
    assert gone(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `One` heading, (with) more!\n## Two\n## Two\n```\n# Code\n```\n")
    assert anchors(page) == {"one-heading-with-more", "two", "two-1"}
    page.write_text(
        page.read_text() + "[a](#two-1) [b](page.md#code) [c](gone.md) [d](https://example.org/#e)\n"
    )
    assert broken(page) == ["page.md#code", "gone.md"]
