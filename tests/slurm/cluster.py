"""A Slurm of our own on this machine: slurmctld and two slurmd with names of their own, without munge and systemd.

Each slurmd has its own /etc/hosts (a mount namespace), in which the nodes' names lead to this machine, as DNS does in a
cluster. A requeued job waits until its credentials have expired: two minutes elsewhere, some seconds here. Proctrack is
`linuxproc` unless a test asks for another, the worst case for workers: each signal to a step reaches every process that
descends from its tasks, where `cgroup`, Slurm's default, signals the tasks alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.processes import listening_ports
from tests.waiting import wait_for

TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "unshare")
NODES = ("n1", "n2")
PATIENCE_S = 90.0
KILL_WAIT_S = 10
FREEZER = Path("/sys/fs/cgroup/freezer")
"""In which proctrack/cgroup keeps the processes of a step, where the kernel's cgroups are of version 1."""

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait={kill_wait_s}
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,requeue_delay=0
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@dataclass
class SlurmCluster:
    folder: Path
    proctrack: str = "linuxproc"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stderr}\n{self.story()}"
        return done.stdout

    def submit(self, script: Path, *options: str, arguments: Sequence[str] = ()) -> int:
        """The job's number. Its output is in `job-NUMBER.out`."""
        output = f"--output={self.folder}/job-%j.out"
        text = self.run(
            "sbatch", "--parsable", "--open-mode=append", output, *options, str(script), *arguments
        )
        return int(text.strip())

    def output(self, job: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"job-{job}.out").read_text()
        return ""

    def shows(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: int) -> str:
        return self.shows(job)["JobState"]

    def wait_for(
        self, condition: Callable[[], object], what: str, job: int = 0, within_s: float = PATIENCE_S
    ) -> None:
        wait_for(condition, what, within_s, seen=lambda: f"{self.output(job)}\n{self.story()}", every_s=0.1)

    def story(self) -> str:
        """The last lines of all daemons, and the queue."""
        logs = [(file.name, file.read_text()[-1500:]) for file in sorted(self.folder.glob("*.log"))]
        queue = subprocess.run(
            ["squeue"], env=self.environment, capture_output=True, text=True, timeout=30, check=False
        ).stdout
        return "\n".join([f"--- {name}\n{text}" for name, text in logs] + [queue])

    def start(self) -> None:
        # Above the ports that --slurm gives to stores.
        free = random.sample(sorted(set(range(30000, 32000)) - listening_ports()), 3)
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()} {' '.join(NODES)}\n")
        (self.folder / "state").mkdir()
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2"
            for node, port in zip(NODES, free, strict=False)
        )
        text = CONF.format(
            host=socket.gethostname(),
            port=free[-1],
            first_job=random.randrange(1000, 9000),
            folder=self.folder,
            nodes=nodes,
            kill_wait_s=KILL_WAIT_S,
            proctrack=self.proctrack,
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._daemon("slurmctld", "-D")
        own_hosts = f'mount --bind "{hosts}" /etc/hosts && exec "$@"'
        for node in NODES:
            self._daemon("unshare", "--mount", "sh", "-c", own_hosts, "sh", "slurmd", "-D", "-N", node)
        self.wait_for(
            lambda: self.run("sinfo", "-h", "-o", "%D %t", "-p", "low", check=False).strip() == "2 idle",
            "two idle nodes",
        )

    def _daemon(self, *words: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self.processes.append(
                subprocess.Popen(
                    words, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            )

    def close(self) -> None:
        """Ends what still runs: jobs first, then the daemons that this started."""
        subprocess.run(
            ["scancel", "--signal=KILL", "--full", "--state=RUNNING"],
            env=self.environment,
            timeout=30,
            check=False,
        )
        subprocess.run(["scancel", "--user=root"], env=self.environment, timeout=30, check=False)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self.run("squeue", "-h", check=False).strip():
            time.sleep(0.2)
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for node in NODES if self.proctrack == "cgroup" else ():
            for folder, _, _ in os.walk(FREEZER / f"slurm_{node}", topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


@contextlib.contextmanager
def slurm_cluster(folder: Path, proctrack: str = "linuxproc") -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, proctrack)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
