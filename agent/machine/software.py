"""Which torch and which NCCL the workers will load, by the metadata of what is installed: torch is not imported here.

Settings have changed their names and defaults from version to version, so a row of the table of settings holds for a
`Range` of versions. A version that is unknown counts as a current one: that is what this package needs itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from ..workers.processes.workers import job_python

ASKING_S = 10.0
"""How long another interpreter may take to list what it has installed."""

_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_NAMES = ("torch", *_NCCL)

_PROGRAM = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Range:
    """Versions from `since` on and below `below`; empty: no such bound."""

    since: str = ""
    below: str = ""

    def __contains__(self, version: str | None) -> bool:
        if version is None:
            return not self.below
        release = _release(version)
        return release >= _release(self.since) and (not self.below or release < _release(self.below))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.since and f">= {self.since}", self.below and f"< {self.below}")))


ANY = Range()


@dataclass(frozen=True, slots=True)
class Software:
    """Versions as installed; None where they are not known."""

    torch: str | None = None
    nccl: str | None = None

    @property
    def has_nccl(self) -> bool:
        """False for the builds of torch that cannot use a GPU."""
        return self.torch is None or not self.torch.endswith("+cpu")

    def __str__(self) -> str:
        versions = [f"{name} {found or 'of unknown version'}" for name, found in asdict(self).items()]
        return versions[0] if not self.has_nccl else ", ".join(versions)


CURRENT = Software()
"""Unknown: as of today."""


def find_software(environ: Mapping[str, str]) -> Software:
    """Of the interpreter that runs the workers. Never raises: what cannot be read is unknown."""
    python = job_python(environ)
    found = _installed_here() if python == sys.executable else _installed_at(python)
    return Software(found.get("torch"), next((found[name] for name in _NCCL if name in found), None))


def _installed_here() -> dict[str, str]:
    found = {}
    for name in _NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def _installed_at(python: str) -> dict[str, str]:
    try:
        answer = subprocess.run(
            [python, "-c", _PROGRAM, *_NAMES],
            stdin=subprocess.DEVNULL,  # the agent's is for its workers
            capture_output=True,
            timeout=ASKING_S,
            check=True,
        )
        found = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _release(version: str) -> tuple[int, ...]:
    """The numbers that begin it: 2.13.0+cu130 is (2, 13, 0), which is above (2, 13)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
