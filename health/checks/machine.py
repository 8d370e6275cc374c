"""What this machine gives to a job: memory, limits, directories, a network; and whether its devices compute right."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time

from .finding import GIB, MIB, Finding, NodeNeeds, Outcome, listed, probe_command, size

# --- Shared memory

SHARED_MEMORY = "/dev/shm"
DOCKERS_DEFAULT = 64 * MIB
LEAST_FREE = 16 * MIB
"""In shared memory, and on the disk of the logs."""
MORE_SHARED = (
    "make it larger (Docker: --shm-size, the chart: sharedMemory, else mount -o remount,size=8G /dev/shm)"
)


def check_shared_memory(needs: NodeNeeds, place: str = SHARED_MEMORY) -> Finding:
    """NCCL and data loaders use what the copies of the state leave."""

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        return Finding("shared-memory", outcome, f"{place}: {summary}", advice)

    try:
        room = os.statvfs(place)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        advice = f"mount a tmpfs at {place} that this user may write to"
        return found(Outcome.FAIL, error.strerror or str(error), advice)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    shown = f"{size(free)} free of {size(total)}"
    if total == 0:
        return found(Outcome.OK, "without a limit")
    if free < LEAST_FREE:
        advice = f"delete what ended processes have left there, or {MORE_SHARED}"
        return found(Outcome.FAIL, f"only {shown}", advice)
    if total <= DOCKERS_DEFAULT:
        advice = f"data loaders and NCCL end with 'Bus error' or 'No space left on device': {MORE_SHARED}"
        return found(Outcome.WARN, f"{shown}, a container's default", advice)
    if needs.copies_bytes > free:
        summary = f"{shown}, and copies of the state may take {size(needs.copies_bytes)}"
        advice = f"delete what ended processes have left there, lower --memory-checkpoints, or {MORE_SHARED}"
        return found(Outcome.WARN, summary, advice)
    return found(Outcome.OK, shown)


# --- Limits

LEAST_LOCKED = 64 * MIB
"""Less is a default of systemd or Docker, which NCCL's buffers do not fit into."""

OF_THE_AGENT = 128
"""Descriptors, besides one for each rank: the workers' store has a connection of each."""
CAP_IPC_LOCK = 14


def check_open_files(needs: NodeNeeds) -> Finding:
    """Of this process, which has the agent's limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = OF_THE_AGENT + needs.ranks
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding("open-files", Outcome.OK, f"{soft} descriptors for each process")
    summary = f"{soft} descriptors for each process, and {needs.ranks} ranks need {needed}"
    advice = f"raise it: ulimit -n {needed} before the agent, systemd: LimitNOFILE={needed}, Docker: --ulimit nofile"
    return Finding("open-files", Outcome.FAIL, summary, advice)


def check_locked_memory(needs: NodeNeeds) -> Finding:
    """InfiniBand registers memory, which locks it."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY or soft >= LEAST_LOCKED or locks_freely():
        return Finding("locked-memory", Outcome.OK, "enough memory may be locked")
    advice = (
        "NCCL cannot register its buffers for RDMA: set it to unlimited (ulimit -l unlimited; systemd:"
        " LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1, Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
    )
    return Finding("locked-memory", Outcome.FAIL, f"{size(soft)} for each process", advice)


def locks_freely() -> bool:
    """Whether CAP_IPC_LOCK lifts the limit. In a user namespace it does not, which is not seen here."""
    with open("/proc/self/status") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return bool(effective >> CAP_IPC_LOCK & 1)


# --- The directory of the logs


def check_log_directory(needs: NodeNeeds) -> Finding:
    """Of it, or of the nearest one above it that exists. Nothing is made: the file there has no name."""
    given = tried = os.path.abspath(needs.log_directory)
    while not os.path.lexists(tried):
        tried = os.path.dirname(tried)
    try:
        room = os.statvfs(tried)
        with tempfile.TemporaryFile(dir=tried, buffering=0) as file:
            file.write(b"elastic-agent check\n")
            os.fsync(file.fileno())
    except OSError as error:
        advice = "let this user write there, mount what is missing, make room, or choose another --log-dir"
        return Finding("log-directory", Outcome.FAIL, f"{tried}: {error.strerror or error}", advice)
    # Object stores, and a tmpfs without a limit, count no blocks.
    free = room.f_bavail * room.f_frsize if room.f_blocks else GIB
    outcome = Outcome.FAIL if free < LEAST_FREE else Outcome.WARN if free < GIB else Outcome.OK
    advice = "make room there, or choose another --log-dir" if free < GIB else ""
    return Finding("log-directory", outcome, f"{given}: {size(free)} free", advice)


# --- Arithmetic

WRONG_ADVICE = (
    "the device, its driver or the installation of torch is broken: look at dmesg, reset the device or reboot this"
    " machine, and have it replaced"
)
WITHIN_S = 80.0
"""On an overloaded machine most of it goes into the import of torch."""
TIMES = 8
SIZE = 256
COPIED = 1 << 24
"""Numbers that are copied to each device, of four bytes each."""


def check_arithmetic(needs: NodeNeeds) -> Finding:
    """Copies to each device and back, and matrix products there that are compared with the CPU's.

    A process of its own imports torch, with the environment of the workers, so that it sees the devices that they see.
    """

    def found(outcome: Outcome, summary: str) -> Finding:
        return Finding("arithmetic", outcome, summary, WRONG_ADVICE if outcome is Outcome.FAIL else "")

    command = probe_command(sys.executable, __name__)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return found(Outcome.FAIL, f"no result within {WITHIN_S:g} s")
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        return found(Outcome.FAIL, f"ended with {done.returncode}: {last}"[:1024])
    answer = json.loads(done.stdout)
    if not answer["devices"]:
        return found(Outcome.UNKNOWN, "torch cannot be imported")
    if answer["sees_no_gpu"] and needs.gpus:
        return found(Outcome.FAIL, f"torch finds none of the {len(needs.gpus)} GPUs")
    if answer["wrong"]:
        wrong = ", ".join(answer["wrong"])
        return found(Outcome.FAIL, f"{wrong}: copies or matrix products come back wrong")
    return found(Outcome.OK, f"copies and matrix products agree on {', '.join(answer['devices'])}")


def main() -> None:
    """Runs in the process of its own, and prints the result as JSON."""
    try:
        import torch
    except ImportError:
        print(json.dumps({"devices": []}))
        return
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    numbers = torch.randint(-4, 5, (SIZE, SIZE), generator=torch.Generator().manual_seed(1))
    # Every sum is exact also in single precision, and its factors in TF32.
    expected = (numbers @ numbers).float()
    copied = torch.arange(COPIED, dtype=torch.int32)
    wrong = []
    for device in devices:
        there = numbers.float().to(device)
        agree = all(torch.equal((there @ there).cpu(), expected) for _ in range(TIMES))
        if not agree or not torch.equal(copied.to(device).clone().cpu(), copied):
            wrong.append(device)
    sees_no_gpu = torch.version.cuda is not None and len(devices) == 1
    print(json.dumps({"devices": devices, "wrong": wrong, "sees_no_gpu": sees_no_gpu}))


# --- Names

SLOW_NAMES_S = 1.0
SLOW_NAMES_ADVICE = (
    "torch looks up each peer's name, and the start of a generation waits: correct the name servers in"
    " /etc/resolv.conf, or write the nodes into /etc/hosts"
)


def check_names(needs: NodeNeeds) -> Finding:
    """MPI, and gloo without an interface, resolve the host's name; torch's store looks peers' addresses up."""
    host, problem, began = socket.gethostname(), "", time.monotonic()
    addresses: list[str] = []
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(place[4][0]) for place in resolved))
    except OSError as error:
        problem = error.strerror or str(error)
    address = needs.address or host
    try:
        socket.getnameinfo((address, 0), socket.NI_NAMEREQD)
    except OSError:
        pass  # it has no name, and needs none
    took_s = time.monotonic() - began
    if took_s > SLOW_NAMES_S:
        summary = f"looking up {host} and {address} took {took_s:.1f} s"
        return Finding("name-resolution", Outcome.WARN, summary, SLOW_NAMES_ADVICE)
    if problem:
        summary = f"the host's own name {host} does not resolve ({problem})"
        advice = "programs that look it up fail: write it into /etc/hosts"
        return Finding("name-resolution", Outcome.WARN, summary, advice)
    return Finding("name-resolution", Outcome.OK, f"{host} is {listed(addresses)}")
