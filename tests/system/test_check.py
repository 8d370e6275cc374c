"""A node that its own checks keep out of a job: the others train without it, and it joins when it is mended."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import skip_without
from tests.nvml_library import FakeLibrary

from .harness import Job

ON_A_GPU = (sys.executable, str(Path(__file__).with_name("fake_gpus.py")))


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file in a full file system."""
    skip_without(("mount",), "util-linux", "only root mounts file systems")
    place = tmp_path / "checkpoints"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=True)
    try:
        fill = place / "fill"
        fill.write_bytes(bytes(60 << 20))
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.long
def test_a_node_with_a_full_disk_joins_when_there_is_room(job: Job, in_etcd: None, full: Path) -> None:
    two = ("--min-nodes=1", "--max-nodes=2", "--check=fail")
    job.join("a", *two)
    job.wait_for_training(1)
    b = job.join("b", *two, f"--log-dir={full.parent}/logs")
    job.wait_for_text(b, r"check log-directory failed: \S+: 4 MiB free\. To do: make room")
    job.wait_for_text(b, "this node does not join, checking again in")
    status, body = b.get("/readyz")
    assert status == 503
    assert "log-directory" in body
    assert b.metric("elastic_agent_check_outcome", check="log-directory") == 2
    assert b.metric("elastic_agent_check_outcome", check="open-files") == 0
    _, page = b.get("/status")
    assert [check["check"] for check in json.loads(page)["checks"]] == ["log-directory"]
    asked = [sys.executable, "-m", "elastic_agent", "status", f"--agent={b.url.removeprefix('http://')}"]
    shown = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "this node does not join before its checks pass" in shown
    assert job.generations()[-1].nodes == ["a"]
    full.unlink()
    job.wait_for_text(b, "no check of this node fails any more: it joins")
    job.wait_for_training(2, after=1)


@pytest.mark.long
def test_a_driver_that_hangs_holds_up_nothing_and_its_probe_ends_with_the_agent(
    job: Job, tmp_path: Path
) -> None:
    """That no process outlives the agent is looked at when the job is closed (I9)."""
    nvml = FakeLibrary(tmp_path)
    nvml.says("hang 1")
    job.start("a", "--standalone", "--check=warn", environment=nvml.environment, enter=ON_A_GPU)
    job.wait_for(lambda: len(_probing(job)) >= 2, "the probe and the process that runs it")
    job.wait_for_training(1)


def _probing(job: Job) -> list[int]:
    found = []
    for process in job.processes():
        with contextlib.suppress(OSError):  # it has just ended
            if "health.checks.runner" in Path(f"/proc/{process.pid}/cmdline").read_text():
                found.append(process.pid)
    return found
