"""Which folder may import which, and that nothing imports in a circle.

The imports are read from the syntax tree, so those under TYPE_CHECKING and inside functions count, too; a finding says
which kind it is. What the package loads by name at run time (`worker/__init__.py`) is not seen here.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "elastic_agent"
TOPS = ("rendezvous", "worker", "health", "agent", "pool")
LOWEST = {
    "codec.py": "codec",
    "threads.py": "threads",
    "worker/errors.py": "worker/errors",
    "rendezvous/text.py": "rendezvous/text",
}
"""Modules that stand on a floor of their own, below those beside them."""

START = "start"
"""The other modules of `elastic_agent/`: the ways to start an agent."""

TABLE = """
codec:
threads:
worker/errors:
worker/wire:
worker/state: worker/errors
worker/state/sharding: worker/errors worker/state
worker/steps: worker/errors worker/wire
worker/ranks: worker/errors worker/wire worker/state worker/steps
worker/storage/memory: worker/wire worker/state worker/state/sharding
worker/storage/replication: worker/wire worker/storage/memory
worker/storage/disk: worker/errors worker/wire worker/state/sharding worker/steps worker/storage/memory
worker/checkpointing/loading: worker/errors worker/wire worker/state worker/state/sharding worker/steps \
    worker/ranks worker/storage/memory \
    worker/storage/disk worker/storage/replication
worker/checkpointing/saving: worker/errors worker/wire worker/state/sharding worker/state worker/steps worker/ranks \
    worker/storage/memory worker/storage/disk
worker/checkpointing/replicated: worker/errors worker/wire worker/state worker/state/sharding worker/steps \
    worker/ranks worker/storage/memory worker/storage/disk worker/checkpointing/loading worker/checkpointing/saving
worker/checkpointing/sharded: worker/errors worker/wire worker/state worker/state/sharding worker/steps worker/ranks \
    worker/storage/memory worker/storage/disk worker/storage/replication \
    worker/checkpointing/loading worker/checkpointing/saving
worker/checkpointing: worker/errors worker/wire worker/state worker/state/sharding worker/steps worker/ranks \
    worker/storage/disk worker/checkpointing/replicated worker/checkpointing/sharded
worker/dcp: worker/errors worker/wire worker/state/sharding worker/steps worker/ranks worker/storage/memory \
    worker/storage/disk worker/storage/replication worker/checkpointing/loading \
    worker/checkpointing/saving worker/checkpointing/sharded
worker: worker/errors worker/state worker/steps worker/ranks worker/checkpointing
rendezvous/text:
health/checks:
health: health/checks rendezvous/text
rendezvous: rendezvous/text health
rendezvous/store: rendezvous
rendezvous/c10d: rendezvous rendezvous/store
rendezvous/etcd: rendezvous rendezvous/store
rendezvous/local: rendezvous rendezvous/store
rendezvous/coordinator: rendezvous/text health rendezvous
rendezvous/node: health rendezvous rendezvous/store rendezvous/coordinator
common:
output: common
configuration: rendezvous/c10d rendezvous/etcd rendezvous/local common
workers/processes: common output configuration
checkpoints: common workers/processes
machine: common configuration workers/processes checkpoints
rendezvous_io: common configuration machine
observability: common output configuration workers/processes rendezvous_io
workers: common output configuration checkpoints machine rendezvous_io workers/processes \
    observability
main: common output configuration workers/processes machine checkpoints \
    rendezvous_io observability workers
commands: common output configuration workers/processes machine rendezvous_io observability main
pool: worker/wire health/checks health rendezvous/text rendezvous rendezvous/store common output \
    configuration machine workers/processes rendezvous_io main commands
torchrun: rendezvous/etcd common configuration machine rendezvous_io main
start: common configuration workers/processes machine main pool
"""
"""From the bottom up: each folder, and those above it in this table that it may import; `codec` and
`threads` are for all. Names without a library before them are folders of agent; each of these may import `LIBRARIES`
besides, as `pool` may, but not the stores in their folders, of which only the configuration knows."""

STORES = ("rendezvous/c10d", "rendezvous/etcd", "rendezvous/local")

MAY_IMPORT = {
    name: tuple(allowed.split())
    for name, _, allowed in (row.partition(":") for row in TABLE.strip().split("\n"))
}

LIBRARIES = tuple(
    name
    for name in MAY_IMPORT
    if name.partition("/")[0] in ("codec", "threads", *TOPS[:3]) and name not in STORES
)


@dataclass(frozen=True)
class Import:
    """`source` and `target` are files."""

    source: str
    target: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line} ({self.kind}): {self.text}"


@functools.cache
def product() -> dict[str, str]:
    files = [file for top in TOPS for file in sorted((ROOT / top).rglob("*.py"))]
    beside = {file.name: file.read_text() for file in sorted((ROOT / PACKAGE).glob("*.py"))}
    return beside | {str(file.relative_to(ROOT)): file.read_text() for file in files}


def imports(sources: Mapping[str, str]) -> list[Import]:
    """All that these files import from one another."""
    return [found for file, text in sources.items() for found in imports_of(file, text, sources)]


def imports_of(file: str, text: str, sources: Mapping[str, str]) -> Iterator[Import]:
    def walk(node: ast.AST, kind: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = kind
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inside = "inside a function"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inside = "for types only"
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target in _targets(file, child, sources):
                    if target != file:
                        yield Import(file, target, child.lineno, kind, ast.unparse(child))
            yield from walk(child, inside)

    return walk(ast.parse(text), "at import")


def _targets(file: str, node: ast.Import | ast.ImportFrom, sources: Mapping[str, str]) -> set[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        above = [PACKAGE, *file.split("/")[:-1]]
        base = above[: len(above) - node.level + 1] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        names = [f"{module}.{alias.name}" for alias in node.names]
    return set(filter(None, (_file(name, sources) for name in names)))


def _file(name: str, sources: Mapping[str, str]) -> str | None:
    """The file of ours that is meant by the dotted name of a module, or of something in a module."""
    first, *rest = name.split(".")
    while first == PACKAGE and rest:
        path = "/".join(rest)
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if candidate in sources:
                return candidate
        rest.pop()
    return None


@functools.cache
def of_product() -> list[Import]:
    return imports(product())


def folder(file: str) -> str:
    """As the table names it."""
    return LOWEST.get(file, START if "/" not in file else str(Path(file).parent).removeprefix("agent/"))


def forbidden(found: list[Import]) -> list[str]:
    problems = []
    for one in found:
        source, target = folder(one.source), folder(one.target)
        base = LIBRARIES if one.source.startswith(("agent/", "pool/")) else ("codec", "threads")
        allowed = source == target or target in (*MAY_IMPORT[source], *base)
        if not allowed:
            problems.append(f"{one}\n    {source} may not import {target}")
    return problems


def circles(found: list[Import]) -> list[str]:
    """Each circle of modules once, with the lines that close it."""
    ways: dict[str, dict[str, Import]] = {}
    for one in found:
        ways.setdefault(one.source, {}).setdefault(one.target, one)
    done: set[str] = set()
    problems = []

    def follow(file: str, path: list[str]) -> None:
        if file in path:
            lines = [*path[path.index(file) :], file]
            steps = [str(ways[a][b]) for a, b in itertools.pairwise(lines)]
            problems.append("a circle of imports\n    " + "\n    ".join(steps))
        elif file not in done:
            for target in ways.get(file, ()):
                follow(target, [*path, file])
            done.add(file)

    for file in ways:
        follow(file, [])
    return problems


def test_every_folder_has_a_row() -> None:
    rooms = {folder(file) for file in product() if not file.endswith("__init__.py")}
    assert rooms == set(MAY_IMPORT)
    assert set(LOWEST) <= set(product())


def test_a_folder_imports_only_those_above_it_in_the_table() -> None:
    """So there is no circle between folders."""
    above: set[str] = set()
    for name, allowed in MAY_IMPORT.items():
        assert set(allowed) <= above, f"{name} may import what stands below it: {set(allowed) - above}"
        above.add(name)


def test_folders_import_what_they_may() -> None:
    found = forbidden(of_product())
    assert not found, "\n".join(found)


def test_what_the_table_allows_is_needed() -> None:
    found = of_product()
    needed = {(folder(one.source), folder(one.target)) for one in found}
    spare = {(name, other) for name, allowed in MAY_IMPORT.items() for other in allowed} - needed
    assert not spare, "take these out of the table"


def test_no_module_imports_itself_through_others() -> None:
    found = circles(of_product())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "worker/planted.py",
            "import os\nfrom ..agent.common.exits import ExitCode\n",
            "worker/planted.py:2 (at import): from ..agent.common.exits import ExitCode\n"
            "    worker may not import common",
        ),
        (
            "rendezvous/planted.py",
            "def late():\n    from ..worker.storage.memory import slots\n",
            "rendezvous/planted.py:2 (inside a function): from ..worker.storage.memory import slots\n"
            "    rendezvous may not import worker/storage/memory",
        ),
        (
            "agent/machine/planted.py",
            "if TYPE_CHECKING:\n    from ..workers.environment import Variable\n",
            "agent/machine/planted.py:2 (for types only): from ..workers.environment import Variable\n"
            "    machine may not import workers",
        ),
        (
            "agent/output/planted.py",
            "from ..main.cli import main\n",
            "agent/output/planted.py:1 (at import): from ..main.cli import main\n    output may not import main",
        ),
        (
            "health/planted.py",
            "import elastic_agent.rendezvous.records\n",
            "health/planted.py:1 (at import): import elastic_agent.rendezvous.records\n"
            "    health may not import rendezvous",
        ),
    ],
)
def test_a_forbidden_import_is_found_with_its_line(file: str, text: str, expected: str) -> None:
    assert forbidden(list(imports_of(file, text, product()))) == [expected]


def test_a_circle_is_found_with_its_lines() -> None:
    planted = {
        "worker/one.py": "from .two import b\n",
        "worker/two.py": "from . import three\n",
        "worker/three.py": "def late():\n    from .one import a\n",
        "worker/four.py": "from .one import a\n",
    }
    assert circles(imports(planted)) == [
        "a circle of imports\n"
        "    worker/one.py:1 (at import): from .two import b\n"
        "    worker/two.py:1 (at import): from . import three\n"
        "    worker/three.py:2 (inside a function): from .one import a"
    ]


TWICE = {"Outcome", "Peer", "Seen", "Stage", "Task", "Verdict"}
"""Names of classes that are there more than once, of those in agent and health. None comes in."""


def test_no_name_of_a_class_is_there_twice() -> None:
    names = Counter[str]()
    ours = set()
    for file, text in product().items():
        found = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}
        names.update(name for name in found if not name.startswith("_"))
        ours |= found if file.startswith(("agent/", "health/")) else set()
    assert {name for name in ours if names[name] > 1} <= TWICE
