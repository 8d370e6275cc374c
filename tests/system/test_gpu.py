"""On real GPUs: what workers see of them, and DDP over NCCL through a kill. `make gpu` runs this and prints figures."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.agent.machine.devices import Device, probe
from tests.shards import state_on_disk

from .harness import Job

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.skipif(not DEVICES, reason="needs a GPU: torch.cuda.is_available() says that there is none"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

PATIENCE_S = 180.0
"""For the first start of a machine, whose torch and CUDA nobody has read yet."""

GPU_DDP = Path(__file__).with_name("gpu_ddp.py")
STEPS = 60

LOOK = """
import json, os, pathlib, sys, torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
found = torch.cuda.get_device_properties(torch.cuda.current_device())
seen = {
    "count": torch.cuda.device_count(),
    "uuid": str(found.uuid),
    "address": f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0",
    "cpus": sorted(os.sched_getaffinity(0)),
    **{name: os.environ.get(name) for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")},
}
(pathlib.Path(sys.argv[1]) / os.environ["RANK"]).write_text(json.dumps(seen))
"""


def look(job: Job, *options: str) -> list[Mapping[str, Any]]:
    """What each worker sees, by rank."""
    script, out = job.folder / "look.py", job.folder / "seen"
    script.write_text(LOOK)
    out.mkdir()
    agent = job.start("a", "--nproc-per-node=gpu", *options, script=(script, out))
    assert agent.exit_code(PATIENCE_S) == 0
    return [json.loads((out / str(rank)).read_text()) for rank in range(DEVICES)]


def devices() -> tuple[Device, ...]:
    """As the agent finds them, without the driver."""
    return probe(os.environ).cuda


def test_by_index_every_worker_sees_all_devices_and_takes_its_own(job: Job) -> None:
    seen = look(job)
    assert [worker["count"] for worker in seen] == [len(devices())] * DEVICES
    assert [worker["LOCAL_RANK"] for worker in seen] == [str(rank) for rank in range(DEVICES)]
    assert len({worker["uuid"] for worker in seen}) == DEVICES
    for worker, device in zip(seen, devices(), strict=True):
        print(f"cuda:{worker['LOCAL_RANK']} is {worker['address']}; the agent says {device}")
        assert device.address in (None, worker["address"])


def test_by_mask_every_worker_sees_its_own_device_alone(job: Job) -> None:
    seen = look(job, "--virtual-local-rank")
    assert [(worker["count"], worker["LOCAL_RANK"]) for worker in seen] == [(1, "0")] * DEVICES
    assert len({worker["uuid"] for worker in seen}) == DEVICES
    entries = tuple(worker["CUDA_VISIBLE_DEVICES"] for worker in seen)
    assert entries == tuple(device.entry for device in devices())
    for worker, device in zip(seen, devices(), strict=True):
        assert device.address in (None, worker["address"])


def test_workers_keep_to_cpus_next_to_their_devices(job: Job) -> None:
    for worker, device in zip(look(job, "--affinity=numa"), devices(), strict=True):
        folder = Path("/sys/bus/pci/devices") / (device.address or "unknown")
        node = (folder / "numa_node").read_text().strip() if folder.exists() else "unknown"
        print(f"{device} of NUMA node {node}: CPUs {worker['cpus']}")
        assert set(worker["cpus"]) <= os.sched_getaffinity(0)


def train(job: Job, name: str, *options: str) -> Path:
    """Starts it; where its checkpoints are."""
    checkpoints = job.folder / name
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for the same bits every time
    options = ("--nproc-per-node=gpu", *options)
    job.start(name, *options, script=(GPU_DDP, checkpoints, STEPS), environment=environment)
    return checkpoints


def weights(checkpoints: Path) -> dict[str, torch.Tensor]:
    saved = state_on_disk(checkpoints, STEPS)
    model: dict[str, torch.Tensor] = saved["model"]
    return model


@pytest.mark.parametrize("pinning", ["index", "mask"])
def test_ddp_over_nccl_survives_a_kill(job: Job, second_job: Job, pinning: str) -> None:
    option = f"--virtual-local-rank={str(pinning == 'mask').lower()}"
    expected = train(second_job, "undisturbed", option)
    assert second_job.agents[0].exit_code(PATIENCE_S) == 0

    checkpoints = train(job, "disturbed", option)
    job.wait_for(lambda: job.history(what="step", generation=1, step=25), "step 25", PATIENCE_S)
    (first,) = job.generations()
    killed_at = time.monotonic()
    os.kill(first.pid(0), signal.SIGKILL)
    (agent,) = job.agents
    assert agent.exit_code(PATIENCE_S) == 0

    assert len(job.generations()) == 2, "the second generation had the memory that it needs"
    assert not agent.says("not waiting any longer|not waited for any more")
    told = agent.says("GPU memory: .*")
    idle = "was free at the first look"
    print(f"\n{DEVICES} GPUs, pinning {pinning}, after SIGKILL of one worker; {told[0] if told else idle}")
    for what in (
        "start",
        "torch imported",
        "memory allocated",
        "first collective done",
        "checkpoint loaded",
        "step",
    ):
        began = {}
        for each in reversed(job.history(what=what, generation=2)):
            began[each["rank"]] = each["at"]
        assert len(began) == DEVICES
        print(f"  {max(began.values()) - killed_at:7.2f} s  {what}")
    resumed_from = job.history(what="checkpoint loaded", generation=2)[0]["step"]
    assert 20 <= resumed_from <= 30, "it went on from its newest checkpoint"
    torch.testing.assert_close(weights(checkpoints), weights(expected))
