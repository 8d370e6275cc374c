"""The small files in which the kernel shows what it knows: /proc, /sys, cgroups.

The guard runs this, too: nothing that takes time to import.
"""

from __future__ import annotations

import os


def read(path: str | os.PathLike[str]) -> str:
    """Stripped; empty for what is not there, or cannot be read now."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
