"""What this machine gives to a job: memory, limits, directories, a network; and whether its devices compute right."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from .finding import GIB, MIB, Finding, NodeNeeds, Outcome, listed, size, span
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


def check_shared_memory(needs: NodeNeeds, place: str = SHARED_MEMORY) -> Finding:
    """NCCL and data loaders use what the copies of the state leave."""
    values: dict[str, float] = {}

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        return Finding("shared-memory", outcome, f"{place}: {summary}", advice, values)

    try:
        room = os.statvfs(place)
        kind = file_system_of(place)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        advice = f"mount a tmpfs at {place} that this user may write to"
        return found(Outcome.FAIL, error.strerror or str(error), advice)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    values.update(total_bytes=total, free_bytes=free)
    shown = f"{size(free)} free of {size(total)}"
    if kind not in MEMORY:
        return found(
            Outcome.FAIL,
            f"a file system of type {kind}, and not memory",
            f"mount a tmpfs there (mount -t tmpfs -o size=8G tmpfs {place}): NCCL, data loaders and copies in"
            " memory would write to a disk",
        )
    if total == 0:
        return found(Outcome.OK, f"{kind} without a limit")
    if free < LEAST_FREE:
        advice = f"delete what ended processes have left there, or {MORE_SHARED}"
        return found(Outcome.FAIL, f"only {shown}", advice)
    if total <= DOCKERS_DEFAULT:
        return found(
            Outcome.WARN,
            f"{shown}, a container's default",
            f"data loaders and NCCL end with 'Bus error' or 'No space left on device': {MORE_SHARED}",
        )
    if needs.copies_bytes > free:
        return found(
            Outcome.WARN,
            f"{shown}, and copies of the state may take {size(needs.copies_bytes)}",
            f"delete what ended processes have left there, lower --memory-checkpoints, or {MORE_SHARED}",
        )
    return found(Outcome.OK, shown)


# --- Limits

LEAST_LOCKED = 64 * MIB
"""Less is a default of systemd or Docker, which NCCL's buffers do not fit into."""

PER_WORKER = 64
"""Descriptors that a worker with data loaders has open, about."""
OF_THE_AGENT = 128
CAP_IPC_LOCK = 14


def check_limits(needs: NodeNeeds) -> tuple[Finding, ...]:
    """Of this process, which has the agent's."""
    return _open_files(needs), _locked(needs)


def _open_files(needs: NodeNeeds) -> Finding:
    """A node's processes each have the limit for themselves; the store of the workers has a connection of each rank."""
    soft, hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
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


def _locked(needs: NodeNeeds) -> Finding:
    """InfiniBand registers memory, which locks it."""
    soft = _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    values = {"soft_bytes": -1.0 if soft is None else soft}
    shown = "no limit" if soft is None else f"{size(soft)} of locked memory for each process"
    if not needs.rdma:
        return Finding("locked-memory", Outcome.OK, f"{shown}; not needed without RDMA", values=values)
    if locks_freely():
        return Finding("locked-memory", Outcome.OK, f"{shown}, lifted by CAP_IPC_LOCK", values=values)
    if soft is not None and soft < LEAST_LOCKED:
        advice = (
            "NCCL cannot register its buffers for RDMA: set it to unlimited (ulimit -l unlimited; systemd:"
            " LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1, Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
        )
        return Finding("locked-memory", Outcome.FAIL, shown, advice, values)
    return Finding("locked-memory", Outcome.OK, shown, values=values)


def locks_freely() -> bool:
    """Only in the first user namespace: the kernel asks there whether this user may lock more than the limit."""
    try:
        with open("/proc/self/uid_map") as file:
            first = file.read().split() == ["0", "0", str(2**32 - 1)]
        with open("/proc/self/status") as file:
            effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return first and bool(effective >> CAP_IPC_LOCK & 1)


def _limit(value: int) -> int | None:
    """None: unlimited."""
    return None if value == resource.RLIM_INFINITY or value < 0 else value


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


def check_directory(check: str, given: str, option: str) -> Finding:
    """Of one that the job names with `option`: is there room, and how fast is what is written durable?

    Of the directory, or of the nearest one above it that exists. Nothing is made: the file there has no name.
    """
    tried = path = os.path.abspath(given)
    while not os.path.lexists(tried):
        tried = os.path.dirname(tried)
    exists = tried == path
    values: dict[str, float] = {}
    other = f"name another directory with {option}"

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        return Finding(check, outcome, summary, advice, values)

    try:
        room = os.statvfs(tried)
        fsync_s = _write(tried)
        kind = file_system_of(tried)
    except OSError as error:
        place = given if exists else f"{given} cannot be made in {tried}"
        advice = f"let this user write there, mount what is missing, or {other}"
        return found(Outcome.FAIL, f"{place}: {error.strerror or error}", advice)
    # Object stores, and a tmpfs without a limit, count no blocks; some file systems count no inodes.
    free = room.f_bavail * room.f_frsize if room.f_blocks else None
    inodes = room.f_favail if room.f_files else None
    known = {"free_bytes": free, "free_inodes": inodes, "fsync_seconds": fsync_s}
    values.update({name: float(value) for name, value in known.items() if value is not None})
    where = given if exists else f"{given}, which can be made in {tried}"
    where += f" ({kind})" if kind else ""
    shown = f"{where}: " + ("room not known" if free is None else f"{size(free)} free")
    if inodes == 0:
        return found(Outcome.FAIL, f"{where}: all inodes are taken", f"delete files there, or {other}")
    if free is not None and free < LEAST_BYTES:
        return found(Outcome.FAIL, shown, f"make room there, or {other}")
    if fsync_s > SLOW_FSYNC_S:
        return found(
            Outcome.WARN,
            f"{where}: fsync takes {span(fsync_s)}",
            "each save waits for it several times: is the disk busy or failing, the file server overloaded? If it is "
            f"as it should be, save less often, or {other}",
        )
    if free is not None and free < FEW_BYTES:
        return found(Outcome.WARN, shown, f"make room, or {other}")
    if inodes is not None and inodes < FEW_INODES:
        return found(Outcome.WARN, f"{where}: {inodes} more files fit", f"delete files there, or {other}")
    return found(Outcome.OK, f"{shown}, fsync in {span(fsync_s)}")


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

    try:
        done = subprocess.run(
            probe_command(sys.executable, __name__),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
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
SILENT_ADVICE = "look at this machine's network and at what stands between it and the other nodes"
SLOW_LINK_MBPS = 1000
MOST_ADDRESSES = 16
PEER_S = 2.0


def check_names(needs: NodeNeeds) -> Finding:
    """MPI, and gloo without an interface, resolve the host's name; torch's store looks peers' addresses up."""
    host, problem = socket.gethostname(), ""
    addresses: list[str] = []
    began = time.monotonic()
    try:
        found_here = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(place[4][0]) for place in found_here))[:MOST_ADDRESSES]
    except OSError as error:
        problem = error.strerror or str(error)
    forward_s = time.monotonic() - began
    address = needs.address or (addresses[0] if addresses else "")
    began = time.monotonic()
    try:
        back = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0] if address else ""
    except OSError:
        back = ""
    back_s = time.monotonic() - began

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        values = {"forward_seconds": forward_s, "back_seconds": back_s}
        return Finding("name-resolution", outcome, summary, advice, values)

    if addresses and not any(map(_is_own, addresses)):
        return found(
            Outcome.WARN,
            f"{host} is {listed(addresses)}, which is no address of this machine",
            "others that look for this node come to another: correct DNS or /etc/hosts",
        )
    if max(forward_s, back_s) > SLOW_NAMES_S:
        slow, took_s = (host, forward_s) if forward_s >= back_s else (address, back_s)
        return found(Outcome.WARN, f"looking up {slow} took {span(took_s)}", SLOW_NAMES_ADVICE)
    if not addresses:
        return found(
            Outcome.WARN,
            f"the host's own name {host} does not resolve ({problem})",
            "programs that look it up fail: write it into /etc/hosts",
        )
    return found(
        Outcome.OK, f"{host} is {listed(addresses)}; {address} " + (f"is {back}" if back else "has no name")
    )


def _is_own(address: str) -> bool:
    """Whether a socket can be bound there."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(place)
    except OSError:
        return False
    return True


# --- The interface


def check_interface(needs: NodeNeeds, sys: str = "/sys") -> Finding:
    """A loopback, a tunnel and many virtual ones are in the state `unknown`, and work."""
    name = needs.interface
    folder = os.path.join(sys, "class/net", name)
    # /sys may be missing, or be that of another network namespace.
    if not os.path.isdir(folder) and name not in (known for _, known in socket.if_nameindex()):
        advice = "choose one of `ip link` with --network-interface"
        return Finding("interface", Outcome.FAIL, f"there is no interface {name}", advice)
    state = _read(os.path.join(folder, "operstate")) or "unknown"
    speed_mbps, mtu = _number(os.path.join(folder, "speed")), _number(os.path.join(folder, "mtu"))
    if speed_mbps in (0, 2**32 - 1):
        speed_mbps = None
    known_here = {"speed_mbps": speed_mbps, "mtu": mtu}
    values = {what: float(value) for what, value in known_here.items() if value is not None}
    if state not in ("up", "unknown"):
        advice = f"check cable and switch port, or `ip link set {name} up`; or choose another with --network-interface"
        return Finding("interface", Outcome.FAIL, f"{name} is {state}", advice, values)
    speed = "speed unknown" if speed_mbps is None else f"{speed_mbps} Mbit/s"
    shown = f"{name} is {'up' if state == 'up' else 'there'}, {speed}"
    if speed_mbps is not None and speed_mbps < SLOW_LINK_MBPS:
        advice = "the slowest link sets the pace of all: check cable and switch port (ethtool), or choose another with"
        return Finding("interface", Outcome.WARN, shown, f"{advice} --network-interface", values)
    return Finding("interface", Outcome.OK, shown, values=values)


def _read(path: str) -> str:
    """Empty where the kernel does not say."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


# --- Other nodes' agents


def check_peers(needs: NodeNeeds) -> Finding:
    """Whether they answer over HTTP, as they do among themselves. Most have to: a single silent one may itself be
    gone."""
    asked, silent = len(needs.peers), [peer for peer in needs.peers if not answers(peer)]
    if not silent:
        return Finding("peers", Outcome.OK, f"{asked} other nodes answer over HTTP")
    outcome = Outcome.FAIL if 2 * len(silent) > asked else Outcome.WARN
    return Finding("peers", outcome, f"no answer over HTTP from {', '.join(silent)}", SILENT_ADVICE)


def answers(peer: str) -> bool:
    """HOST:PORT, with an IPv6 address in brackets."""
    connection = http.client.HTTPConnection(peer, timeout=PEER_S)
    try:
        connection.request("GET", "/node")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
