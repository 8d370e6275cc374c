"""What users type, as README and the documents have it, of an installed wheel: nothing is set that they do not set."""

from __future__ import annotations

import os
import signal

import pytest

from .processes import port_for_a_store
from .users import User

SHOWN = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], __name__, flush=True)
"""

DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
done = torch.zeros(1)
while not done:
    model(torch.rand(2, 4)).sum().backward()
    done += os.path.exists("enough")
    dist.all_reduce(done)
    print("trains, rank", dist.get_rank(), "of", dist.get_world_size(), sys.argv[1:], flush=True)
    time.sleep(0.05)
del model
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("line", "world"),
    [
        ("python -m elastic_agent --standalone --nproc_per_node=2 -m package.train --lr 0.1", 2),
        (
            "env PET_NPROC_PER_NODE=2 elastic-agent --rdzv-backend=c10d --rdzv-endpoint=localhost:0 "
            "--run-path train.py --lr 0.1",
            2,
        ),
        ("elastic-agent --no-python ./train.sh --lr 0.1", 1),
    ],
    ids=["module", "path", "program"],
)
def test_each_way_but_a_script_to_say_what_to_run(user: User, line: str, world: int) -> None:
    (user.folder / "train.py").write_text(SHOWN)
    (user.folder / "package").mkdir()
    (user.folder / "package" / "__init__.py").write_text("")
    (user.folder / "package" / "shown.py").write_text("NAME = __name__")
    (user.folder / "package" / "train.py").write_text(f"from . import shown{SHOWN}")
    program = user.folder / "train.sh"
    program.write_text("#!/bin/sh\nexec python train.py $*\n")
    program.chmod(0o755)
    said = user.runs(line)
    own = "'--local-rank=0', " if "launch" in line else ""
    for rank in range(world):
        assert f"] rank {rank} of {world} [{own}'--lr', '0.1'] __main__\n" in said
    assert ("from spares" in said) == ("--no-python" not in line)


def test_a_plain_script_is_killed_and_other_commands_tell_of_it(user: User) -> None:
    (user.folder / "train.py").write_text(DDP)
    agent = user.starts("elastic-agent --nproc-per-node 2 train.py --lr 0.1")
    user.job.wait_for_text(agent, r"trains, rank 1 of 2 \['--lr', '0.1'\]")
    (victim,) = (worker for worker in user.job.workers() if worker.environment["RANK"] == "1")
    os.kill(victim.pid, signal.SIGKILL)
    user.job.wait_for_text(agent, r"(?s)generation 2: .*trains, rank 1 of 2")
    job = victim.environment["TORCHELASTIC_RUN_ID"]
    assert f"job {job}: running (no steps reported), generation 2" in user.runs("elastic-agent status")
    assert "killed by SIGKILL" in user.runs(f"elastic-agent events {job}")
    (user.folder / "enough").touch()
    assert agent.exit_code() == 0
    assert "killed" in user.runs(f"elastic-agent report {job}")


def test_two_nodes_meet_by_the_same_line(user: User) -> None:
    (user.folder / "train.py").write_text(DDP)
    line = (
        f"elastic-agent --min-nodes 1 --max-nodes 2 --rdzv-endpoint 127.0.0.1:{port_for_a_store()} -m train"
    )
    first = user.starts(line)
    user.job.wait_for_text(first, "trains, rank 0 of 1")
    second = user.starts(line)
    user.job.wait_for_text(second, "trains, rank 1 of 2")
    (user.folder / "enough").touch()
    assert [first.exit_code(), second.exit_code()] == [0, 0]


def test_a_daemon_runs_what_is_submitted(user: User) -> None:
    (user.folder / "train.py").write_text(SHOWN)
    daemon = user.starts("elastic-agent --min-nodes 1 --max-nodes 4")
    user.job.wait_for_text(daemon, "idle: waiting for a job")
    *_, job = user.runs("elastic-agent submit --nproc-per-node 2 -- train.py --lr 0.1").splitlines()
    user.runs(f"elastic-agent wait {job}")
    assert "rank 1 of 2 ['--lr', '0.1'] __main__\n" in user.runs(f"elastic-agent logs {job}")
    assert "succeeded" in user.runs("elastic-agent jobs")
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_code() == 143


def test_a_function_of_a_module_beside_the_script_is_launched(user: User) -> None:
    (user.folder / "functions.py").write_text("def seven(): return 7\n")
    (user.folder / "main.py").write_text(
        "from functions import seven\n"
        "from elastic_agent.launcher import LaunchConfig, elastic_launch\n"
        "print(elastic_launch(LaunchConfig(nproc_per_node=2), seven)())\n"
    )
    assert "{0: 7, 1: 7}" in user.runs("python main.py")
