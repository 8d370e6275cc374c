"""TorchX's component: the arguments of dist.ddp, and a job on its local scheduler that survives a kill."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torchx.components import dist
from torchx.specs import AppDef, RetryPolicy

import elastic_agent
from tests.system.harness import Agent, Job
from tests.system.processes import MARKER, port_for_a_store

from .framework_job import RECORDED, TRAINED_S, FrameworkJob

BIN = Path(sys.executable).parent
COMPONENT = Path(elastic_agent.__file__).parent / "deploy" / "torchx" / "elastic.py"
ddp = runpy.run_path(str(COMPONENT))["ddp"]
ID = "'--rdzv-id=${app_id}'"
FIRST_NODE = '"$${${rank0_env}:=localhost}:29500"'


def command(app: AppDef) -> str:
    (role,) = app.roles
    bash, text = role.args
    assert (role.entrypoint, bash) == ("bash", "-c")
    return text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"script": "train.py"},
            f"--min-nodes=1 --max-nodes=1 --nproc-per-node=2 {ID} train.py",
        ),
        (
            {"m": "pkg.train", "j": "1:3x2", "tee": 3},
            f"--rdzv-endpoint={FIRST_NODE} --min-nodes=1 --max-nodes=3 --nproc-per-node=2 {ID} --tee=3 -m pkg.train",
        ),
        (
            {"script": "train.py", "j": "2x8", "rdzv_endpoint": "etcd://a:1,b:2/x"},
            f"--rdzv-endpoint=etcd://a:1,b:2/x --min-nodes=2 --max-nodes=2 --nproc-per-node=8 {ID} train.py",
        ),
        (
            {"script": "train.py", "j": "1x1", "rdzv_backend": "etcd", "rdzv_endpoint": "a:2379"},
            "--rdzv-endpoint=a:2379 --min-nodes=1 --max-nodes=1 --nproc-per-node=1 "
            f"{ID} --rdzv-backend=etcd train.py",
        ),
    ],
)
def test_the_command_on_each_node(arguments: Mapping[str, Any], words: str) -> None:
    assert command(ddp(**arguments)) == f"exec elastic-agent {words}"


def test_words_of_the_script_reach_it_as_they_are() -> None:
    app = ddp("--name", "it's $HOME", script="my train.py")
    assert command(app).endswith("""'my train.py' --name 'it'"'"'s $HOME'""")


def test_all_else_is_as_dist_ddp_has_it() -> None:
    arguments: dict[str, Any] = {
        "script": "train.py",
        "image": "mine:1",
        "name": "experiment/run",
        "cpu": 8,
        "gpu": 4,
        "memMB": 4096,
        "j": "1:3x4",
        "max_retries": 5,
        "rdzv_port": 4321,
        "mounts": ["type=bind", "src=/host", "dst=/job"],
        "debug": True,
    }
    ours, torchs = (made(**arguments, env={"A": "1"}) for made in (ddp, dist.ddp))
    for app in (ours, torchs):
        app.roles[0].args = []
    assert ours.roles[0].retry_policy == RetryPolicy.REPLICA
    torchs.roles[0].retry_policy = RetryPolicy.REPLICA
    assert ours == torchs


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"script": "a", "m": "b"}, "exactly one of --script and -m"),
        ({"script": "a", "j": "2-3"}, "Invalid format for -j"),
        ({"script": "a", "rdzv_backend": "etcd"}, "--rdzv_backend etcd needs --rdzv_endpoint HOST:PORT"),
    ],
)
def test_what_makes_no_job_is_refused(arguments: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ddp(**arguments)


@pytest.mark.parametrize("nodes", ["1x2", "2x1"])
def test_a_job_of_the_local_scheduler_survives_a_kill(job: Job, nodes: str) -> None:
    run = FrameworkJob(job, "accelerate_loop.py")
    words = [f"{BIN}/torchx", "run", "-s", "local_cwd", f"{COMPONENT}:ddp", "-j", nodes]
    words += ["--rdzv_port", str(port_for_a_store()), "--script", str(RECORDED)]
    environment = {
        **os.environ,
        **run.environment,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        MARKER: job.id,
        "SYSTEM_TEST_HISTORY": str(job.folder / "history.jsonl"),
    }
    torchx = Agent("torchx", [*words, str(run.script[1])], environment, job.folder / "torchx.log")
    job.agents.append(torchx)
    first = run.trained(2)
    os.kill(first.pid(1), signal.SIGKILL)
    second = run.trained(2, after=first.number)
    run.slow.unlink()
    assert torchx.exit_code(TRAINED_S) == 0
    assert torchx.says("Job finished: SUCCEEDED")
    assert run.redone(first, second) <= 1
