"""elastic-agent as its users have it: a wheel of this tree, installed beside the libraries of the tests.

A checkout that is installed in place is something else: there a finder of setuptools has imported modules before
anything begins, and Python looks for `elastic_agent` in the current folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def context() -> set[Path]:
    """What .dockerignore lets through, of which the wheel is made: everything is left out but what it names."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    return {Path(line[1:]) for line in lines if line.startswith("!")}


@dataclass(frozen=True, slots=True)
class Installed:
    """In a virtual environment, whose programs are in `bin`."""

    folder: Path

    @property
    def tree(self) -> Path:
        """What it was built from."""
        return self.folder / "tree"

    @property
    def wheel(self) -> Path:
        (found,) = self.folder.glob("*.whl")
        return found

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    def make(self) -> None:
        self.tree.mkdir(parents=True)
        for path in context():
            if (ROOT / path).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / path, self.tree / path, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / path, self.tree / path)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", self.folder, self.tree]
        subprocess.run([*pip, *build], check=True)
        venv.create(self.folder / "venv", symlinks=True)
        (packages,) = self.folder.glob("venv/lib/python*/site-packages")
        (packages / "tests.pth").write_text("\n".join(site.getsitepackages()))
        subprocess.run(
            [*pip, "--python", self.python, "install", "--no-deps", "--no-index", self.wheel], check=True
        )


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Made once for all processes of pytest-xdist."""
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("the installed setuptools cannot build this package: pip install 'setuptools>=77'")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    made = Installed(shared / "installed")
    with open(shared / "installed.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.folder.exists():
            made.make()
    return made
