"""What some tests cannot do without."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import pytest


def skip_without(tools: Sequence[str], package: str, only_root: str) -> None:
    """Skips the test for another user than root, and where a tool of that package is missing."""
    if os.geteuid() != 0:
        pytest.skip(only_root)
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing: .ci/system-packages {package}")
