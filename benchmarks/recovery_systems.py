"""The systems of the recovery benchmark: how each is told to run the job, and what it needs beside it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recovery_job import Launch, Setting

HERE = Path(__file__).parent
PLAIN, LIBRARY, TORCHFT_JOB = HERE / "ddp_job.py", HERE / "library_job.py", HERE / "torchft_job.py"
TORCHFT_FOLDER = HERE.parent / "build" / "torchft"
CHECKPOINT_EVERY = 25


@dataclass(frozen=True, slots=True)
class System:
    name: str
    limit_s: float
    """How long it may take from the fault to a world that lasts."""
    commands: Callable[[Launch], list[list[str]]]
    """One command for each agent of the node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    store: Callable[[int], list[str]] | None = None
    """The command of the store on this port, where no agent hosts it."""
    store_first: bool = False
    """Whether node 0 must be up before the others start, as the first agent that can bind the endpoint hosts."""
    etcd: bool = False
    """Whether it meets in etcd where the scenario says so."""
    missing: Callable[[Setting], str] = lambda _setting: ""
    """Why it cannot run here; empty if it can."""


def _job(script: Path, launch: Launch) -> list[str]:
    return [str(script), str(launch.directory), f"--checkpoint-every={CHECKPOINT_EVERY}"]


def _torchrun(*tuning: str) -> Callable[[Launch], list[list[str]]]:
    def commands(launch: Launch) -> list[list[str]]:
        setting = launch.setting
        words = [sys.executable, "-m", "torch.distributed.run", f"--local-addr={launch.address}"]
        # By default torchrun restarts nothing, and there would be nothing to measure.
        words += ["--max-restarts=100", f"--nproc-per-node={setting.workers}"]
        conf = list(tuning)
        if setting.max_nodes > 1:
            words += [f"--nnodes={setting.min_nodes}:{setting.max_nodes}", "--rdzv-backend=c10d"]
            words += [f"--rdzv-endpoint={launch.endpoint}", "--rdzv-id=recovery"]
            # On one machine every agent would take itself for the host.
            conf.append(f"is_host={int(launch.node == 0)}")
        words += [f"--rdzv-conf={','.join(conf)}"] if conf else []
        return [words + _job(PLAIN, launch)]

    return commands


def _elastic_agent(script: Path) -> Callable[[Launch], list[list[str]]]:
    def commands(launch: Launch) -> list[list[str]]:
        setting = launch.setting
        words = [str(Path(sys.executable).with_name("elastic-agent")), f"--nproc-per-node={setting.workers}"]
        if setting.max_nodes > 1:
            words += [f"--min-nodes={setting.min_nodes}", f"--max-nodes={setting.max_nodes}"]
            words += [
                f"--rdzv-endpoint={launch.endpoint}",
                "--rdzv-id=recovery",
                f"--node-id=node{launch.node}",
            ]
        return [words + _job(script, launch)]

    return commands


def _torchft(launch: Launch) -> list[list[str]]:
    """Each worker is a replica, and may be lost alone: so each has a torchrun of its own, which starts it again."""
    commands = []
    for worker in range(launch.setting.workers):
        variables = [
            f"REPLICA_GROUP_ID=replica{launch.node}-{worker}",
            f"TORCHFT_LIGHTHOUSE=http://{launch.endpoint}",
        ]
        words = ["env", *variables, sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += [f"--local-addr={launch.address}", "--max-restarts=100", "--nproc-per-node=1"]
        commands.append([*words, str(TORCHFT_JOB), str(launch.directory)])
    return commands


def _lighthouse(port: int) -> list[str]:
    """With its own default of a minute for stragglers, and 5 s until a silent replica counts as dead, all of a world
    stand still for so long."""
    program = str(TORCHFT_FOLDER / "bin" / "torchft_lighthouse")
    timing = ["--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
    return [sys.executable, program, "--bind", f"[::]:{port}", "--min_replicas", "1", *timing]


def _no_torchft(setting: Setting) -> str:
    if setting.own_networks:
        return "its replicas' own stores and its lighthouse are on this machine's loopback here"
    return "" if torchft_version() else f"{TORCHFT_FOLDER} has no torchft (make torchft)"


def torchft_version() -> str:
    """Empty where it is not installed."""
    found = importlib.metadata.distributions(name="torchft", path=[str(TORCHFT_FOLDER)])
    return next((one.version for one in found), "")


def _with_torchft(paths: str | None) -> str:
    return os.pathsep.join([str(TORCHFT_FOLDER), *([paths] if paths else [])])


TORCHRUN, TUNED, TORCHFT, OURS, OURS_LIBRARY = (
    "torchrun",
    "torchrun-tuned",
    "torchft",
    "elastic-agent",
    "elastic-agent-library",
)
SYSTEMS: Sequence[System] = (
    System(TORCHRUN, 90.0, _torchrun()),
    System(
        TUNED,
        60.0,
        _torchrun("last_call_timeout=1", "keep_alive_interval=1", "keep_alive_max_attempt=3"),
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    System(
        TORCHFT,
        60.0,
        _torchft,
        {"PYTHONPATH": _with_torchft(os.environ.get("PYTHONPATH"))},
        store=_lighthouse,
        missing=_no_torchft,
    ),
    System(OURS, 60.0, _elastic_agent(PLAIN), store_first=True, etcd=True),
    System(OURS_LIBRARY, 60.0, _elastic_agent(LIBRARY), store_first=True, etcd=True),
)
