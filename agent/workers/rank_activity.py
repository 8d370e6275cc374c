"""What one worker does: the facts, seen from outside, the state that follows from them, and both in words.

Of /proc only small files are read, none of which waits for the process. `maps`, `smaps`, `cmdline` and `environ` would
wait for a process that holds its memory's lock in the kernel, and the last two may have secrets: none of them is read.
What the kernel shows is read before a signal is sent, for the signal itself may wake what it asks.

By that signal workers are asked where their Python threads stand (`register_stacks`), all at the same time; each
writes it to a file of its own. There is no mark at the end of what one writes: it is over when nothing more comes. A
process that is stopped, or in uninterruptible sleep, would answer when it goes on: it is not asked. All texts come from
processes that are not trusted, and are cleaned and bounded where they are made.

    its process has ended                                                   gone
    it is stopped, or its cgroup is frozen                                  stopped
    its main thread waits in the kernel and cannot be interrupted           uninterruptible
    it stands in a function that saves                                      in a save
    it stands in a function of torch that waits for other ranks             in a collective
    else: its main thread uses a processor                                  works; with a GPU open: not known
    else                                                                    waits

Of a stack the innermost part that belongs to torch names what a wait is for. Without stacks, as of a worker that did
not start from a spare, the kernel's signs are all: one that waits for another thread, in a process with threads of a
library of collectives, is taken to be in a collective, but not in which.
"""

from __future__ import annotations

import linecache
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...health.hang_report import MAX_WHERE, InGroup, RankActivity, RankReport, Recorded
from ...rendezvous.text import clean
from ...worker.wire.shared_progress import STACKS_DESCRIPTOR, STACKS_SIGNAL
from .processes.proc import MemoryFile, read, stat_of, status_field

BUSY_SHARE = 0.3
"""Of one processor."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python. `source`: the text of that line, where the file can be read."""

    file: str
    line: int
    function: str
    source: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """For people, the same on all nodes that keep the script elsewhere."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Of one thread that runs Python; the innermost frame first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class ThreadFacts:
    """One thread, as the kernel shows it."""

    tid: int
    name: str
    state: str
    """A letter, as in proc(5)."""
    waits_for: str = ""
    """For people, by its system call; empty: it runs, or that is not shown."""
    channel: str = ""
    """The kernel's function where it waits."""


@dataclass(frozen=True, slots=True)
class Target:
    """One worker to look at, and what is known of it without that."""

    rank: int
    local_rank: int
    pid: int
    stacks: StackFile | None = None
    step: int | None = None
    still_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a look at one worker has shown."""

    target: Target
    threads: tuple[ThreadFacts, ...]
    """The first is the main one; empty: the process has ended, or was ending."""
    stacks: tuple[ThreadStack, ...] = ()
    """The last is the main thread's. Empty: not known."""
    why_no_stacks: str = ""
    window_s: float = 0.0
    """Over which processor time was measured."""
    main_cpu_s: float = 0.0
    """Of the main thread, meanwhile."""
    devices: bool = False
    """It has a GPU's device file open."""
    recorded: Recorded | None = None
    """By torch's flight recorder."""

    @property
    def main(self) -> ThreadFacts | None:
        return self.threads[0] if self.threads else None

    @property
    def runs(self) -> bool:
        """Its main thread uses a processor, and does not only look now and then whether there is something to do."""
        running = self.main is not None and self.main.state == "R"
        return running or self.main_cpu_s > BUSY_SHARE * self.window_s > 0


LOCK = "a lock or another thread"
TIME = "time to pass"
BYTES = "bytes"
CHILD = "the end of a child"
ANY = "one of several descriptors"

_CALLS = (
    (LOCK, (202, 73), (98, 32)),
    (TIME, (35, 230, 34, 128), (101, 115, 137)),
    (BYTES, (0, 19, 45, 47, 43, 288), (63, 65, 207, 212, 202, 242)),
    (ANY, (7, 271, 23, 270, 232, 281), (73, 72, 22)),
    (CHILD, (61, 247), (260, 95)),
)
"""What is waited for in futex and flock; nanosleep, clock_nanosleep, pause and sigtimedwait; read, readv, recvfrom,
recvmsg, accept and accept4; poll, ppoll, select, pselect6, epoll_wait and epoll_pwait; wait4 and waitid: by the numbers
of x86_64 and of aarch64."""
_COLUMN = {"x86_64": 1, "aarch64": 2}.get(platform.machine())
_WAITS = {number: row[0] for row in _CALLS for number in row[_COLUMN]} if _COLUMN is not None else {}

MOST_THREADS = 256
"""Of one process."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main_cpu_s(pid: int) -> float:
    """What its main thread has used so far."""
    stat = stat_of(f"/proc/{pid}/task/{pid}")
    return stat.own_ticks * _TICK_S if stat is not None else 0.0


def threads_of(pid: int) -> tuple[ThreadFacts, ...]:
    """The main one first."""
    folder = f"/proc/{pid}/task"
    tids = sorted(map(int, _names(folder)), key=lambda tid: (tid != pid, tid))[:MOST_THREADS]
    return tuple(facts for tid in tids if (facts := _thread(f"{folder}/{tid}")) is not None)


def has_gpu(pid: int) -> bool:
    for name in _names(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(_DEVICES):
                return True
        except OSError:
            continue
    return False


def _thread(folder: str) -> ThreadFacts | None:
    stat = stat_of(folder)
    if stat is None:
        return None
    channel = read(f"{folder}/wchan")
    number = read(f"{folder}/syscall").partition(" ")[0]
    waits_for = _WAITS.get(int(number), f"system call {number}") if number.isdigit() else ""
    return ThreadFacts(
        int(stat.pid),
        clean(stat.name),
        stat.state,
        "" if stat.state == "R" else waits_for,
        "" if channel == "0" else clean(channel),
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


# --- Python stacks

PAUSE_S = 0.02
"""When all have written, and nothing more comes for so long, that was all."""
ANSWER_S = 0.5
"""A process that has not written after so long does not: its main thread blocks the signal, maybe."""

MOST_BYTES = 256 * 1024
"""Of one process' stacks."""
MOST_FRAMES = 64
"""Of one thread: the innermost ones."""
_MOST_TEXT = 256

_ANSWERS = ("R", "S", "I")
_THREAD = re.compile(
    r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.{0,64})\])?.{0,8} \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)')


class StackFile(MemoryFile):
    """Where one worker writes its stacks. Raises OSError."""

    def __init__(self) -> None:
        super().__init__("stacks")
        # Not os.getpid(): a container may see the /proc of another pid namespace.
        self.path = f"/proc/{os.readlink('/proc/self')}/fd/{self.fd}"

    def clear(self) -> None:
        os.ftruncate(self.fd, 0)

    def is_open_in(self, pid: int) -> bool:
        try:
            return os.path.samestat(os.stat(f"/proc/{pid}/fd/{STACKS_DESCRIPTOR}"), os.fstat(self.fd))
        except OSError:
            return False


def why_not(pid: int, file: StackFile | None) -> str:
    """Why this process must not be asked; empty if it may."""
    seen = stat_of(f"/proc/{pid}")
    if seen is None or seen.state in ("Z", "X"):
        return "it has ended"
    if seen.state not in _ANSWERS:
        return f"its state is {seen.state}: it cannot answer"
    if file is None or not _catches(pid) or not file.is_open_in(pid):
        return "it was not started from a spare, or has let go of the signal"
    return ""


def _catches(pid: int) -> bool:
    return bool(int(status_field(f"/proc/{pid}", "SigCgt") or "0", 16) >> (STACKS_SIGNAL - 1) & 1)


def ask(
    targets: Sequence[Target], clock: Callable[[], float], sleep: Callable[[float], None]
) -> dict[int, tuple[str, str]]:
    """By pid: the stacks of each of these processes, or empty, and why there are none."""
    refused = {one.pid: _ask(one) for one in targets}
    files = {one.pid: one.stacks for one in targets if one.stacks is not None and not refused[one.pid]}
    until, before = clock() + ANSWER_S, list[int]()
    while files and clock() < until:
        sizes = [file.size for file in files.values()]
        if sizes == before and all(sizes):
            break
        before = sizes
        sleep(PAUSE_S)
    texts = {pid: file.read(MOST_BYTES) for pid, file in files.items()}
    silent = {pid: "it has not answered: it may block the signal" for pid, text in texts.items() if not text}
    return {pid: (texts.get(pid, ""), why or silent.get(pid, "")) for pid, why in refused.items()}


def _ask(target: Target) -> str:
    """Why this process is not asked; empty if it is."""
    why = why_not(target.pid, target.stacks)
    if why or target.stacks is None:
        return why
    try:
        target.stacks.clear()
        os.kill(target.pid, STACKS_SIGNAL)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def parse(text: str, source: Callable[[str, int], str] = lambda file, line: "") -> tuple[ThreadStack, ...]:
    """What faulthandler writes; the main thread is the last. `source` gives the text of the line where that stands."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if found := _THREAD.fullmatch(line):
            threads.append((clean(found[3] or found[2]), []))
        elif (found := _FRAME.fullmatch(line)) and threads:
            frames = threads[-1][1]
            if len(frames) < MOST_FRAMES:
                number = int(found[2]) if found[2].isdigit() else 0
                frames.append(Frame(clean(found[1])[:_MOST_TEXT], number, clean(found[3])[:_MOST_TEXT]))
    if threads and threads[-1][1]:
        frames = threads[-1][1]
        frames[0] = replace(frames[0], source=source(frames[0].file, frames[0].line))
    return tuple(ThreadStack(name, tuple(frames)) for name, frames in threads)


# --- A look

WINDOW_S = 0.5
"""Over which processor time is measured."""
_MOST_LINE = 200


def look_at(
    targets: Sequence[Target], clock: Callable[[], float], sleep: Callable[[float], None]
) -> tuple[WorkerFacts, ...]:
    """At all of them, for WINDOW_S and ANSWER_S at most. Never raises for what it may find. For any thread."""
    began_at = clock()
    before = {one.pid: main_cpu_s(one.pid) for one in targets}
    sleep(WINDOW_S)
    window_s = clock() - began_at
    spent = {one.pid: main_cpu_s(one.pid) - before[one.pid] for one in targets}
    threads = {one.pid: threads_of(one.pid) for one in targets}
    answers = ask(targets, clock, sleep)
    return tuple(
        WorkerFacts(
            one,
            threads[one.pid],
            parse(answers[one.pid][0], _source),
            answers[one.pid][1],
            window_s,
            spent[one.pid],
            has_gpu(one.pid),
        )
        for one in targets
    )


def _source(file: str, line: int) -> str:
    return clean(linecache.getline(file, line).strip())[:_MOST_LINE]


# --- What follows from the facts

_GONE = ("Z", "X")
_FROZEN = ("freez", "refrigerator")

_DISTRIBUTED = "/torch/distributed/"
_DDP = "/torch/nn/parallel/distributed.py"
_BACKWARD = "/torch/autograd/graph.py"
_SAVES = (
    "/torch/serialization.py",
    "/torch/distributed/checkpoint/",
    "/elastic_agent/worker/checkpointing/",
    "/elastic_agent/worker/storage/",
    "/elastic_agent/worker/dcp/",
)
_NO_COLLECTIVES = (
    "/torch/distributed/checkpoint/",
    "/torch/distributed/elastic/",
    "/torch/distributed/launcher/",
)
_OWN_WAITS = ("/elastic_agent/worker/steps/torch_workarounds.py", "waits")
"""Stands around `Work.wait` and the broadcast of DDP's buffers, where the worker calls `step()`."""
_COLLECTIVE_THREADS = ("gloo", "pt_gloo", "pt_nccl", "nccl", "pt_mpi", "pt_ucc", "pt_xccl", "pt_hccl")
"""How the names of threads begin that the libraries of collectives start."""
_WRAPPERS = ("wrapper", "_fn", "inner", "decorate_context", "__call__", "_call_impl", "_wrapped_call_impl")
_WAITS_OF_WORK = (".wait(", ".synchronize(", ".result(")
_LIBRARY = (
    *("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "<frozen ", "<string>"),
    *("/torch/distributed/", "/torch/nn/", "/torch/autograd/", "/torch/utils/", "/torch/optim/"),
    *("/elastic_agent/worker/", "/elastic_agent/agent/"),
)
"""Whose frames are no places of the script's; torch and this package may be installed from a folder of sources."""


def rank_state(facts: WorkerFacts) -> RankReport:
    """What this worker does."""
    doing, where, collective = _judge(facts)
    one = facts.target
    return RankReport(
        one.rank, doing, one.step, one.still_s, collective[:64], where[:MAX_WHERE], facts.recorded
    )


_Judged = tuple[RankActivity, str, str]


def _judge(facts: WorkerFacts) -> _Judged:
    main = facts.main
    if main is None or all(one.state in _GONE for one in facts.threads):
        return RankActivity.GONE, "its process has ended", ""
    if main.state == "T" or any(
        part in main.channel for part in _FROZEN
    ):  # a debugger's stop is "t", and ends
        return RankActivity.STOPPED, _kernel_words(main), ""
    if main.state == "D":
        return RankActivity.UNINTERRUPTIBLE, _kernel_words(main), ""
    frames = facts.stacks[-1].frames if facts.stacks else ()
    return _with_stacks(facts, main, frames) if frames else _without_stacks(facts, main)


def _without_stacks(facts: WorkerFacts, main: ThreadFacts) -> _Judged:
    words = _kernel_words(main)
    if facts.runs:
        return _at_work(facts), words, ""
    if main.waits_for == LOCK and any(one.name.startswith(_COLLECTIVE_THREADS) for one in facts.threads):
        return RankActivity.IN_COLLECTIVE, words, ""
    return RankActivity.WAITS if main.waits_for in (TIME, BYTES, CHILD) else RankActivity.OTHER, words, ""


def _with_stacks(facts: WorkerFacts, main: ThreadFacts, frames: Sequence[Frame]) -> _Judged:
    place = _own(frames).place
    where = f"{place}, waits for {main.waits_for}" if main.waits_for else place
    for at, frame in enumerate(frames):
        if _is_in(frame, _SAVES):
            return RankActivity.IN_SAVE, where, ""
        if _is_collective(frame) or _BACKWARD in frame.file:
            if not all(map(_is_plumbing, frames[:at])):
                break  # a module's forward inside DDP's, a backward of the script's own
            if facts.runs and not (facts.devices and _is_collective(frame)):
                break  # a GPU's library may use a processor only to wait
            name = _name(frames[at:]) if _is_collective(frame) else "backward"
            return RankActivity.IN_COLLECTIVE, place, name
    if facts.runs:
        return _at_work(facts), where, ""
    if main.waits_for == LOCK and any(word in frames[0].source for word in _WAITS_OF_WORK):
        return RankActivity.IN_COLLECTIVE, place, "wait"
    # It may wait for a thread of its own, which waits for a disk.
    stuck = next((one for one in facts.threads if one.state == "D"), None)
    return (
        (RankActivity.WAITS, where, "")
        if stuck is None
        else (RankActivity.UNINTERRUPTIBLE, _kernel_words(stuck), "")
    )


def _at_work(facts: WorkerFacts) -> RankActivity:
    """It computes; or, with a GPU, it may do so only to wait for that."""
    return RankActivity.OTHER if facts.devices else RankActivity.WORKS


def _is_in(frame: Frame, parts: Iterable[str]) -> bool:
    return any(part in frame.file for part in parts)


def _is_collective(frame: Frame) -> bool:
    of_torch = _DISTRIBUTED in frame.file and not _is_in(frame, _NO_COLLECTIVES)
    return (of_torch and frame.function not in _WRAPPERS) or _DDP in frame.file or _is_own_wait(frame)


def _is_plumbing(frame: Frame) -> bool:
    """No code of the script's or of a module's that a function of torch has called."""
    return _is_collective(frame) or (frame.function in _WRAPPERS and _is_in(frame, _LIBRARY))


def _is_own_wait(frame: Frame) -> bool:
    return frame.function == _OWN_WAITS[1] and _OWN_WAITS[0] in frame.file


def _name(frames: Sequence[Frame]) -> str:
    """Of what the script has called: the outermost of the frames of torch that follow each other here."""
    name = "wait" if _is_own_wait(frames[0]) else frames[0].function
    for frame in frames[1:]:
        if frame.function in _WRAPPERS:
            continue
        if not _is_collective(frame):
            break
        name = frame.function
    return name


def _own(frames: Sequence[Frame]) -> Frame:
    """The innermost frame of the user's own code."""
    return next((frame for frame in frames if not _is_in(frame, _LIBRARY)), frames[0])


def _kernel_words(thread: ThreadFacts) -> str:
    waits = f", waits for {thread.waits_for}" if thread.waits_for else ""
    channel = f", in the kernel's {thread.channel}" if thread.channel else ""
    return f"thread {thread.tid} ({thread.name}) is in state {thread.state}{waits}{channel}"


# --- A text without source lines, command lines or variables: these may have secrets

MOST_CHARS = 256 * 1024
"""Of one worker's."""


def one_line(state: RankReport) -> str:
    """
    >>> one_line(RankReport(3, RankActivity.WAITS, 7, where="train.py:9 in step"))
    'rank 3: waits, train.py:9 in step, step 7'
    """
    parts = [
        f"rank {state.rank}: {state.doing.value}",
        state.collective,
        state.where,
        f"step {state.step}" if state.step is not None else "",
        f"still for {state.still_s:.0f} s" if state.still_s is not None else "",
    ]
    return ", ".join(filter(None, parts))


def report(facts: WorkerFacts, state: RankReport, node: str, generation: int) -> str:
    return "\n".join(_lines(facts, state, node, generation))[:MOST_CHARS] + "\n"


def _lines(facts: WorkerFacts, state: RankReport, node: str, generation: int) -> Iterator[str]:
    used = f"main thread: {facts.main_cpu_s:.2f} s in {facts.window_s:.2f} s"
    gpu = ", has a GPU open" if facts.devices else ""
    yield one_line(state)
    yield f"local rank {facts.target.local_rank} on node {node}, generation {generation}"
    yield f"process {facts.target.pid}: {used}{gpu}"
    yield from map(_kernel_words, facts.threads)
    if facts.why_no_stacks:
        yield f"no Python stacks: {facts.why_no_stacks}"
    for stack in facts.stacks:
        yield f"Python thread {stack.name}, innermost frame first:"
        yield from (f"  {frame.file}:{frame.line} in {frame.function}" for frame in stack.frames)
    if facts.recorded is not None:
        yield f"flight recorder, unchanged for at least {facts.recorded.still_s:.0f} s:"
        yield from map(_in_group, facts.recorded.groups)


def _in_group(group: InGroup) -> str:
    if group.waits_in is None:
        return f"  group {group.group}: {group.collective} {group.entered} has ended"
    more = f", has entered all up to {group.entered}" if group.entered > group.waits_in else ""
    return f"  group {group.group}: waits in {group.collective} {group.waits_in}{more}"
