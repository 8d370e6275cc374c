"""A user at a shell, whose command lines are those of an installed wheel, with every default. Not a test."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tests.installed import Installed

from .harness import PATIENCE_S, Agent, Job
from .processes import MARKER


class User:
    def __init__(self, job: Job, installed: Installed) -> None:
        self.job = job
        self.folder = job.folder / "user"
        """The current one."""
        self.folder.mkdir()
        self._temporary = Path(tempfile.mkdtemp(prefix="user-"))
        """Short: a UNIX socket's path is. It shows this user no jobs of other tests."""
        path = os.pathsep.join((str(installed.bin), os.environ["PATH"]))
        mine = {"PATH": path, "TMPDIR": str(self._temporary), MARKER: job.id}
        ours = ("PYTHONPATH", "TORCH_CPP_LOG_LEVEL")
        self.environment = {name: text for name, text in os.environ.items() if name not in ours} | mine

    def starts(self, line: str) -> Agent:
        """What this starts, which goes on while the user does something else."""
        log = self.job.folder / f"line-{len(self.job.agents)}.log"
        agent = Agent(line, ("sh", "-c", f"exec {line}"), self.environment, log, folder=self.folder)
        self.job.agents.append(agent)
        return agent

    def runs(self, line: str) -> str:
        """What this says until it has ended with success."""
        agent = self.starts(line)
        code = agent.process.wait(PATIENCE_S)
        assert code == 0, agent.text
        return agent.text

    def close(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
