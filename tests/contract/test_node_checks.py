"""The checks of one node against what really is wrong: each failure is made, and none of them is an error of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.health.checks.finding import Finding, NodeNeeds, Outcome
from elastic_agent.health.checks.gpus import GPU_CHECKS
from elastic_agent.health.checks.runner import BY_NAME, CheckRun, checks_for, run_checks
from tests.nvml_library import FakeLibrary

TESTS = Path(__file__).parents[1]
GPUS = ("0000:3b:00.0", "0000:5e:00.0")
FAST_SUBSET_S = 1.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")


def _find(needs: NodeNeeds, *names: str, environment: Mapping[str, str] | None = None) -> dict[str, Finding]:
    """By their names."""
    found = run_checks([BY_NAME[name] for name in names], needs, environment)
    return {finding.check: finding for finding in found}


# --- Directories


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "mounted"
    place.mkdir()
    yield place
    subprocess.run(["umount", "--lazy", place], capture_output=True)


@as_root
def test_a_full_file_system(mountpoint: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mountpoint], check=True)
    (mountpoint / "fill").write_bytes(b"x" * 2**20)
    needs = NodeNeeds(log_directory=str(mountpoint / "job"))
    found = _find(needs, "log-directory")["log-directory"]
    assert found.outcome is Outcome.FAIL
    assert found.summary == f"{mountpoint}: No space left on device"


@pytest.fixture
def slow_mount(mountpoint: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Its fsync takes `request.param` seconds."""
    command = [sys.executable, TESTS / "slow_fuse.py", mountpoint, str(request.param)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        mounted = server.stdout.readline() == b"mounted\n"
        try:
            if not mounted:
                pytest.skip("this machine has no FUSE")
            yield mountpoint
        finally:
            server.kill()


@as_root
@pytest.mark.parametrize("slow_mount", [-1], indirect=True)
def test_a_disk_that_does_not_answer_holds_up_its_own_probe_alone(slow_mount: Path) -> None:
    """Its process hangs in the kernel, and not even SIGKILL ends it."""
    needs = NodeNeeds(log_directory=str(slow_mount))
    run = CheckRun([replace(BY_NAME["log-directory"], limit_s=0.3), BY_NAME["open-files"]], needs)
    began = time.monotonic()
    run.start()
    found = run.findings()
    run.end()
    assert time.monotonic() - began < 15.0, "the longest limit, the start, and some time to end"
    assert [finding.outcome for finding in found] == [Outcome.FAIL, Outcome.OK]
    assert "has given no answer" in found[0].summary
    assert run.pid is not None, (
        "it stays the parent of the hung process, which would be an orphan of the agent"
    )
    run.close()
    deadline = time.monotonic() + 5.0
    while run.pid is not None:
        assert time.monotonic() < deadline, "it ends with the agent"
        time.sleep(0.01)


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    found = _find(NodeNeeds(log_directory=str(tmp_path / "a" / "b")), "log-directory")
    assert {finding.outcome for finding in found.values()} <= {Outcome.OK, Outcome.WARN}
    assert not list(tmp_path.iterdir())


# --- GPUs


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> FakeLibrary:
    return FakeLibrary(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(fake_library: FakeLibrary) -> dict[str, str]:
    """The environment in which it is found."""
    fake_library.says("")
    return {**os.environ, **fake_library.environment}


@pytest.mark.parametrize(
    ("state", "check", "outcome", "said"),
    [
        ("", "gpu-visible", Outcome.OK, "2 GPUs answer, driver 580.1"),
        ("init 9", "gpu-visible", Outcome.FAIL, "NVML does not start: Driver Not Loaded"),
        ("crash 1", "gpu-visible", Outcome.FAIL, "the probe was ended by signal 6"),
        ("lost 1", "gpu-visible", Outcome.FAIL, "0000:5e:00.0: GPU is lost"),
        ("ask 16", "gpu-visible", Outcome.FAIL, "0000:5e:00.0: GPU requires reset"),
        ("print 1", "gpu-visible", Outcome.OK, "2 GPUs answer"),
        ("ecc 3", "gpu-ecc", Outcome.FAIL, "0000:5e:00.0: 3 uncorrected memory errors"),
        ("no_ecc 1", "gpu-ecc", Outcome.UNKNOWN, "do not say it"),
        ("pending 1", "gpu-remapped-rows", Outcome.WARN, "waits for a reset"),
        ("failed 1", "gpu-remapped-rows", Outcome.FAIL, "remapping has failed"),
        ("throttle 64", "gpu-throttling", Outcome.WARN, "hardware thermal slowdown"),
    ],
)
def test_what_nvml_says(nvml: dict[str, str], state: str, check: str, outcome: Outcome, said: str) -> None:
    Path(nvml["FAKE_NVML_STATE"]).write_text(f"{state}\n")
    found = _find(NodeNeeds(gpus=GPUS), "gpu-visible", environment=nvml)
    assert found[check].outcome is outcome
    assert said in found[check].summary
    assert set(found) == set(GPU_CHECKS) or outcome is Outcome.FAIL


def test_a_driver_that_hangs(nvml: dict[str, str]) -> None:
    Path(nvml["FAKE_NVML_STATE"]).write_text("hang 1\n")
    run = CheckRun([replace(BY_NAME["gpu-visible"], limit_s=0.3)], NodeNeeds(gpus=GPUS), nvml)
    run.start()
    (found,) = run.findings()
    run.close()
    assert found.outcome is Outcome.FAIL
    assert "the probe has not answered within 0.3 s" in found.summary
    assert "reboot" in found.advice


# --- Limits


def test_few_descriptors(tmp_path: Path) -> None:
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n 256\nexec {sys.executable} "$@"\n')
    limited.chmod(0o755)
    run = CheckRun([BY_NAME["open-files"]], NodeNeeds(ranks=1000), python=str(limited))
    run.start()
    found = run.findings()[0]
    run.close()
    assert found.outcome is Outcome.FAIL
    assert found.summary == "256 descriptors for each process, and 1000 ranks need 1128"
    assert "LimitNOFILE=1128" in found.advice


# --- The process that runs the probes


def test_what_is_needed_before_a_join_takes_less_than_a_second(tmp_path: Path) -> None:
    needs = NodeNeeds(log_directory=str(tmp_path), address="127.0.0.1")
    took = []
    for _ in range(5):  # the machine may have other things to do, but not all the time
        began = time.monotonic()
        found = run_checks(checks_for(needs), needs)
        took.append(time.monotonic() - began)
        if took[-1] < FAST_SUBSET_S:
            break
    assert min(took) < FAST_SUBSET_S
    assert not [finding for finding in found if finding.outcome is Outcome.FAIL]


@pytest.mark.parametrize("program", ["print('hello')", "pass", "import os; os.kill(os.getpid(), 9)"])
def test_a_process_that_breaks_makes_findings(tmp_path: Path, program: str) -> None:
    broken = tmp_path / "python"
    broken.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    broken.chmod(0o755)
    run = CheckRun([BY_NAME["shared-memory"]], NodeNeeds(), python=str(broken))
    run.start()
    (found,) = run.findings()
    run.close()
    assert found.outcome is Outcome.FAIL
    assert found.summary == "the probe has given no answer"


def test_a_process_that_cannot_be_started_makes_findings() -> None:
    run = CheckRun([BY_NAME["open-files"]], NodeNeeds(), python="/nonesuch")
    run.start()
    (found,) = run.findings()
    assert found.outcome is Outcome.UNKNOWN
    assert "could not be started: No such file or directory" in found.summary


def test_probes_end_with_the_agent(nvml: dict[str, str]) -> None:
    Path(nvml["FAKE_NVML_STATE"]).write_text("hang 1\n")
    run = CheckRun([BY_NAME["gpu-visible"]], NodeNeeds(gpus=GPUS), nvml)
    run.start()
    run.close()
    deadline = time.monotonic() + 5.0
    while run.pid is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
