"""What this machine gives to a job: shared memory, limits, directories; and whether its devices compute right."""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from .finding import GIB, MIB, Finding, NodeNeeds, Outcome, size, span
from .processes import probe_command

# --- Shared memory

SHARED_MEMORY = "/dev/shm"
MEMORY = ("tmpfs", "ramfs", "devtmpfs", "")
"""File systems in memory; the last one could not be found out."""
DOCKERS_DEFAULT = 64 * MIB
LEAST_FREE = 16 * MIB
MORE_SHARED = (
    "make it larger (Docker: --shm-size, the chart: sharedMemory, else mount -o remount,size=8G /dev/shm)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryFacts:
    problem: str = ""
    """Why a file cannot be made there; empty where it can."""
    file_system: str = ""
    total_bytes: int = 0
    """0: it has no limit of its own."""
    free_bytes: int = 0


def check_shared_memory(needs: NodeNeeds) -> Finding:
    return judge_shared_memory(probe_shared_memory(), needs)


def probe_shared_memory(place: str = SHARED_MEMORY) -> SharedMemoryFacts:
    try:
        room = os.statvfs(place)
        kind = file_system_of(place)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return SharedMemoryFacts(problem=error.strerror or str(error))
    return SharedMemoryFacts(
        file_system=kind,
        total_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
    )


def judge_shared_memory(facts: SharedMemoryFacts, needs: NodeNeeds) -> Finding:
    """NCCL and data loaders use what the copies of the state leave."""
    values: dict[str, float] = {"total_bytes": facts.total_bytes, "free_bytes": facts.free_bytes}

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        return Finding("shared-memory", outcome, f"{SHARED_MEMORY}: {summary}", advice, values)

    room = f"{size(facts.free_bytes)} free of {size(facts.total_bytes)}"
    if facts.problem:
        return found(
            Outcome.FAIL, facts.problem, f"mount a tmpfs at {SHARED_MEMORY} that this user may write to"
        )
    if facts.file_system not in MEMORY:
        return found(
            Outcome.FAIL,
            f"a file system of type {facts.file_system}, and not memory",
            f"mount a tmpfs there (mount -t tmpfs -o size=8G tmpfs {SHARED_MEMORY}): NCCL, data loaders and copies in"
            " memory would write to a disk",
        )
    if facts.total_bytes == 0:
        return found(Outcome.OK, f"{facts.file_system} without a limit")
    if facts.free_bytes < LEAST_FREE:
        return found(
            Outcome.FAIL, f"only {room}", f"delete what ended processes have left there, or {MORE_SHARED}"
        )
    if facts.total_bytes <= DOCKERS_DEFAULT:
        return found(
            Outcome.WARN,
            f"{room}, a container's default",
            f"data loaders and NCCL end with 'Bus error' or 'No space left on device': {MORE_SHARED}",
        )
    if needs.copies_bytes > facts.free_bytes:
        return found(
            Outcome.WARN,
            f"{room}, and copies of the state may take {size(needs.copies_bytes)}",
            f"delete what ended processes have left there, lower --memory-checkpoints, or {MORE_SHARED}",
        )
    return found(Outcome.OK, room)


# --- Limits

LEAST_LOCKED = 64 * MIB
"""Less is a default of systemd or Docker, which NCCL's buffers do not fit into."""

PER_WORKER = 64
"""Descriptors that a worker with data loaders has open, about."""
OF_THE_AGENT = 128
CAP_IPC_LOCK = 14
SOMAXCONN = "/proc/sys/net/core/somaxconn"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFacts:
    """Soft and hard limits; None: unlimited."""

    open_files: tuple[int | None, int | None]
    locked_bytes: tuple[int | None, int | None]
    locks_freely: bool = False
    """The limit of locked memory does not bind this user (CAP_IPC_LOCK)."""
    somaxconn: int | None
    """None: the kernel does not show it."""


def check_limits(needs: NodeNeeds) -> tuple[Finding, ...]:
    return judge_limits(probe_limits(), needs)


def probe_limits() -> LimitFacts:
    """Of this process, which has the agent's."""
    try:
        with open(SOMAXCONN) as file:
            somaxconn = int(file.read())
    except (OSError, ValueError):
        somaxconn = None
    return LimitFacts(
        open_files=_limits(resource.RLIMIT_NOFILE),
        locked_bytes=_limits(resource.RLIMIT_MEMLOCK),
        somaxconn=somaxconn,
        locks_freely=_locks_freely(),
    )


def _locks_freely() -> bool:
    """Only in the first user namespace: the kernel asks there whether this user may lock more than the limit."""
    try:
        with open("/proc/self/uid_map") as file:
            first = file.read().split() == ["0", "0", str(2**32 - 1)]
        with open("/proc/self/status") as file:
            effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return first and bool(effective >> CAP_IPC_LOCK & 1)


def _limits(number: int) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(number)
    return _limit(soft), _limit(hard)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY or value < 0 else value


def judge_limits(facts: LimitFacts, needs: NodeNeeds) -> tuple[Finding, ...]:
    return _open_files(facts, needs), _locked(facts, needs), _queue(facts, needs)


def _open_files(facts: LimitFacts, needs: NodeNeeds) -> Finding:
    """A node's processes each have the limit for themselves; the store of the workers has a connection of each rank."""
    soft, hard = facts.open_files
    needed = max(OF_THE_AGENT + needs.ranks, PER_WORKER)
    values = {"soft": -1.0 if soft is None else soft, "needed": needed}
    shown = "no limit" if soft is None else f"{soft} descriptors for each process"
    if soft is None or soft >= needed:
        return Finding("open-files", Outcome.OK, shown, values=values)
    enough = hard is None or hard >= needed
    how = f"ulimit -n {needed} before the agent" if enough else f"LimitNOFILE={needed} or limits.conf"
    advice = f"raise it: {how} (systemd: LimitNOFILE, Docker: --ulimit nofile)"
    return Finding(
        "open-files", Outcome.FAIL, f"{shown}, and {needs.ranks} ranks need {needed}", advice, values
    )


def _locked(facts: LimitFacts, needs: NodeNeeds) -> Finding:
    """InfiniBand registers memory, which locks it."""
    soft, _ = facts.locked_bytes
    values = {"soft_bytes": -1.0 if soft is None else soft}
    shown = "no limit" if soft is None else f"{size(soft)} of locked memory for each process"
    if not needs.rdma:
        return Finding("locked-memory", Outcome.OK, f"{shown}; not needed without RDMA", values=values)
    if facts.locks_freely:
        return Finding("locked-memory", Outcome.OK, f"{shown}, lifted by CAP_IPC_LOCK", values=values)
    if soft is not None and soft < LEAST_LOCKED:
        advice = (
            "NCCL cannot register its buffers for RDMA: set it to unlimited (ulimit -l unlimited; systemd:"
            " LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1, Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
        )
        return Finding("locked-memory", Outcome.FAIL, shown, advice, values)
    return Finding("locked-memory", Outcome.OK, shown, values=values)


def _queue(facts: LimitFacts, needs: NodeNeeds) -> Finding:
    """All ranks connect to one store in one moment."""
    if facts.somaxconn is None:
        return Finding("connection-queue", Outcome.UNKNOWN, "net.core.somaxconn cannot be read here")
    values: dict[str, float] = {"somaxconn": facts.somaxconn}
    shown = f"net.core.somaxconn is {facts.somaxconn}"
    if facts.somaxconn < needs.ranks:
        advice = "connections are dropped, and tried again seconds later: sysctl -w net.core.somaxconn=4096"
        return Finding(
            "connection-queue",
            Outcome.WARN,
            f"{shown}, and {needs.ranks} ranks connect at once",
            advice,
            values,
        )
    return Finding("connection-queue", Outcome.OK, shown, values=values)


# --- Directories

SLOW_FSYNC_S = 0.1
LEAST_BYTES = 16 * MIB
"""Below that not even a small checkpoint, or its manifest, fits."""
FEW_BYTES = GIB
FEW_INODES = 1000
SAMPLE = b"elastic-agent check\n" * 205
"""About a page."""
TRIES = 3
ENOUGH_S = 0.3
"""No further try once they took so long together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """`tried` is the directory itself, or the nearest one above it that exists."""

    tried: str
    exists: bool
    problem: str = ""
    """Why a file cannot be made or written there; empty where it can."""
    file_system: str = ""
    free_bytes: int | None = None
    """For this user; None: the file system does not count them."""
    free_inodes: int | None = None
    """None: the file system does not count them."""
    fsync_s: float | None = None
    """The median of a few; None: nothing was written."""


def check_directory(check: str, directory: str, option: str) -> Finding:
    """Of one that the job names with `option`: is there room, and how fast is what is written durable?"""
    return judge_directory(check, directory, option, probe_directory(directory))


def probe_directory(directory: str) -> DirectoryFacts:
    """Of the directory, or of the nearest one above it that exists. Nothing is made: the file there has no name."""
    given = os.path.abspath(directory)
    tried = given
    while not os.path.lexists(tried):
        tried = os.path.dirname(tried)
    exists = tried == given
    problem, fsync_s = "", None
    try:
        fsync_s = _write(tried)
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        room = os.statvfs(tried)
    except OSError as error:
        return DirectoryFacts(tried=tried, exists=exists, problem=problem or error.strerror or str(error))
    return DirectoryFacts(
        tried=tried,
        exists=exists,
        problem=problem,
        file_system=file_system_of(tried),
        free_bytes=room.f_bavail * room.f_frsize if room.f_blocks else None,
        free_inodes=room.f_favail if room.f_files else None,
        fsync_s=fsync_s,
    )


def _write(directory: str) -> float:
    """The median seconds of fsync, over a few writes. Raises OSError."""
    took: list[float] = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        while len(took) < TRIES and sum(took) < ENOUGH_S:
            file.write(SAMPLE)
            began = time.monotonic()
            os.fsync(file.fileno())
            took.append(time.monotonic() - began)
    return statistics.median(took)


def file_system_of(path: str) -> str:
    """The type of the file system, as the kernel names it; empty where it cannot be found out."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", errors="replace") as mounts:
            for mount in mounts:
                fields, _, more = mount.partition(" - ")
                if fields.split()[2] == number:
                    return more.split()[0]
    except (OSError, IndexError):
        pass
    return ""


def judge_directory(check: str, given: str, option: str, facts: DirectoryFacts) -> Finding:
    """`given` is the directory that the job names, with `option`."""
    kind = f" ({facts.file_system})" if facts.file_system else ""
    where = f"{given}{kind}" if facts.exists else f"{given}, which can be made in {facts.tried}{kind}"
    values: dict[str, float] = {}
    if facts.free_bytes is not None:
        values["free_bytes"] = facts.free_bytes
    if facts.free_inodes is not None:
        values["free_inodes"] = facts.free_inodes
    if facts.fsync_s is not None:
        values["fsync_seconds"] = facts.fsync_s

    other = f"name another directory with {option}"

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        return Finding(check, outcome, summary, advice, values)

    if facts.problem:
        place = given if facts.exists else f"{given} cannot be made in {facts.tried}"
        advice = f"let this user write there, mount what is missing, or {other}"
        return found(Outcome.FAIL, f"{place}: {facts.problem}", advice)
    room = "room not known" if facts.free_bytes is None else f"{size(facts.free_bytes)} free"
    free = f"{where}: {room}"
    if facts.free_inodes == 0:
        return found(Outcome.FAIL, f"{where}: all inodes are taken", f"delete files there, or {other}")
    if facts.free_bytes is not None and facts.free_bytes < LEAST_BYTES:
        return found(Outcome.FAIL, free, f"make room there, or {other}")
    if facts.fsync_s is not None and facts.fsync_s > SLOW_FSYNC_S:
        return found(
            Outcome.WARN,
            f"{where}: fsync takes {span(facts.fsync_s)}",
            "each save waits for it several times: is the disk busy or failing, the file server overloaded? If it is "
            f"as it should be, save less often, or {other}",
        )
    if facts.free_bytes is not None and facts.free_bytes < FEW_BYTES:
        return found(Outcome.WARN, free, f"make room, or {other}")
    if facts.free_inodes is not None and facts.free_inodes < FEW_INODES:
        return found(
            Outcome.WARN, f"{where}: {facts.free_inodes} more files fit", f"delete files there, or {other}"
        )
    return found(
        Outcome.OK, free + (f", fsync in {span(facts.fsync_s)}" if facts.fsync_s is not None else "")
    )


# --- Arithmetic

WRONG_ADVICE = (
    "the device, its driver or the installation of torch is broken: look at dmesg, reset the device or reboot this"
    " machine, and have it replaced"
)
WITHIN_S = 80.0
"""On an overloaded machine most of it goes into the import of torch."""
TIMES = 8
SIZE = 256
SMALL_SIZE = 48
COPIED = 1 << 24
"""Numbers that are copied to each device, of four bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticFacts:
    problem: str = ""
    """Why there is no result; empty where there is one."""
    devices: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    """Devices whose copies or products are wrong."""
    sees_no_gpu: bool = False
    """torch is built for CUDA, and finds no device: broken ones may not be shown at all."""


def check_arithmetic(needs: NodeNeeds) -> Finding:
    return judge_arithmetic(probe_arithmetic(), needs)


def probe_arithmetic() -> ArithmeticFacts:
    """Copies to each device and back, and matrix products there that are compared with the CPU's.

    A process of its own imports torch, with the environment of the workers, so that it sees the devices that they see.
    Without torch only the CPU is tested: its floating-point products must agree with exact ones.
    """
    try:
        done = subprocess.run(
            probe_command(sys.executable, __name__),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        return ArithmeticFacts(problem=f"no result within {WITHIN_S:g} s")
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        return ArithmeticFacts(problem=f"ended with {done.returncode}: {last}"[:1024])
    found = json.loads(done.stdout)
    return ArithmeticFacts(
        devices=tuple(found["devices"]),
        wrong=tuple(found["wrong"]),
        sees_no_gpu=bool(found.get("sees_no_gpu")),
    )


def main() -> None:
    """Runs in the process of its own, and prints the result as JSON."""
    try:
        import torch
    except ImportError:
        print(
            json.dumps(
                {"devices": ["the processor"], "wrong": [] if _fractions_agree() else ["the processor"]}
            )
        )
        return
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    numbers = torch.randint(-4, 5, (SIZE, SIZE), generator=torch.Generator().manual_seed(1))
    expected = (
        numbers @ numbers
    ).float()  # every sum is exact also in single precision, and its factors in TF32
    copied = torch.arange(COPIED, dtype=torch.int32)
    wrong = []
    for device in devices:
        there = numbers.float().to(device)
        agree = all(torch.equal((there @ there).cpu(), expected) for _ in range(TIMES))
        if not agree or not torch.equal(copied.to(device).clone().cpu(), copied):
            wrong.append(device)
    sees_no_gpu = torch.version.cuda is not None and len(devices) == 1
    print(json.dumps({"devices": devices, "wrong": wrong, "sees_no_gpu": sees_no_gpu}))


def _fractions_agree() -> bool:
    rng, places = random.Random(1), range(SMALL_SIZE)
    rows = [[rng.randint(-4, 4) for _ in places] for _ in places]
    return all(
        sum(rows[i][k] * rows[k][j] for k in places) / 8
        == sum(rows[i][k] / 4 * (rows[k][j] / 2) for k in places)
        for i in places
        for j in places
    )


def judge_arithmetic(facts: ArithmeticFacts, needs: NodeNeeds) -> Finding:
    if facts.problem:
        return Finding("arithmetic", Outcome.FAIL, facts.problem, WRONG_ADVICE)
    if facts.sees_no_gpu and needs.gpus:
        return Finding(
            "arithmetic", Outcome.FAIL, f"torch finds none of the {len(needs.gpus)} GPUs", WRONG_ADVICE
        )
    if facts.wrong:
        wrong = ", ".join(facts.wrong)
        return Finding(
            "arithmetic", Outcome.FAIL, f"{wrong}: copies or matrix products come back wrong", WRONG_ADVICE
        )
    return Finding(
        "arithmetic", Outcome.OK, f"copies and matrix products agree on {', '.join(facts.devices)}"
    )
