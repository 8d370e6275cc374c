"""The command of a process that runs a function of this package: what hangs in a driver, a disk or torch is killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ... import __file__ as _package

PROGRAM = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; from {module} import {main}; {main}()"
)
"""An empty entry is the current directory, whose modules are not to be imported. This package comes last."""

ISOLATED = ("-I", "-S")
"""For a probe that needs the standard library and this package only: no module of PYTHONPATH is imported, and nothing
that is installed runs at its start."""

_PACKAGES = Path(_package).parents[1]


def probe_command(python: str, module: str, main: str = "main", flags: Sequence[str] = ()) -> list[str]:
    """`main` is a function of `module`; what is put behind the command is its `sys.argv[2:]`."""
    return [python, *flags, "-c", PROGRAM.format(module=module, main=main), str(_PACKAGES)]
