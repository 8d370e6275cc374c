"""The Dockerfile, as far as it can be judged without building it, and the wheel that it makes of its context."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from elastic_agent.agent.configuration.reading.sources import tomllib

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def context() -> set[Path]:
    """What .dockerignore lets through: everything is left out but what it names."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    return {Path(line[1:]) for line in lines if line.startswith("!")}


def test_the_last_stage_runs_the_agent_itself_and_not_as_root() -> None:
    last = dict(stages()[-1])
    assert json.loads(last["ENTRYPOINT"]) == ["elastic-agent"], "no shell between it and the signals"
    user, group = last["USER"].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert [word for word, _ in stages()[-1]].index("USER") > [word for word, _ in stages()[-1]].index("RUN")


def test_the_last_stage_compiles_nothing() -> None:
    assert len(stages()) == 2
    assert not re.search(r"apt-get|gcc|build-essential|curl|ADD", json.dumps(stages()[-1]))


def test_every_image_has_a_version() -> None:
    defaults = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    for stage in stages():
        image = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], stage[0][1].split()[0])
        assert re.search(r":[0-9]", image), image


def test_the_context_is_what_the_package_needs_and_no_more() -> None:
    assert all((ROOT / path).exists() for path in context())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {name.split(".")[:2][-1] for name in project["tool"]["setuptools"]["packages"]}
    assert {path.name for path in context() if (ROOT / path).is_dir()} == folders


def test_a_wheel_made_of_the_context_holds_every_module(tmp_path: Path) -> None:
    """The folders are links in the package, and only a wheel shows whether what they lead to is packed."""
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("the installed setuptools cannot build this package: pip install 'setuptools>=77'")
    tree = tmp_path / "tree"
    tree.mkdir()
    for path in context():
        if (ROOT / path).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / path, tree / path, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / path, tree / path)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, tree], check=True)
    [wheel] = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    folders = [path for path in context() if (tree / path).is_dir() and path.name != "elastic_agent"]
    modules = [module.relative_to(tree) for folder in folders for module in (tree / folder).rglob("*.py")]
    assert len(modules) > 50
    assert {f"elastic_agent/{module}" for module in modules} <= packed
    assert {"elastic_agent/__main__.py", "elastic_agent/py.typed"} <= packed
    assert "elastic_agent/agent/observability/page/page.html" in packed
