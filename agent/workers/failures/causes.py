"""The causes of failures: one table. The first row that matches names the cause of a worker's end.

A row has conditions, the `Action` that follows, and a hint for the operator. Its name is the `reason` of the metrics
and the `cause` in the store. Only what the kernel or NVML reports excludes a node: a script can print anything. Rows
for reports of the kernel and the driver come first, then rows for exceptions and last lines, then rows for exit codes
and signals. The user's rows, `[[cause]]` in the configuration file, come before all.

- `collateral`: the end follows from another failure, whose cause may still become known.
- `outside`: a user or another program killed the worker; neither script, state nor node has failed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ....health.checks.gpus import Fault
from ....rendezvous.records import Action
from ....rendezvous.statements import inquiry
from ...configuration.values import UserCause
from .post_mortem import PostMortem, says_port_taken

Condition: TypeAlias = Callable[[PostMortem], bool]
"""Patterns in it are compiled when they are first needed: the start of an agent does not wait for that."""


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    action: Action
    hint: str
    when: tuple[Condition, ...] = ()
    """The row matches if any of them holds. Empty: only the agent itself finds this cause."""
    collateral: bool = False
    outside: bool = False
    of_gpu: bool = False
    """A worker may end so because its GPU is broken: NVML is heard."""


def _types(*names: str) -> str:
    """Exceptions of these types, from any module."""
    return rf"(?m:(?:[\w.]+\.)?(?:{'|'.join(names)})(?::|$))"


def _raised(*names: str, text: str | None = None) -> Condition:
    """An exception of one of these types ended the worker; `text` matches somewhere in its message."""
    types = _types(*names) if names else ""

    def holds(worker: PostMortem) -> bool:
        if not worker.exception or not re.match(types, worker.exception):
            return False
        return text is None or re.search(text, worker.exception) is not None

    return holds


def _says(*texts: str) -> Condition:
    """One of the texts is in `PostMortem.words`, with which the worker ended."""
    pattern = f"(?i:{'|'.join(texts)})"
    return lambda worker: any(re.search(pattern, words) for words in worker.words)


def _exits(*codes: int, text: str | None = None) -> Condition:
    """The worker exited with one of these codes; `text` matches in `PostMortem.words`."""

    def holds(worker: PostMortem) -> bool:
        if worker.code not in codes:
            return False
        return text is None or any(re.search(text, words) for words in worker.words)

    return holds


def _killed(*signals: int) -> Condition:
    """One of these signals ended the worker, which has recorded no exception. None given: any signal."""

    def holds(worker: PostMortem) -> bool:
        if worker.exception or not worker.signal:
            return False
        return not signals or worker.signal in signals

    return holds


def _machine(fault: Fault) -> Condition:
    """The kernel or NVML reported this of a GPU while the worker ran."""
    return lambda worker: any(event.fault is fault for event in worker.events)


def _out_of_memory(worker: PostMortem) -> bool:
    """The kernel killed the worker, or a child of it, because no memory was left."""
    if not worker.oom_killed:
        return False
    return worker.signal == signal.SIGKILL or re.search(_CHILD_KILLED, worker.exception) is not None


def _port_taken(worker: PostMortem) -> bool:
    """The worker wanted to listen on a TCP port that was in use."""
    return bool((worker.exception or worker.returncode > 0) and says_port_taken(worker.words))


_CHILD_KILLED = r"DataLoader worker \(pid.*\) is killed by signal: Killed"

# Only a device's "out of memory": the host's has no such prefix.
_GPU_MEMORY = (
    r"(CUDA|HIP|XPU) out of memory",
    r"CUDA error: out of memory",
    r"Cuda failure[^\n]*out of memory",
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"cudaErrorMemoryAllocation",
)
# Errors that the worker library raises on all ranks together, and would raise in the next generation, too. Not among
# them are ranks whose values differ: that may come from a fault, after which a restart helps.
_REFUSED = r"(elastic_agent\.worker\.errors\.)?(DirectoryNotShared|OtherRun|Sharded|MeshMismatch|UnsupportedTraining): "


def _refused(worker: PostMortem) -> bool:
    return re.match(_REFUSED, worker.exception) is not None


HANG = Cause(
    inquiry.HANG,
    Action.RESTART,
    "its stacks are in its log and in the evidence: they say where each thread stood. docs/runbook.md, Evidence, says"
    " how to read them",
)
NOT_STARTED = Cause(
    "not_started",
    Action.FREE,
    "the agent could not start it: its log says why",
)
STORE_SERVER = Cause(
    "store_server", Action.FREE, "the process that serves the workers' store ended, or its port was taken"
)
UNKNOWN = Cause("unknown", Action.RESTART, "read its last lines", (lambda worker: worker.code != 0,))

CAUSES: tuple[Cause, ...] = (
    Cause(
        "ecc",
        Action.EXCLUDE_NODE,
        "memory that could not be corrected: reset the GPU or start the machine anew, and replace it if it comes again",
        (_machine(Fault.MEMORY),),
    ),
    Cause(
        "xid",
        Action.EXCLUDE_NODE,
        "the driver lost a GPU or its link: reset the GPU (nvidia-smi -r) or start the machine anew; see the Xid's"
        " number in NVIDIA's catalog",
        (_machine(Fault.LOST),),
    ),
    Cause(
        "host_out_of_memory",
        Action.RESTART,
        "no memory was left on this machine or in its cgroup: fewer data loader workers, a smaller batch, or a higher"
        " limit",
        (
            _out_of_memory,
            _raised("MemoryError", "_ArrayMemoryError"),
            _says(
                r"DefaultCPUAllocator: (can't|not enough)",
                r"Cannot allocate memory",
                r"std::bad_alloc",
                r"unable to mmap \d+ bytes from file .*Cannot allocate",
            ),
        ),
    ),
    Cause(
        "refused",
        Action.END,
        "the worker library has refused what the script does, on all ranks alike: the error says what to change",
        (_refused,),
    ),
    Cause(
        "port",
        Action.FREE,
        "the port is named with its owner; a port of 0, or the MASTER_PORT that the agent gives, is never taken",
        (_port_taken,),
    ),
    Cause(
        "gpu_missing",  # on all nodes alike where the script or the container hides the GPUs
        Action.RESTART,
        "no usable GPU or driver here: compare nvidia-smi, the driver and the fabric manager with the other nodes'",
        (
            _says(
                "no CUDA-capable device is detected",
                "No CUDA GPUs are available",
                "CUDA driver initialization failed",
                "CUDA unknown error - this may be due to an incorrectly set up environment",
                "CUDA driver version is insufficient",
                "Found no NVIDIA driver",
                "system not yet initialized",
                "Driver/library version mismatch",
                r"libcuda\.so\.1: cannot open",
            ),
        ),
        of_gpu=True,
    ),
    Cause(
        "storage",  # before import_error: a module on such a file system is there after a restart
        Action.RESTART,
        "a file system fails: dmesg and its server say why; if it is always the same node, repair its mount",
        (
            _says(
                "Input/output error",
                "Read-only file system",
                "Stale file handle",
                "Transport endpoint is not connected",
                "PytorchStreamWriter failed",
                "PytorchStreamReader failed",
            ),
        ),
    ),
    Cause(
        "import_error",
        Action.STOP,
        "a module is missing, or cannot be imported, in the environment of the workers",
        (
            _raised("ImportError", "ModuleNotFoundError"),
            _exits(1, text=r": No module named |Error while finding module specification"),
        ),
    ),
    Cause(
        "script_error",
        Action.STOP,
        "an error in the script's code, or an assertion of it that does not hold",
        (
            _raised("SyntaxError", "IndentationError", "TabError", "AssertionError"),
            _raised("NameError", "UnboundLocalError", "AttributeError", "TypeError", "NotImplementedError"),
        ),
    ),
    Cause(
        "cuda_out_of_memory",
        Action.RESTART,
        "a smaller batch, activation checkpointing or more shards; nvidia-smi shows what else uses the GPU",
        (_raised("OutOfMemoryError"), _says(*_GPU_MEMORY)),
    ),
    Cause(
        "device_assert",
        Action.STOP,
        "an index or label is out of its range: run with CUDA_LAUNCH_BLOCKING=1 to see where",
        (_says("device-side assert triggered", "cudaErrorAssert"),),
    ),
    Cause(
        "nccl_usage",
        Action.STOP,
        "NCCL was called in a way that it forbids, most often two ranks on one GPU",
        (_says("ncclInvalidUsage", "ncclInvalidArgument", "Duplicate GPU detected"),),
    ),
    Cause(
        "collective_broken",
        Action.RESTART,
        "another rank ended or never came, or the network to it broke: look for what failed first, then at links and"
        " switches",
        (
            _says(
                "ncclRemoteError",
                "remote process exited or there was a network error",
                "Connection closed by remote peer",
                "NCCL communicator was aborted",
                "Watchdog caught collective operation timeout",
                r"(Connection closed by peer|Connection reset by peer|Broken pipe) \[",
                r"gloo[^\n]*(Connection (closed|reset|refused)|Broken pipe|Read timeout|timed? ?out)",
                r"Timed out waiting \d+ms for (recv|send) operation",
                r"Application timeout caused pair closure",
                r"Gloo connectFullMesh failed",
                r"Rank \d+ failed to pass monitoredBarrier",
            ),
        ),
        collateral=True,
    ),
    Cause(
        "cuda_error",
        Action.RESTART,
        "an error of CUDA or of its libraries: CUDA_LAUNCH_BLOCKING=1 shows where; if it is always the same node,"
        " suspect its GPU or driver",
        (
            _raised("AcceleratorError", r"NVMLError\w*"),
            _says(
                "CUDA error:",
                "CUDNN_STATUS_",
                "CUBLAS_STATUS_",
                "CUSOLVER_STATUS_",
                "Cuda failure",
                "cudaError",
            ),
        ),
        of_gpu=True,
    ),
    Cause(
        "nccl",
        Action.RESTART,
        "NCCL failed: NCCL_DEBUG=WARN says why; interface, limits and /dev/shm are the usual ones",
        (
            _raised("DistBackendError"),
            _says(
                "NCCL error",
                "nccl(Internal|System|UnhandledCuda)Error",
                "unhandled system error",
                "watchdog thread terminated with exception",
            ),
        ),
        of_gpu=True,
    ),
    Cause(
        "store_lost",
        Action.RESTART,
        "the store of the workers ended with the node or process that served it, or a rank never wrote there",
        (
            _raised("DistStoreError"),
            _raised("DistNetworkError", text="(?i)Broken pipe|Connection (was|reset)|got 0 bytes"),
            _says(
                "Failed to recv, got 0 bytes",
                r"TCPStore[^\n]*(Broken pipe|Connection reset|timeout)",
            ),
        ),
        collateral=True,
    ),
    Cause(
        "store_unreachable",
        Action.RESTART,
        "the node of rank 0 was not reached: a firewall, the wrong interface, or a MASTER_ADDR of the script's own",
        (_raised("DistNetworkError"),),
    ),
    Cause(
        "shared_memory_full",
        Action.RESTART,
        "/dev/shm is too small for data loaders and copies of the state: raise its size (sharedMemory, --shm-size)",
        (
            _says(
                "insufficient shared memory",
                "out of shared memory",
                r"unable to (write to|resize|allocate)[^\n]*</torch_",
                r"No space left on device[^\n]*/dev/shm",
                "No space left on device.*shm_open",
            ),
        ),
    ),
    Cause(
        "disk_full",
        Action.RESTART,
        "make room, or write elsewhere: df and quota say which file system it is",
        (_says("No space left on device", "Disk quota exceeded"),),
    ),
    Cause(
        "limit",
        Action.RESTART,
        "a limit of this user or cgroup: ulimit -n (files), ulimit -u and pids.max (processes and threads)",
        (
            _says(
                "Too many open files",
                "can't start new thread",
                r"\[Errno 11\] Resource temporarily unavailable",
            ),
        ),
    ),
    Cause(
        "data_loader",
        Action.RESTART,
        "a process of a data loader ended: its own output is above; num_workers=0 shows the error in place",
        (_says(r"DataLoader worker \(pid", "worker .* exited unexpectedly"),),
    ),
    Cause(
        "connection_lost",
        Action.RESTART,
        "the other end of a connection has gone: another rank, or a server of the script's own",
        (
            _raised(
                "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError", "BrokenPipeError"
            ),
        ),
        collateral=True,
    ),
    Cause(
        "command",
        Action.STOP,
        "the program or script is not there, may not be run, or does not know its arguments, which are all"
        " after SCRIPT",
        (_exits(126, 127), _exits(2, text=r"can't open file|(?m:^usage: )|: error: ")),
    ),
    Cause(
        "terminated",
        Action.RESTART,
        "a person or program asked this worker alone to stop; to stop the job, signal the agent",
        (
            _killed(
                *(
                    signal.SIGTERM,
                    signal.SIGINT,
                    signal.SIGHUP,
                    signal.SIGQUIT,
                    signal.SIGUSR1,
                    signal.SIGUSR2,
                )
            ),
            _raised("KeyboardInterrupt", "SIGTERMException"),
        ),
        outside=True,
    ),
    Cause(
        "exception",
        Action.RESTART,
        "see the traceback",
        (_raised(),),
    ),
    Cause(
        "killed",
        Action.RESTART,
        "a user, a batch system or a user-space memory killer (systemd-oomd, earlyoom) sent SIGKILL; the kernel did"
        " not, as far as the agent can see",
        (_killed(signal.SIGKILL),),
        outside=True,
    ),
    Cause(
        "segfault",
        Action.RESTART,
        "a fault in native code: PYTHONFAULTHANDLER=1 shows the Python stack; if it is always the same node, test its"
        " memory",
        (_killed(signal.SIGSEGV),),
        of_gpu=True,
    ),
    Cause(
        "bus_error",
        Action.RESTART,
        "often a full /dev/shm, or a mapped file that became shorter",
        (_killed(signal.SIGBUS),),
        of_gpu=True,
    ),
    Cause(
        "abort",
        Action.RESTART,
        "native code gave up: its last lines say why",
        (_killed(signal.SIGABRT),),
        of_gpu=True,
    ),
    Cause("signal", Action.RESTART, "see the signal's name", (_killed(),)),
    UNKNOWN,
    HANG,
    NOT_STARTED,
    STORE_SERVER,
)
"""All built-in rows, in the order in which they are tried."""


class CauseTable:
    """The table in force on this node: the user's rows, then `CAUSES`."""

    def __init__(self, users: Sequence[UserCause] = ()) -> None:
        actions = {user.name: user.action for user in users if user.action is not None}
        built_in = tuple(
            replace(cause, action=actions[cause.name]) if cause.name in actions else cause for cause in CAUSES
        )
        known = {cause.name: cause for cause in built_in}
        self._own = tuple(
            (user.contains, known.get(user.name) or _own(user, actions)) for user in users if user.contains
        )
        self._built_in = built_in
        self._by_name = {**{cause.name: cause for _, cause in self._own}, **known}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def named(self, name: str) -> Cause:
        """The row of this name; UNKNOWN for a name that only another node's table has."""
        return self._by_name.get(name, UNKNOWN)

    def classify(self, worker: PostMortem) -> Cause:
        """The first row that matches; UNKNOWN if none does, as for an end with success."""
        return next(self._matching(worker), UNKNOWN)

    def _matching(self, worker: PostMortem) -> Iterator[Cause]:
        for text, cause in self._own:
            if any(text in line for line in worker.lines):
                yield cause
        for cause in self._built_in:
            if any(condition(worker) for condition in cause.when):
                yield cause


def _own(user: UserCause, actions: Mapping[str, Action]) -> Cause:
    return Cause(user.name, actions[user.name], "a row of the configuration file has named it")
