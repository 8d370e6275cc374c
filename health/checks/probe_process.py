"""Starts a module of this package as a process that probes: orders come on standard input, answers on standard output.

It leads a session of its own, so that no signal of a terminal ends it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import __file__ as _package

PROGRAM = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; from {module} import main; main()"
)
"""An empty entry is the current directory, whose modules are not to be imported. This package comes last."""

ISOLATED = ("-I", "-S")
"""For a probe that needs the standard library and this package only: no module of PYTHONPATH is imported, and nothing
that is installed runs at its start."""

_PACKAGES = Path(_package).parents[1]


def probe_command(python: str, module: str, *, flags: Sequence[str] = ()) -> list[str]:
    """`module` has a `main`."""
    return [python, *flags, "-c", PROGRAM.format(module=module), str(_PACKAGES)]


def start_probe_process(
    python: str,
    module: str,
    environ: Mapping[str, str],
    *,
    flags: Sequence[str] = (),
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """`descriptors` are open there, too. Raises OSError."""
    return subprocess.Popen(
        probe_command(python, module, flags=flags),
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=tuple(descriptors),
        start_new_session=True,
    )
