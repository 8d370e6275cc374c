"""What is read from a store, a socket or a disk is never code: the whole package is read for the ways to break that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("agent", "health", "pool", "rendezvous", "worker", "elastic_agent", "deploy", "examples")
FILES = sorted({file.resolve() for room in ROOMS for file in (ROOT / room).rglob("*.py")})

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "code"}
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "getoutput", "getstatusoutput"}
TRUSTED_MODULES = {"re"}  # re.compile
WRITERS = {"Pickler", "dumps"}
"""They read nothing."""
PLAIN_VALUES = ROOT / "agent" / "workers" / "evidence.py"
"""torch writes a pickle: no class or function comes out of it, which `test_flight_records` proves."""
OWN_FUNCTIONS = {ROOT / "elastic_agent" / "launcher.py"}
"""A user's own function goes to that user's own workers and its results come back, through a folder that is private to
that user: whoever could write there could change the script as well."""
SCRIPT = {ROOT / "agent/workers/processes/fork_server.py": "calls compile"}
"""Where a fork server runs the user's script, as a new Python would."""


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if not {alias.name for alias in node.names} <= WRITERS else []
        else:
            names = []
        for name in names:
            if name.partition(".")[0] in MODULES:
                yield f"line {node.lineno}: imports {name}"
        if isinstance(node, ast.Call):
            yield from calls(node)


def calls(node: ast.Call) -> Iterator[str]:
    called = node.func
    owner = (
        called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
    )
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name in CALLS and owner not in TRUSTED_MODULES:
        yield f"line {node.lineno}: calls {name}"
    said = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
    if said.get("shell"):
        yield f"line {node.lineno}: starts a shell"
    if (owner, name) == ("torch", "load") and said.get("weights_only") is not True:
        yield f"line {node.lineno}: torch.load without weights_only=True"


def test_the_files_are_found() -> None:
    assert len(FILES) > 60


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_data_becomes_code(file: Path) -> None:
    found = list(offences(ast.parse(file.read_text())))
    if file in {*OWN_FUNCTIONS, PLAIN_VALUES}:
        found = [offence for offence in found if not offence.endswith("imports pickle")]
    if file in SCRIPT:
        found = [offence for offence in found if not offence.endswith(SCRIPT[file])]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "from pickle import Pickler, Unpickler",
        "import yaml.constructor",
        "eval(text)",
        "builtins.exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=trusted)",
    ],
)
def test_each_way_would_be_found(line: str) -> None:
    assert len(list(offences(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import json",
        "from pickle import Pickler",
        "re.compile(text)",
        "torch.load(path, weights_only=True)",
        "run(words, shell=False)",
    ],
)
def test_what_is_harmless_is_left_alone(line: str) -> None:
    assert list(offences(ast.parse(line))) == []
