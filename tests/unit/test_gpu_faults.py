"""What NVML shows of a GPU after a failure that it did not show before, and which cause follows: pure functions."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_agent.agent.workers.causes import cause_named, describe_failure
from elastic_agent.agent.workers.post_mortem import PostMortem
from elastic_agent.health.checks.gpus import (
    GPU_IS_LOST,
    NOT_FOUND,
    RESET_REQUIRED,
    GpuFacts,
    GpuFault,
    NvmlFacts,
    faults_since,
)
from elastic_agent.rendezvous.records import Action, Failure

GPU, OTHER = "0000:3b:00.0", "0000:40:00.0"
WELL = {
    "uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
}


def reading(*gpus: GpuFacts, problem: str = "") -> NvmlFacts:
    return NvmlFacts(driver="580.1", problem=problem, gpus=gpus)


def gpu(**facts: Any) -> GpuFacts:
    return GpuFacts(name=GPU, **{**WELL, **facts})


def lost(code: int, problem: str = "gone") -> GpuFacts:
    return GpuFacts(name=GPU, problem=problem, code=code)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (gpu(), gpu(uncorrected=2), "uncorrected memory errors: 2, were 0"),
        (gpu(uncorrected=3), gpu(uncorrected=4), "uncorrected memory errors: 4, were 3"),
        (gpu(), gpu(remap_failed=True), "a remapping of a row has failed"),
        (gpu(), lost(GPU_IS_LOST, "GPU is lost"), "GPU is lost"),
        (gpu(), lost(RESET_REQUIRED, "GPU requires reset"), "GPU requires reset"),
        (lost(GPU_IS_LOST), lost(GPU_IS_LOST, "GPU is lost"), "GPU is lost"),
        (gpu(), lost(NOT_FOUND, "Not Found"), "NVML no longer lists it (Not Found)"),
    ],
)
def test_a_fault_is_named(before: GpuFacts, now: GpuFacts, said: str) -> None:
    assert faults_since(reading(before), reading(now)) == (GpuFault(GPU, f"GPU {GPU}: {said}"),)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (gpu(), gpu()),
        (gpu(uncorrected=3), gpu(uncorrected=3)),
        (gpu(uncorrected=3), gpu(uncorrected=0)),  # the driver was loaded anew
        (gpu(remap_failed=True), gpu(remap_failed=True)),
        (gpu(), gpu(remap_pending=True)),  # which NVIDIA says does not affect further work
        (gpu(), gpu(throttled=64)),
        (gpu(uncorrected=None), gpu(uncorrected=5)),  # it was not known before
        (gpu(remap_failed=None), gpu(remap_failed=True)),
        (gpu(), gpu(uncorrected=None, remap_failed=None)),
        (gpu(), lost(4, "Insufficient Permissions")),
        (gpu(), lost(999, "Unknown Error")),
        (lost(NOT_FOUND), lost(NOT_FOUND)),  # NVML does not know it by this name
        (lost(NOT_FOUND), gpu(uncorrected=5)),
    ],
)
def test_what_is_no_fault(before: GpuFacts, now: GpuFacts) -> None:
    assert not faults_since(reading(before), reading(now))


def test_a_gpu_that_was_not_read_before_has_no_faults_but_its_loss() -> None:
    assert not faults_since(reading(), reading(gpu(uncorrected=5, remap_failed=True)))
    assert faults_since(reading(), reading(lost(GPU_IS_LOST)))


def test_an_nvml_that_does_not_work_any_more_shows_no_fault() -> None:
    assert not faults_since(reading(gpu()), reading(problem="Driver Not Loaded"))


# --- The cause


MEMORY = GpuFault(GPU, f"GPU {GPU}: uncorrected memory errors: 2, were 0")
LOST = GpuFault(GPU, f"GPU {GPU}: GPU is lost")


def raised(error: str) -> tuple[str, ...]:
    return "Traceback (most recent call last):", '  File "train.py", line 3, in <module>', error


ASSERTION = raised("AssertionError: loss")
NO_MODULE = raised("ModuleNotFoundError: No module named 'flash_attn'")
GPU_MEMORY = raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
ILLEGAL_ACCESS = raised("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
TIMED_OUT = raised("torch.distributed.DistBackendError: Watchdog caught collective operation timeout")


def examined(
    faults: tuple[GpuFault, ...],
    own: str,
    returncode: int = 1,
    log_tail: tuple[str, ...] = (),
) -> Failure:
    worker = PostMortem(
        *("a", 1, 0, 0, returncode),
        log_tail=log_tail,
        own_gpus=tuple(f"NVML: {fault.text}" for fault in faults if fault.gpu == own),
    )
    return describe_failure(worker)


@pytest.mark.parametrize(
    ("fault", "own", "returncode", "log_tail", "cause"),
    [
        (MEMORY, True, 7, (), "gpu_fault"),
        (MEMORY, True, -6, (), "gpu_fault"),
        (LOST, True, 1, ILLEGAL_ACCESS, "gpu_fault"),
        (MEMORY, True, -9, (), "killed"),  # from outside; the errors may be hours old
        (MEMORY, True, 1, ASSERTION, "script_error"),
        (LOST, True, 1, NO_MODULE, "import_error"),
        (MEMORY, True, 1, GPU_MEMORY, "cuda_out_of_memory"),
        (MEMORY, False, -6, (), "signal"),
        (LOST, True, 7, (), "gpu_fault"),
        (LOST, True, 1, TIMED_OUT, "gpu_fault"),
        (LOST, False, 1, TIMED_OUT, "connection_lost"),
        (LOST, False, 7, (), "unknown"),
        (MEMORY, False, 1, ASSERTION, "script_error"),
        (LOST, False, -9, (), "killed"),
        (None, True, 7, (), "unknown"),
        (None, True, 1, TIMED_OUT, "connection_lost"),
        (None, True, -9, (), "killed"),
    ],
)
def test_the_cause_that_follows(
    fault: GpuFault | None, own: bool, returncode: int, log_tail: tuple[str, ...], cause: str
) -> None:
    """`own`: it is a GPU of the worker that failed, and not of another one on its node."""
    faults = () if fault is None else (fault,)
    failure = examined(faults, GPU if own else OTHER, returncode, log_tail)
    assert failure.cause == cause
    if cause == "gpu_fault":
        assert fault is not None
        assert failure.summary.endswith(f"; NVML: {fault.text}")
        assert not failure.collateral
        assert cause_named(cause).action is Action.EXCLUDE_NODE
    else:
        assert "NVML" not in failure.summary
