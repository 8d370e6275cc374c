"""The command `elastic-agent`, and `python -m elastic_agent`."""

from __future__ import annotations

import contextlib
import os
import sys

from .agent.cli import main
from .agent.processes.init import go_on_below_init


def start() -> None:
    """Ends the process without waiting for threads: one that hangs in a dead store's connection must not delay or
    change the exit code, and everything that has to be closed was closed by `main`."""
    go_on_below_init()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads our output any more: no reason for another code
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    start()
