"""Jobs of a real Slurm: started by srun, warned, cancelled, preempted, over their time. No step is done twice.

`make slurm` runs them: they take minutes. The batch script is `deploy/slurm/requeue.sbatch`, without the lines for
GPUs and times that this machine cannot give.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.worker.ranks.cluster_environment import port_of
from tests.needs import skip_without
from tests.system.processes import listening_ports, port_for_a_store

from .cluster import FREEZER, NODES, TOOLS, SlurmCluster, slurm_cluster

DEPLOY = Path(__file__).parents[2] / "deploy" / "slurm"
TRAINING = Path(__file__).with_name("training.py")
PREEMPTIONS = int(os.environ.get("SLURM_PREEMPTIONS", "20"))
STEP_S = "0.05"
FOR_EVER = "1000000"
NOT_HERE = ("--gpus-per-node", "--time", "--signal")

pytestmark = [
    pytest.mark.skipif("SLURM_TESTS" not in os.environ, reason="make slurm starts a Slurm for these"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", autouse=True)
def commands() -> Iterator[None]:
    """Those of this environment are found by jobs, too."""
    skip_without(TOOLS, "slurm", "only root can give each slurmd an /etc/hosts of its own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm_with_cgroups(tmp_path: Path) -> Iterator[SlurmCluster]:
    if not os.access(FREEZER, os.W_OK):
        pytest.skip(f"proctrack/cgroup of this Slurm wants {FREEZER}")
    with slurm_cluster(tmp_path, "cgroup") as cluster:
        yield cluster


class Training:
    """One job, and what its workers have written."""

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        *options: str,
        file: str = "requeue.sbatch",
        steps: str = FOR_EVER,
    ) -> None:
        self.slurm = slurm
        self.folder = folder
        lines = (
            (DEPLOY / file).read_text().replace("--min-nodes 2", "--min-nodes 1").splitlines(keepends=True)
        )
        left_out = tuple(f"#SBATCH {option}" for option in NOT_HERE)
        script = folder / file
        script.write_text("".join(line for line in lines if not line.startswith(left_out)))
        arguments = (str(TRAINING), str(folder), steps, STEP_S)
        self.number = slurm.submit(script, *options, arguments=arguments)

    def history(self, **wanted: object) -> list[dict[str, Any]]:
        file = self.folder / "history"
        lines = file.read_text().splitlines() if file.exists() else []
        records = [json.loads(line) for line in lines]
        return [r for r in records if all(r[name] == value for name, value in wanted.items())]

    def steps_of(self, run: int) -> list[int]:
        return [record["step"] for record in self.history(what="step", rank=0, run=run)]

    def wait_for_steps(self, run: int, count: int = 10) -> None:
        self.slurm.wait_for(lambda: len(self.steps_of(run)) >= count, f"steps of run {run}", self.number)

    def wait_for_end(self, state: str) -> None:
        self.slurm.wait_for(lambda: self.slurm.state(self.number) == state, state, self.number)

    def wait_for_requeue(self, times: int) -> None:
        def requeued() -> bool:
            shown = self.slurm.shows(self.number)
            return shown["Restarts"] == str(times) and shown["JobState"] in ("PENDING", "RUNNING")

        self.slurm.wait_for(requeued, f"requeue number {times}", self.number)

    def cancel(self) -> None:
        self.slurm.run("scancel", str(self.number))
        self.wait_for_end("CANCELLED")
        self.slurm.wait_for(lambda: not self.slurm.run("squeue", "-h").strip(), "idle nodes", self.number)

    def is_on_disk(self, step: int) -> bool:
        return (self.folder / "checkpoints" / f"step-{step:012d}.json").exists()

    def assert_no_step_lost(self, runs: int) -> None:
        """Each rank did each step once, over all runs."""
        for rank in range(len(NODES)):
            steps = [record["step"] for record in self.history(what="step", rank=rank)]
            assert steps == list(range(1, len(steps) + 1)), self.slurm.output(self.number)
        assert {record["run"] for record in self.history(what="load")} == set(range(runs))


def preempt(slurm: SlurmCluster, folder: Path) -> None:
    """By a job that needs all of both nodes, and is soon done."""
    script = folder / "urgent.sbatch"
    script.write_text("#!/bin/bash\ntrue\n")
    job = slurm.submit(script, "--partition=high", f"--nodes={len(NODES)}", "--exclusive")
    slurm.wait_for(lambda: slurm.state(job) == "COMPLETED", "the urgent job's end", job)


def test_srun_makes_one_job_of_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    words = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "elastic-agent", "--slurm"]
    slurm.run(*words, str(TRAINING), str(tmp_path), "20", "0.01")
    records = [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()]
    ends = [record for record in records if record["what"] == "end"]
    assert sorted((end["rank"], end["world"], end["step"]) for end in ends) == [(0, 2, 20), (1, 2, 20)]
    loads = {record["rank"]: record["node"] for record in records if record["what"] == "load"}
    assert loads == dict(enumerate(NODES)), "ranks follow SLURM_NODEID"


TUTORIAL = """\
#!/bin/bash
export MASTER_ADDR=$(scontrol show hostname ${SLURM_NODELIST} | head -n 1)
elastic-agent --nnodes=2 --nproc_per_node=1 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:PORT "$@"
"""
"""As in torch's tutorial of DistributedDataParallel, with another command and port."""


def test_the_script_of_torchs_tutorial_is_one_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "torchrun_script.sh"
    script.write_text(TUTORIAL.replace("PORT", str(port_for_a_store())))
    script.chmod(0o755)
    slurm.run("srun", "--nodes=2", "--ntasks=2", str(script), str(TRAINING), str(tmp_path), "5", "0.01")
    records = [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()]
    ends = [record for record in records if record["what"] == "end"]
    assert sorted((end["rank"], end["world"], end["step"]) for end in ends) == [(0, 2, 5), (1, 2, 5)]


WITHOUT_AGENT = """\
import torch, torch.distributed as dist
from elastic_agent.worker import init_process_group
init_process_group("gloo")
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item(), flush=True)
dist.destroy_process_group()  # else torch ends one run in 20 with SIGABRT
"""


def test_workers_that_srun_starts_itself_are_one_group(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_AGENT)
    done = slurm.run("srun", "--nodes=2", "--ntasks=2", sys.executable, str(script))
    assert sorted(done.splitlines()) == ["rank 0 of 2 sum 11.0", "rank 1 of 2 sum 11.0"]


def test_the_environment_of_a_task_says_all_that_slurm_needs(slurm: SlurmCluster) -> None:
    done = slurm.run(
        "srun", "--nodes=2", "--ntasks=2", "elastic-agent", "--slurm", "--check-config", str(TRAINING)
    )
    assert len(re.findall(r'rdzv-endpoint = "n1:2[0-9]{4}"', done)) == 2
    assert sorted(re.findall('node-rank = "([01])"', done)) == ["0", "1"]
    assert len(re.findall(r'rdzv-id = "slurm-[0-9]+\.0"', done)) == 2
    wrong = subprocess.run(
        ["srun", "--nodes=2", "--ntasks=4", "elastic-agent", "--slurm", str(TRAINING)],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert wrong.returncode == 78
    assert "SLURM_STEP_NUM_TASKS '4': expected one task on each of the step's 2 nodes" in wrong.stderr


def test_scancel_leaves_the_newest_state_on_disk_and_is_not_requeued(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Its SIGTERM reaches the workers, too, here: they leave it to their agent."""
    training = Training(slurm, tmp_path)
    training.wait_for_steps(run=0)
    training.cancel()
    assert training.is_on_disk(training.steps_of(0)[-1])
    assert "ended with exit code 143: stopped by SIGTERM" in slurm.output(training.number)
    assert "killed by SIGTERM" not in slurm.output(training.number)
    assert slurm.shows(training.number)["Restarts"] == "0"
    training.assert_no_step_lost(runs=1)


def test_a_warning_before_the_end_is_a_leave_and_a_requeue(slurm: SlurmCluster, tmp_path: Path) -> None:
    training = Training(slurm, tmp_path, "--time=2", "--signal=USR1@30")  # it comes up to 30 s earlier
    training.wait_for_steps(run=0)
    slurm.wait_for(lambda: "SIGUSR1" in slurm.output(training.number), "the warning", training.number, 240)
    training.wait_for_requeue(times=1)
    assert "SIGUSR1: leaving the job before something ends it" in slurm.output(training.number)
    assert "exit code 80: requeue number 1" in slurm.output(training.number)
    training.wait_for_steps(run=1)
    training.cancel()
    training.assert_no_step_lost(runs=2)


def test_the_time_limit_is_a_leave_and_a_requeue_without_any_warning(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    training = Training(slurm, tmp_path, "--time=1")
    training.wait_for_steps(run=0)
    slurm.wait_for(lambda: "SIGTERM" in slurm.output(training.number), "the time limit", training.number, 180)
    training.wait_for_requeue(times=1)
    assert "exit code 143: requeue number 1" in slurm.output(training.number)
    training.wait_for_steps(run=1)
    training.cancel()
    training.assert_no_step_lost(runs=2)


def test_preemptions_lose_no_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    training = Training(slurm, tmp_path)
    for run in range(PREEMPTIONS):
        training.wait_for_steps(run)
        preempt(slurm, tmp_path)
        training.wait_for_requeue(times=run + 1)
    training.wait_for_steps(PREEMPTIONS)
    training.cancel()
    training.assert_no_step_lost(runs=PREEMPTIONS + 1)
    output = slurm.output(training.number)
    assert output.count("exit code 143: requeue number") == PREEMPTIONS
    assert "killed by SIGTERM" not in output


def agent_on(node: str, job: int) -> int:
    """The pid of the task itself."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            started_by = Path("/proc", parent, "comm").read_text()
        except OSError:
            continue
        wanted = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={job}".encode()}
        if started_by.startswith("slurmstepd") and b"--slurm" in command and wanted <= set(environment):
            return int(entry.name)
    raise AssertionError(f"no agent of job {job} on {node}")


def test_a_job_that_may_goes_on_without_a_lost_agent(slurm: SlurmCluster, tmp_path: Path) -> None:
    training = Training(slurm, tmp_path, "--nodes=2", file="elastic.sbatch")
    training.wait_for_steps(run=0)
    assert {record["world"] for record in training.history(what="load")} == {2}
    # Both nodes' addresses are this machine's, so the agent that came first hosts the store.
    agents = [agent_on(node, training.number) for node in NODES]
    (lost,) = [pid for pid in agents if port_of(training.number) not in listening_ports(pid)]
    os.kill(lost, signal.SIGKILL)
    slurm.wait_for(lambda: training.history(what="step", world=1), "steps on one node", training.number)
    assert slurm.state(training.number) == "RUNNING"
    training.cancel()
    assert training.is_on_disk(training.history(what="step", world=1)[-1]["step"])


def test_where_slurm_signals_tasks_alone_a_preemption_loses_no_step(
    slurm_with_cgroups: SlurmCluster, tmp_path: Path
) -> None:
    slurm = slurm_with_cgroups
    training = Training(slurm, tmp_path)
    training.wait_for_steps(run=0)
    agent = agent_on(NODES[0], training.number)
    assert f"/job_{training.number}/" in Path(f"/proc/{agent}/cgroup").read_text()
    preempt(slurm, tmp_path)
    training.wait_for_requeue(times=1)
    training.wait_for_steps(run=1)
    training.cancel()
    assert training.is_on_disk(training.steps_of(1)[-1])
    assert "killed by SIGTERM" not in slurm.output(training.number)
    training.assert_no_step_lost(runs=2)
