"""How a job goes, for `wait`: on a terminal one line that is drawn anew, elsewhere a line for each new state."""

from __future__ import annotations

import shutil
from typing import TextIO

from ....pool.records import Job, run_prefix
from ....rendezvous.errors import RecordInvalid, StoreError
from ....rendezvous.records import NODES_PREFIX, NodeRecord
from ....rendezvous.store.interface import Store
from ....rendezvous.text import counted
from ...observability.status.pages import STATUS_PAGE, STATUS_PATH, NodeStatus
from ...observability.status.sources import ask_all
from .jobs import JobState

ANSWER_S = 1.0


class Progress:
    def __init__(self, store: Store, job: Job, output: TextIO) -> None:
        self._store, self._job, self._output = store, job, output
        self._terminal = output.isatty()
        self._shown = ""

    def show(self, state: JobState) -> None:
        if not self._terminal:
            self._write(f"job {state.job}: {state.state}: {state.detail}", "\n")
            return
        nodes = f" on {counted(len(state.nodes), 'node')}" if state.nodes else ""
        step = self._step() if state.state == "running" else None
        reached = f", step {step}" if step else ""
        text = f"job {state.job} ({state.name}): {state.state}{nodes}{reached}: {state.detail}"
        self._write(text[: shutil.get_terminal_size().columns - 1], "")

    def end(self) -> None:
        if self._terminal:
            print(file=self._output, flush=True)

    def _write(self, line: str, end: str) -> None:
        if line != self._shown:
            self._shown = line
            start = "\r\x1b[K" if self._terminal else ""
            print(f"{start}{line}", end=end, file=self._output, flush=True)

    def _step(self) -> int | None:
        """The newest one that its agents know; None when they do not say."""
        prefix = run_prefix(self._job.job) + NODES_PREFIX
        try:
            records = [
                NodeRecord.from_json(entry.key.removeprefix(run_prefix(self._job.job)), entry.value)
                for entry in self._store.read((prefix,)).entries
            ]
        except (StoreError, RecordInvalid):
            return None
        agents = {one.node: one.http for one in records[:1] if one.http is not None}
        answers = ask_all(agents, STATUS_PATH, STATUS_PAGE, ANSWER_S).values()
        return max((one.step for one in answers if isinstance(one, NodeStatus)), default=None)
