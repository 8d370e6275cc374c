"""A library of NVML that says what a test wants; see `fake_nvml/nvml.c`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml") / "nvml.c"


class FakeLibrary:
    """Compiled into `folder`, where its state is, too. Skips the test without a compiler."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("gcc") is None:
            pytest.skip("no C compiler")
        library = folder / "libnvidia-ml.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        self.state = folder / "nvml-state"
        self.environment = {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML_STATE": str(self.state)}
        self.says()

    @property
    def asked(self) -> int:
        """How often a GPU was."""
        return self._counted("asked")

    @property
    def looks(self) -> int:
        """How often a GPU's memory was looked at."""
        return self._counted("looks")

    def _counted(self, what: str) -> int:
        file = Path(f"{self.state}.{what}")
        return file.stat().st_size if file.exists() else 0

    def says(self, *lines: str) -> None:
        """From now on, whole at once."""
        new = self.state.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.state)
