"""The commands about a pool and its jobs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

MODULES = {"submit": "submit", "jobs": "jobs", "wait": "jobs", "cancel": "jobs", "logs": "logs"}
"""Each command is a function of this module, of its own name."""


def run(command: str, words: Sequence[str]) -> int:
    """Returns the exit code. A command is imported when it is called."""
    module = importlib.import_module(f".{MODULES[command]}", __name__)
    return int(getattr(module, command)(words))
