"""The table of causes, as a pure function of what is known of a worker's end. The texts are those that were recorded
where they happened; what can happen here is really produced in `tests/contract/test_produced_failures.py`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.agent.workers.causes import CAUSES, UNKNOWN, cause_named, classify
from elastic_agent.agent.workers.post_mortem import ErrorReport, PostMortem
from elastic_agent.rendezvous.records import Action
from elastic_agent.rendezvous.text import CAUSE


def ended(
    returncode: int, exception: str = "", log_tail: tuple[str, ...] = (), oom: bool = False, **more: Any
) -> PostMortem:
    report = ErrorReport(exception or None)
    return PostMortem("a", 1, 0, 0, returncode, report, log_tail=log_tail, oom_killed=oom, **more)


DIST = "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
GLOO = "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
ACCELERATOR = "torch.AcceleratorError: CUDA error: "

EXCEPTIONS = [
    ("cuda_error", ACCELERATOR + "uncorrectable ECC error encountered"),
    ("cuda_error", "RuntimeError: CUDA error: GPU is lost"),
    ("cuda_error", "pynvml.NVMLError_GpuIsLost: GPU is lost"),
    (
        "cuda_error",
        "torch._inductor.exc.InductorError: RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
    ("host_out_of_memory", "BlockingIOError: [Errno 12] Cannot allocate memory"),
    ("exception", "ValueError: no handler of 'GPU is lost'"),
    (
        "cuda_error",
        DIST
        + "unhandled cuda error\nLast error:\nCuda failure 214 'CUDA uncorrectable ECC error encountered'",
    ),
    ("exception", """KeyError: "label 'CUDA uncorrectable ECC error' not in vocabulary\""""),
    ("exception", "FileNotFoundError: [Errno 2] No such file or directory: 'fallen off the bus.txt'"),
    ("exception", "ValueError: of RuntimeError: hardware memory corruption"),
    ("host_out_of_memory", "MemoryError"),
    ("host_out_of_memory", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7 TiB"),
    (
        "host_out_of_memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
        " tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)",
    ),
    ("host_out_of_memory", "OSError: [Errno 12] Cannot allocate memory"),
    (
        "host_out_of_memory",
        "ImportError: libx.so: failed to map segment from shared object: Cannot allocate memory",
    ),
    ("host_out_of_memory", "RuntimeError: std::bad_alloc"),
    ("refused", "elastic_agent.worker.errors.MeshMismatch: a mesh of shard 4 fits 4, 8, 12, ... ranks"),
    ("exception", "user.model.Sharded: a user's own exception"),
    ("port", "OSError: [Errno 98] Address already in use"),
    (
        "port",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address."
        " port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    ("import_error", "ModuleNotFoundError: No module named 'apex'"),
    (
        "import_error",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    ),
    ("gpu_missing", "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"),
    ("gpu_missing", "AssertionError: \nFound no NVIDIA driver on your system."),
    ("gpu_missing", "RuntimeError: Failed to initialize NVML: Driver/library version mismatch"),
    ("gpu_missing", "RuntimeError: No CUDA GPUs are available"),
    ("cuda_error", ACCELERATOR + "no CUDA-capable device is detected"),
    (
        "cuda_error",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env"
        " variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero.",
    ),
    (
        "gpu_missing",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    ),
    ("script_error", "SyntaxError: invalid syntax"),
    ("script_error", "IndentationError: unexpected indent"),
    ("script_error", "AssertionError"),
    ("script_error", "AssertionError: loss is not finite"),
    ("script_error", "AttributeError: 'NoneType' object has no attribute 'shape'"),
    ("script_error", "NameError: name 'modle' is not defined"),
    (
        "cuda_out_of_memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
    ),
    ("cuda_out_of_memory", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"),
    (
        "cuda_out_of_memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    ("cuda_out_of_memory", DIST + "unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    ("script_error", ACCELERATOR + "device-side assert triggered"),
    ("cuda_error", ACCELERATOR + "an illegal memory access was encountered"),
    ("cuda_error", "RuntimeError: CUDA error: unspecified launch failure"),
    ("cuda_error", ACCELERATOR + "misaligned address"),
    ("cuda_error", ACCELERATOR + "unknown error"),
    ("cuda_error", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    (
        "cuda_error",
        DIST + "unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nLast error:\nCuda failure 999",
    ),
    (
        "script_error",
        DIST + "invalid usage\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    ),
    (
        "script_error",
        DIST + "invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on device 1000",
    ),
    ("connection_lost", DIST + "remote process exited or there was a network error, NCCL version 2.21.5"),
    (
        "connection_lost",
        DIST
        + "internal error\nncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by"
        " remote peer user<50260>",
    ),
    ("connection_lost", "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3."),
    (
        "nccl",
        DIST + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5",
    ),
    ("nccl", DIST + "internal error - please report this issue to the NCCL developers, NCCL version 2.20.5"),
    (
        "connection_lost",
        GLOO + "Connection closed by peer [127.0.0.1]:48350. This is typically caused by a remote",
    ),
    (
        "connection_lost",
        GLOO + "Read error [127.0.0.1]:48782: Connection reset by peer. This is typically caused",
    ),
    ("connection_lost", GLOO + "Timed out waiting 3000ms for recv operation to complete"),
    ("connection_lost", "RuntimeError: Rank 1 failed to pass monitoredBarrier in 1000 ms"),
    ("connection_lost", "torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /x"),
    (
        "connection_lost",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote"
        " server shutdown or crash?",
    ),
    ("connection_lost", "torch.distributed.DistNetworkError: Broken pipe"),
    (
        "exception",  # and not collateral: this node alone may not reach it
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to"
        " (node1, 29500).",
    ),
    (
        "disk_full",
        "RuntimeError: DataLoader worker (pid 2107) is killed by signal: Bus error. It is possible that dataloader's"
        " workers are out of shared memory. Please try to raise your shared memory limit.",
    ),
    ("disk_full", "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'"),
    ("disk_full", "OSError: [Errno 28] No space left on device: '/ckpt/x'"),
    ("disk_full", "OSError: [Errno 122] Disk quota exceeded"),
    ("exception", "OSError: [Errno 5] Input/output error: '/data/shard-7'"),
    ("exception", "OSError: [Errno 116] Stale file handle"),
    ("exception", "ImportError: libx.so: cannot open shared object file: Stale file handle"),
    ("exception", "ImportError: libx.so: cannot read file data: Input/output error"),
    ("exception", "OSError: [Errno 24] Too many open files"),
    ("exception", "RuntimeError: can't start new thread"),
    ("exception", "RuntimeError: DataLoader worker (pid(s) 31550) exited unexpectedly"),
    ("connection_lost", "ConnectionResetError: [Errno 104] Connection reset by peer"),
    ("connection_lost", "BrokenPipeError: [Errno 32] Broken pipe"),
    ("killed", "KeyboardInterrupt"),
    ("exception", "ValueError: no"),
    ("exception", "RuntimeError: NotAssertionError: quoted"),
    ("exception", "it broke"),
]


@pytest.mark.parametrize(("name", "exception"), EXCEPTIONS)
def test_the_cause_of_an_exception(name: str, exception: str) -> None:
    assert classify(ended(1, exception)).name == name


WATCHDOG = (
    "[rank1]:[E1123 ProcessGroupNCCL.cpp:688] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,"
    " OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out."
)
TERMINATE = "terminate called after throwing an instance of 'c10::Error'"


@pytest.mark.parametrize(
    ("name", "returncode", "lines"),
    [
        ("unknown", 3, ()),
        ("unknown", 1, ("all went well",)),
        ("command", 127, ("sh: 1: trainer: not found",)),
        ("command", 126, ()),
        ("unknown", 2, ("two",)),
        ("disk_full", 1, ("tar: write error: No space left on device",)),
        ("unknown", 1, ("No space left on device", "made room", "went on", "step 7")),
        ("killed", -9, ()),
        ("killed", 137, ()),
        ("killed", -9, ("No space left on device",)),
        ("killed", -15, ()),
        ("killed", 143, ()),
        ("killed", -10, ()),
        ("signal", -11, ()),
        ("signal", 139, ()),
        ("signal", -7, ()),
        ("signal", -4, ()),
        ("signal", -8, ()),
        ("signal", -13, ()),
        ("signal", -6, ("NCCL version 2.27.3",)),
        ("cuda_error", -6, (TERMINATE, "  what():  CUDA error: uncorrectable ECC error encountered")),
        ("connection_lost", -6, (WATCHDOG, TERMINATE)),
        ("cuda_error", -6, (TERMINATE, "  what():  CUDA error: misaligned address", "", "frame #1: 0x7f")),
        ("host_out_of_memory", -6, ("terminate called after throwing an instance of 'std::bad_alloc'",)),
        (
            "connection_lost",
            -6,
            (
                "terminate called after throwing an instance of 'std::runtime_error'",
                "  what(): NCCL error: remote process exited or there was a network error, NCCL version 2.14.3",
                "Last error: NET/IB : Got completion from peer 11.214.147.122<39138> with error 12",
            ),
        ),
    ],
)  # fmt: skip
def test_the_cause_of_an_end_without_an_exception(name: str, returncode: int, lines: tuple[str, ...]) -> None:
    assert classify(ended(returncode, log_tail=lines)).name == name


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("gpu_fault", ended(1, DIST + "unhandled cuda error", gpu_failed=True)),
        ("gpu_fault", ended(-9, gpu_failed=True)),
        ("host_out_of_memory", ended(-9, oom=True)),
        ("host_out_of_memory", ended(137, oom=True)),
        (
            "host_out_of_memory",
            ended(1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", oom=True),
        ),
        ("exception", ended(1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ")),
        ("exception", ended(1, "ValueError: no", oom=True)),
        ("signal", ended(-11, oom=True)),
    ],
)
def test_what_the_machine_tells_comes_first(name: str, facts: PostMortem) -> None:
    assert classify(facts).name == name


ACTIONS = {
    Action.EXCLUDE_NODE: {"gpu_fault"},
    Action.STOP: {"import_error", "script_error", "command"},
    Action.END: {"refused"},
    Action.FREE: {"port", "not_started", "store_server"},
}


def test_what_follows_from_each_cause() -> None:
    for action, names in ACTIONS.items():
        assert {cause.name for cause in CAUSES if cause.action is action} == names
    assert {cause.name for cause in CAUSES if cause.outside} == {"killed"}
    assert {cause.name for cause in CAUSES if cause.collateral} == {"connection_lost"}


def test_each_row_has_a_name_of_its_own_and_a_hint() -> None:
    names = [cause.name for cause in CAUSES]
    assert len(set(names)) == len(names)
    assert all(CAUSE.fullmatch(name) for name in names)
    assert all(10 < len(cause.hint) < 200 or cause is UNKNOWN or cause.hint for cause in CAUSES)


@pytest.mark.parametrize(
    "said",
    [text for _, text in EXCEPTIONS]
    + [
        "RuntimeError: CUDA error: hardware memory corruption",
        "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "RuntimeError: CUDA error: Uncorrectable NVLink error",
    ],
)
def test_no_text_of_a_worker_excludes_a_node(said: str) -> None:
    """Any script can print anything: NVML alone tells of a broken machine."""
    for facts in (ended(1, said), ended(-6, log_tail=(said,)), ended(1, log_tail=(said,))):
        assert classify(facts).action is not Action.EXCLUDE_NODE


@given(
    st.integers(-64, 255), st.text(), st.lists(st.text(st.characters(exclude_characters="\n"))), st.booleans()
)
def test_whatever_a_worker_leaves_it_has_one_cause(
    code: int, exception: str, lines: list[str], oom: bool
) -> None:
    cause = classify(ended(code, exception, tuple(lines), oom))
    assert cause_named(cause.name) is cause
