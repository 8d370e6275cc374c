"""Real daemons on this machine, and jobs of scripts that do what a test says, when it says so.

Each worker of a job writes a line to the pool's file of events as it starts and as it ends, and runs until the test
ends the job with an exit code (`end_job`). Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_agent.pool.records import SCOPES, PoolView
from elastic_agent.rendezvous.local.store import LocalStore, store_file

from .harness import HELD_STORES, Agent, Job, python_path
from .processes import MARKER, Process

SHORT_LEASE = "--lease-ttl=2s"
"""For tests that wait until a node is lost; the usual one does not end while this machine is busy with other things."""
WORKER = """
import json, os, sys, time
folder = sys.argv[1]
job = os.environ["TORCHELASTIC_RUN_ID"]

def tell(what, **more):
    facts = {"what": what, "job": job, "node": os.environ["ELASTIC_AGENT_NODE"], "rank": int(os.environ["RANK"])}
    facts |= {"world": int(os.environ["WORLD_SIZE"]), "pid": os.getpid(), "agent": os.getppid(), "cwd": os.getcwd()}
    line = json.dumps({**facts, **more, "at": time.monotonic()}).encode() + b"\\n"
    events = os.open(os.path.join(folder, "events"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(events, line)
    os.close(events)

tell("start", env=dict(os.environ))
while True:
    try:
        code = int(open(os.path.join(folder, f"end-{job}")).read())
    except (FileNotFoundError, ValueError):
        time.sleep(0.02)
    else:
        tell("end", code=code)
        sys.exit(code)
"""


class Pool:
    """Daemons that find each other in one folder."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self.script = self.folder / "worker.py"
        self.script.write_text(WORKER)
        (self.folder / "run").mkdir(mode=0o700)
        self.place: tuple[str, ...] = ()
        """Options that say where its store is."""
        self.environment = {
            "RUNTIME_DIRECTORY": str(self.folder / "run"),
            "PYTHONPATH": python_path(),
            **HELD_STORES,
        }

    def daemon(
        self,
        name: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        enter: Sequence[str] = (),
    ) -> Agent:
        own = (f"--log-dir={self.folder / 'logs'}", "--max-nodes=4", *self.place)
        surroundings = {**self.environment, **(environment or {})}
        return self.job.start(name, *own, *options, script=(), environment=surroundings, enter=enter)

    def daemons(self, *names: str, options: Sequence[str] = ()) -> list[Agent]:
        started = [self.daemon(name, *options) for name in names]
        for agent in started:
            self.offered(agent)
        return started

    def offered(self, agent: Agent) -> None:
        """Wait until its node is in the pool: idle, but for one that has a job at once."""
        self.job.wait_for_text(agent, "idle: waiting for a job|running job ")

    def command(
        self, *words: str, enter: Sequence[str] = (), **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """What `elastic-agent` with these words says."""
        return subprocess.run(
            [*enter, sys.executable, "-m", "elastic_agent", words[0], *words[1:]],
            env={**os.environ, **self.environment, MARKER: self.job.id},
            capture_output=True,
            text=True,
            timeout=100,
            cwd=self.folder,
            **more,
        )

    def submit(
        self, *options: str, script: Sequence[str | Path] | None = None, enter: Sequence[str] = ()
    ) -> str:
        """The job's id."""
        runs = map(str, script or (self.script, self.folder))
        words = (*self.place, "--max-restarts=0", *options, "--", *runs)
        done = self.command("submit", *words, enter=enter)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    def end_job(self, job: str, code: int = 0) -> None:
        """All workers of the job end, now or as soon as they run."""
        (self.folder / f"end-{job}").write_text(str(code))

    def wait(self, job: str) -> int:
        """The exit code of `elastic-agent wait`."""
        return self.command("wait", job, *self.place).returncode

    def events(self, **wanted: Any) -> list[dict[str, Any]]:
        file = self.folder / "events"
        *lines, _unfinished = file.read_text().split("\n") if file.exists() else [""]
        return [event for event in map(json.loads, lines) if wanted.items() <= event.items()]

    def starts(self, job: str, count: int) -> list[dict[str, Any]]:
        """The starts of this job's workers, once there are so many."""
        self.job.wait_for(lambda: len(self.starts_of(job)) >= count, f"{count} workers of job {job}")
        return self.starts_of(job)

    def starts_of(self, job: str) -> list[dict[str, Any]]:
        return self.events(what="start", job=job)

    def view(self) -> PoolView:
        store = LocalStore.connect(store_file(self.folder / "run", "pool"), 30.0)
        try:
            view = PoolView()
            view.read(store.read(SCOPES))
            return view
        finally:
            store.close()

    def workers(self) -> list[Process]:
        return self.job.workers()

    def job_agent(self, job: str) -> int:
        """The process that is the agent of this job."""

        def found() -> int | None:
            for process in self.job.processes():
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
                if process.generation is None and f"--rdzv-id={job}".encode() in words:
                    return process.pid
            return None

        pid = self.job.wait_for(found, f"an agent of job {job}")
        assert pid is not None
        return pid

    def logs(self) -> list[Path]:
        """Of the agents of all jobs."""
        return sorted(self.folder.glob("logs/*/*.log"))

    def close(self) -> None:
        for agent in self.job.agents:
            if agent.process.poll() is None:
                agent.signal(signal.SIGTERM)
        self.job.more_logs += [log.read_text(errors="replace") for log in self.logs()]
        shutil.rmtree(self.folder, ignore_errors=True)
