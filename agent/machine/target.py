"""The module or program that workers are to run, looked for where they will look. Nothing of it is run.

A script is a file, which `configuration.reading.validation` checks. Where the answer is not certain, as with an
interpreter that is not ours or a package that changes its own path, the target counts as found.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder

from ..configuration.config import ConfigError, Problem
from ..configuration.types.values import Command
from ..workers.processes.workers import job_python


def check_target(command: Command, environ: Mapping[str, str]) -> None:
    """Raises ConfigError: no restart helps what is not there."""
    if command.kind == "binary" and shutil.which(command.target, path=environ.get("PATH")) is None:
        expected = "a program that exists and may be run"
        advice = f"check its name and PATH, or write its path, seen from {os.getcwd()}"
        raise ConfigError([Problem("--no-python", command.target, expected, advice)])
    ours = job_python(environ) == sys.executable
    if command.kind == "module" and ours and (missing := _missing(command.target)):
        advice = (
            f"check its name; Python looks in {os.getcwd()}, in PYTHONPATH and among what is installed for it"
        )
        raise ConfigError([Problem("-m", command.target, f"a module, but {missing}", advice)])


def _missing(module: str) -> str:
    """What is not there; empty when all is, or when that is not certain."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except (ImportError, ValueError, AttributeError):
        return ""
    if spec is None:
        return f"there is no {top}"
    for name in [*rest, "__main__"]:
        folders = _search_path(spec)
        if folders is None or (name == "__main__" and not folders):  # a module that is no package
            return ""
        inner = PathFinder.find_spec(f"{spec.name}.{name}", folders)
        if inner is None:
            main = name == "__main__"
            return f"{spec.name} is a package without __main__" if main else f"{spec.name} has no {name}"
        spec = inner
    return ""


def _search_path(spec: ModuleSpec) -> Sequence[str] | None:
    """Where its submodules are; None when only the package itself knows."""
    if spec.origin is not None and spec.submodule_search_locations:
        try:
            with open(spec.origin, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            return None
        if "__path__" in text or "sys.modules" in text:
            return None
    return list(spec.submodule_search_locations or ())
