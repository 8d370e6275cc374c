"""The causes of failures: one table, and the `Failure` that follows, which travels through the store.

The first row that matches names the cause of a worker's end.

A row says what it is known by, the `Action` that follows, and a hint for the operator. Its name is the `reason` of the
metrics and the `cause` in the store. Only what NVML reports excludes a node: a script can print anything.
Rows that are known by exceptions and last lines come before those by exit codes and signals. What no row knows is an
`exception`, or `unknown`: its last lines are shown.

- `collateral`: the end follows from another failure, whose cause may still become known.
- `outside`: a user or another program killed the worker; neither script, state nor node has failed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ...health import hang_report
from ...rendezvous import records
from ...rendezvous.records import Action, Failure
from ..common.exits import describe_exit
from .post_mortem import (
    BY_ITSELF,
    ErrorReport,
    PostMortem,
    clean,
    cut,
    find_last_words,
    find_traceback,
    first_line,
    notes_of_ports,
    says_port_taken,
)


@dataclass(frozen=True, slots=True)
class FailureCause:
    """It matches if any of what it is known by does; without any, only the agent itself finds it. Patterns are compiled
    when they are first needed: the start of an agent does not wait for that."""

    name: str
    action: Action
    hint: str
    raises: tuple[str, ...] = ()
    """Patterns of the type of the exception that ended the worker, from any module."""
    says: tuple[str, ...] = ()
    """Patterns in what the worker said at its end, in upper or lower case."""
    signals: tuple[int, ...] = ()
    """That ended the worker, which has recorded no exception."""
    also: Callable[[PostMortem], bool] | None = None
    collateral: bool = False
    outside: bool = False
    of_gpu: bool = False
    """A worker may end so because its GPU is broken: NVML is heard."""

    def matches(self, worker: PostMortem) -> bool:
        exception = worker.exception
        return (
            (self.also is not None and self.also(worker))
            or any(re.match(rf"(?m:(?:[\w.]+\.)?{name}(?::|$))", exception) for name in self.raises)
            or any(re.search(text, words, re.IGNORECASE) for text in self.says for words in worker.words)
            or (not exception and worker.signal in self.signals)
        )


def _out_of_memory(worker: PostMortem) -> bool:
    """The kernel killed the worker, or a child of it, because no memory was left."""
    child = r"DataLoader worker \(pid.*\) is killed by signal: Killed"
    killed = worker.signal == signal.SIGKILL or re.search(child, worker.exception) is not None
    return worker.oom_killed and killed


def _port_taken(worker: PostMortem) -> bool:
    """The worker wanted to listen on a TCP port that was in use."""
    return bool((worker.exception or worker.returncode > 0) and says_port_taken(worker.words))


HANG = FailureCause(
    hang_report.HANG,
    Action.RESTART,
    "its stacks are in its log and in the evidence: they say where each thread stood. docs/runbook.md, Evidence, says"
    " how to read them",
)
NOT_STARTED = FailureCause("not_started", Action.FREE, "the agent could not start it: its log says why")
STORE_SERVER = FailureCause(
    "store_server", Action.FREE, "the process that serves the workers' store ended, or its port was taken"
)
UNKNOWN = FailureCause("unknown", Action.RESTART, "read its last lines", of_gpu=True)

CAUSES: tuple[FailureCause, ...] = (
    FailureCause(
        "gpu_fault",
        Action.EXCLUDE_NODE,
        "the driver lost a GPU, or its memory could not be corrected: reset the GPU (nvidia-smi -r) or start"
        " the machine anew, and replace it if it comes again",
        also=lambda worker: worker.gpu_failed,
    ),
    FailureCause(
        "host_out_of_memory",
        Action.RESTART,
        "no memory was left on this machine or in its cgroup: fewer data loader workers, a smaller batch, or a higher"
        " limit",
        ("MemoryError", "_ArrayMemoryError"),
        (
            r"DefaultCPUAllocator: (can't|not enough)",
            "Cannot allocate memory",
            r"std::bad_alloc",
        ),
        also=_out_of_memory,
    ),
    FailureCause(
        # Errors that the worker library raises on all ranks together, and would raise in the next generation, too. Not
        # among them are ranks whose values differ: that may come from a fault, after which a restart helps.
        "refused",
        Action.END,
        "the worker library has refused what the script does, on all ranks alike: the error says what to change",
        (
            r"(worker\.errors\.|(?<!\.))(DirectoryNotShared|OtherRun|Sharded|MeshMismatch|UnsupportedTraining)",
        ),
    ),
    FailureCause(
        "port",
        Action.FREE,
        "the port is named with its owner; a port of 0, or the MASTER_PORT that the agent gives, is never taken",
        also=_port_taken,
    ),
    FailureCause(
        # Before the errors of a script: libraries and modules tell of it with any exception.
        "gpu_missing",
        Action.RESTART,
        "no GPU can be used: nvidia-smi on that node says whether its driver runs, and CUDA_VISIBLE_DEVICES what the"
        " workers see",
        says=(
            *(
                "No CUDA GPUs are available",
                "NVIDIA driver on your system",
                r"libcuda\.so[.\d]*: cannot open",
            ),
            *("Driver/library version mismatch", "system not yet initialized"),
        ),
        of_gpu=True,
    ),
    FailureCause(
        "import_error",
        Action.STOP,
        "a module is missing, or cannot be imported, in the environment of the workers",
        # A module on a file system that fails may be there after a restart.
        ("ImportError(?!.*(Stale file handle|Input/output error))", "ModuleNotFoundError"),
    ),
    FailureCause(
        "script_error",
        Action.STOP,
        "an error in the script's code: an assertion that does not hold, an index or label out of range"
        " (CUDA_LAUNCH_BLOCKING=1 shows where), two ranks on one GPU",
        (
            *("SyntaxError", "IndentationError", "TabError", "AssertionError", "NameError"),
            *("UnboundLocalError", "AttributeError", "TypeError", "NotImplementedError"),
        ),
        (
            *("device-side assert triggered", "cudaErrorAssert"),
            *("ncclInvalidUsage", "ncclInvalidArgument", "Duplicate GPU detected"),
        ),
    ),
    FailureCause(
        "cuda_out_of_memory",
        Action.RESTART,
        "a smaller batch, activation checkpointing or more shards; nvidia-smi shows what else uses the GPU",
        ("OutOfMemoryError",),
        (
            "(CUDA|HIP|XPU) out of memory",
            r"Cuda (error|failure)[^\n]*out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "cudaErrorMemoryAllocation",
        ),
    ),
    FailureCause(
        "connection_lost",
        Action.RESTART,
        "another rank or the store of the workers ended or was never there, or the network to it broke: look for what"
        " failed first, then at firewall, interface and links",
        (
            # A node that cannot reach the store of the ranks may be the only one: that failure is its own.
            *("DistStoreError", "DistNetworkError(?!: The client socket)"),
            *("ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError", "BrokenPipeError"),
        ),
        (
            "ncclRemoteError",
            "remote process exited or there was a network error",
            "Connection closed by remote peer",
            "NCCL communicator was aborted",
            "Watchdog caught collective operation timeout",
            r"(Connection closed by peer|Connection reset by peer|Broken pipe) \[",
            r"gloo[^\n]*(Connection (closed|reset|refused)|Broken pipe|Read timeout|timed? ?out)",
            r"Timed out waiting \d+ms for (recv|send) operation",
            "Application timeout caused pair closure",
            "Gloo connectFullMesh failed",
            r"Rank \d+ failed to pass monitoredBarrier",
            "Failed to recv, got 0 bytes",
            r"TCPStore[^\n]*(Broken pipe|Connection reset|timeout)",
        ),
        collateral=True,
    ),
    FailureCause(
        "cuda_error",
        Action.RESTART,
        "an error of CUDA or its libraries: CUDA_LAUNCH_BLOCKING=1 shows where; if it is always the same node, suspect"
        " its GPU or driver",
        ("AcceleratorError", r"NVMLError\w*"),
        (
            *("CUDA error:", "CUDA unknown error", "CUDNN_STATUS_", "CUBLAS_STATUS_", "CUSOLVER_STATUS_"),
            *("Cuda failure", "cudaError", "cudaGetDeviceCount", "CUDA driver"),
        ),
        of_gpu=True,
    ),
    FailureCause(
        "nccl",
        Action.RESTART,
        "NCCL failed: NCCL_DEBUG=WARN says why; interface, limits and /dev/shm are the usual ones",
        ("DistBackendError",),
        (
            "NCCL error",
            "nccl(Internal|System|UnhandledCuda)Error",
            "watchdog thread terminated with exception",
        ),
        of_gpu=True,
    ),
    FailureCause(
        "disk_full",
        Action.RESTART,
        "make room, or write elsewhere: df and quota say which file system it is. /dev/shm is made larger by"
        " sharedMemory or --shm-size",
        (),
        ("No space left on device", "Disk quota exceeded", "(insufficient|out of) shared memory"),
    ),
    FailureCause(
        "command",
        Action.STOP,
        "the program or script is not there, or may not be run",
        also=lambda worker: worker.returncode in (126, 127),
    ),
    FailureCause(
        "killed",
        Action.RESTART,
        "a user, a batch system or a user-space memory killer (systemd-oomd, earlyoom) sent this signal to this"
        " worker alone; to stop the job, signal the agent",
        ("KeyboardInterrupt", "SIGTERMException"),
        signals=(
            *(signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
            *(signal.SIGUSR1, signal.SIGUSR2),
        ),
        outside=True,
    ),
    FailureCause(
        "exception", Action.RESTART, "see the traceback", also=lambda worker: bool(worker.exception)
    ),
    FailureCause(
        "signal",
        Action.RESTART,
        "a crash of native code: its name says which, and PYTHONFAULTHANDLER=1 shows the Python stack; if it is always"
        " the same node, test its memory",
        also=lambda worker: bool(worker.signal),
        of_gpu=True,
    ),
    UNKNOWN,
    HANG,
    NOT_STARTED,
    STORE_SERVER,
)
"""All rows, in the order in which they are tried."""
_BY_NAME = {cause.name: cause for cause in CAUSES}
NAMES = tuple(_BY_NAME)


def cause_named(name: str) -> FailureCause:
    """UNKNOWN for a name that is not in the table."""
    return _BY_NAME.get(name, UNKNOWN)


def classify(worker: PostMortem) -> FailureCause:
    """The first row that matches; UNKNOWN if none does, as for an end with success."""
    return next((cause for cause in CAUSES if cause.matches(worker)), UNKNOWN)


# --- The failure that all nodes are told of

SUMMARY_MAX = 500
_FINGERPRINT_MAX = 300

# What changes from run to run in a message: UUIDs, addresses and hashes, names of temporary files, numbers.
_VARYING = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]+\b|\btmp\w{6,}|\d+",
    re.IGNORECASE,
)


def describe_failure(worker: PostMortem) -> Failure:
    """The failure of this worker, with its cause. All of it fits into a record; its node's log has more."""
    worker = replace(worker, log_tail=tuple(map(clean, worker.log_tail)))
    if not worker.exception and (found := _traceback(worker)) is not None:
        worker = replace(worker, report=found)
    cause = classify(worker)
    # A broken GPU of the worker is the cause of what may look like one, and of an end that follows from another. Else
    # the fault may be hours old.
    if worker.own_gpus and (cause.of_gpu or cause.collateral):
        worker = replace(worker, gpu_failed=True)
        cause = classify(worker)
    said = worker.exception or (says_port_taken(worker.words) if cause.name == "port" else "")
    words = f": {cut(first_line(said), SUMMARY_MAX // 2)}" if said else ""
    notes = [
        f"{describe_exit(worker.returncode, worker.oom_killed)}{words}",
        *notes_of_ports(said, worker.master_port, taken=cause.name == "port"),
        *(worker.own_gpus[:1] if worker.gpu_failed else ()),
    ]
    exception, traceback = worker.report.exception, worker.report.traceback
    return Failure(
        worker.generation,
        fingerprint(worker.returncode, exception),
        cut("; ".join(notes), SUMMARY_MAX),
        cause.name,
        cause.action,
        cause.collateral,
        cause.outside,
        worker.node,
        worker.rank,
        worker.local_rank,
        worker.returncode,
        cut(exception, records.MAX_EXCEPTION) if exception is not None else None,
        cut(traceback, records.MAX_TRACEBACK, keep_end=True) if traceback is not None else None,
        tuple(cut(line, records.MAX_LOG_LINE) for line in worker.log_tail[-records.MAX_LOG_LINES :]),
        shown_file(worker.log_file),
    )


def shown_file(path: Path | None) -> str | None:
    """As a failure names it."""
    return cut(clean(str(path)), records.MAX_LOG_FILE) if path is not None else None


def _traceback(worker: PostMortem) -> ErrorReport | None:
    """The exception that ended the worker, from its last lines. A worker that a signal ended may have logged, and
    survived, other exceptions before. But it may also have failed first, and crashed or been asked to end on its way
    out: then the exception is the last thing in its output."""
    if worker.returncode > 0:
        return find_traceback(worker.log_tail)
    by_itself = worker.asked or -worker.returncode in BY_ITSELF
    return find_last_words(worker.log_tail) if by_itself else None


def fingerprint(returncode: int, exception: str | None) -> str:
    """The same text for the same failure in another generation, on another rank or node; for crash loops."""
    ended = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    if exception is None:
        return ended
    return f"{ended}: {_VARYING.sub('#', first_line(exception))}"[:_FINGERPRINT_MAX]
