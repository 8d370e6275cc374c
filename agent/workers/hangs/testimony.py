"""Finds what one worker does, from the facts, and writes both for people: pure functions.

Two signs count: what the kernel says of the main thread, and its Python stack. Of a stack the innermost part that
belongs to torch names what a wait is for; the same place twice, with a window between, that it is one.

Without stacks, as of a worker that did not start from a spare, the kernel's signs are all. A thread that waits for
another one, in a process with threads of a library of collectives, is taken to be in a collective, but not in which:
so one that sleeps or reads stands out, and one that waits for a lock does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....rendezvous.statements.inquiry import MAX_WHERE, Doing, InGroup, RankState
from .facts import Frame, ProcessFacts, ThreadFacts, ThreadStack, Wait, WorkerFacts, wait_of

GIL_WAKES = 25
"""In a second: who waits for Python's lock asks for it 200 times a second (`sys.getswitchinterval`); on a machine that
has too much to do, less often."""
GIL_SHARE = 0.1
"""Who gets it now and then uses more of a processor than that, and who only asks for it does not."""

BYTES_SHARE = 0.05
"""Of one processor, from which on a thread of a library of collectives moves bytes, and does not only wait for some."""

_STOPPED = ("T", "t")
_GONE = ("Z", "X")
_FROZEN = ("freez", "refrigerator")

_FILE_SERVERS = ("request_wait_answer", "fuse_", "nfs", "rpc_wait", "lustre", "ceph")

_DISTRIBUTED = "/torch/distributed/"
_DDP = "/torch/nn/parallel/distributed.py"
_BACKWARD = ("/torch/autograd/graph.py", "_engine_run_backward")
_LOADER = ("/torch/utils/data/",)
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
_STORE_FUNCTIONS = (
    "init_process_group",
    "_new_process_group_helper",
    "rendezvous",
    "_store_based_barrier",
    "new_group",
)
_OWN_WAITS = ("/elastic_agent/worker/steps/own_time.py", "waits")
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


def rank_state(facts: WorkerFacts) -> RankState:
    """What this worker does."""
    doing, where, collective = _judge(facts)
    return RankState(
        facts.rank, doing, facts.step, facts.still_s, collective, where[:MAX_WHERE], facts.recorded
    )


_Judged = tuple[Doing, str, str]


def _judge(facts: WorkerFacts) -> _Judged:
    process, main = facts.process, facts.process.main
    if main is None or (main.state in _GONE and all(one.state in _GONE for one in process.threads)):
        return Doing.GONE, "its process has ended", ""
    if process.debugger:
        return Doing.DEBUGGED, f"by {process.debugger}", ""
    if main.state in _STOPPED or any(part in main.channel for part in _FROZEN):
        return Doing.STOPPED, _kernel_words(main), ""
    if _file_server(process, main):
        return Doing.UNINTERRUPTIBLE, _kernel_words(main), ""
    if asleep := next((one for one in process.threads if one.asleep), None):
        return Doing.UNINTERRUPTIBLE, _kernel_words(asleep), ""
    frames = _main_frames(process.stacks) or _main_frames(process.later)  # an answer may be late
    if not frames:
        return _without_stacks(facts, process, main)
    return _with_stacks(facts, process, main, frames)


def _file_server(process: ProcessFacts, main: ThreadFacts) -> bool:
    """It waits for one: at first such that a signal may end that, and from then on so that none does."""
    return any(part in main.channel for part in _FILE_SERVERS) or (main.state == "D" and not process.stacks)


def _without_stacks(facts: WorkerFacts, process: ProcessFacts, main: ThreadFacts) -> _Judged:
    doing = {Wait.SLEEP: Doing.ASLEEP, Wait.READ: Doing.READING, Wait.CHILD: Doing.READING}.get(main.wait)
    if doing is None and main.runs(facts.window_s):
        doing = Doing.OTHER if process.devices else Doing.MOVES
    if doing is None and main.wait is Wait.FUTEX and _has_collectives(process):
        doing = Doing.IN_COLLECTIVE
    return doing or Doing.OTHER, _kernel_words(main), ""


def _has_collectives(process: ProcessFacts) -> bool:
    return any(thread.name.startswith(_COLLECTIVE_THREADS) for thread in process.threads)


def _with_stacks(
    facts: WorkerFacts, process: ProcessFacts, main: ThreadFacts, frames: Sequence[Frame]
) -> _Judged:
    where = _where(frames, main)
    runs = main.runs(facts.window_s)
    later = _main_frames(process.later)
    if later and not _same(frames, later):
        return Doing.MOVES, where, ""
    asking = _ask_for_lock_of_python(process, facts.window_s)
    if main in asking:
        others_run = any(one.runs(facts.window_s) for one in process.threads if one is not main)
        held = "it waits for Python's lock, which another thread holds"
        return (Doing.BUSY if others_run else Doing.HOLDS_GIL), f"{where}; {held}", ""
    innermost = frames[0]
    for at, frame in enumerate(frames):
        if _is_in(frame, _SAVES):
            return Doing.IN_SAVE, where, ""
        if _is_in(frame, _LOADER):
            if any(child.main is not None and child.main.runs(facts.window_s) for child in facts.children):
                return Doing.MOVES, f"{where}; its data loader is at work", ""
            return Doing.IN_DATA_LOADER, _of_loader(where, facts.children), ""
        if frame.function in _STORE_FUNCTIONS and _DISTRIBUTED in frame.file:
            return Doing.AT_STORE, _own(frames).place, ""
        if _is_collective(frame) or _BACKWARD[0] in frame.file:
            backward = not _is_collective(frame)
            if (backward and runs) or not all(map(_is_plumbing, frames[:at])):
                break  # a module's forward inside DDP's, a backward of the script's own
            return _in_collective(facts, frames, "backward" if backward else _name(frames[at:]))
    if asking and main.wait not in (Wait.READ, Wait.POLL, Wait.CHILD):
        one = asking[0]
        held = f"thread {one.tid} ({one.name}) waits for Python's lock, which this one holds"
        return (Doing.BUSY if runs else Doing.HOLDS_GIL), f"{where}; {held}", ""
    if runs:
        return (Doing.OTHER if process.devices else Doing.BUSY), where, ""
    if main.wait is Wait.FUTEX and any(word in innermost.source for word in _WAITS_OF_WORK):
        return Doing.IN_COLLECTIVE, _own(frames).place, "wait"
    doing = {
        Wait.FUTEX: Doing.LOCKED,
        Wait.SLEEP: Doing.ASLEEP,
        Wait.READ: Doing.READING,
        Wait.POLL: Doing.READING,
        Wait.CHILD: Doing.READING,
    }.get(main.wait, Doing.OTHER)
    return doing, where, ""


def _in_collective(facts: WorkerFacts, frames: Sequence[Frame], name: str) -> _Judged:
    """Unless it works there itself. A GPU's library may use a processor only to wait."""
    process, place = facts.process, _own(frames).place
    collective = name[:64]
    if process.devices or not process.threads:
        return Doing.IN_COLLECTIVE, place, collective
    if process.threads[0].runs(facts.window_s):
        return Doing.BUSY, f"{place}, in {collective}", ""
    for thread in process.threads[1:]:
        if thread.name.startswith(_COLLECTIVE_THREADS) and thread.cpu_s > BYTES_SHARE * facts.window_s > 0:
            return Doing.MOVES, f"{place}; {thread.name} moves the bytes of {collective}", ""
    return Doing.IN_COLLECTIVE, place, collective


def _main_frames(stacks: Sequence[ThreadStack]) -> tuple[Frame, ...]:
    return stacks[-1].frames if stacks else ()


def _same(before: Sequence[Frame], after: Sequence[Frame]) -> bool:
    """In one function, called from the same lines: at which line of it does not count, for a loop has several."""
    return [_outline(frame, inner=at == 0) for at, frame in enumerate(before)] == [
        _outline(frame, inner=at == 0) for at, frame in enumerate(after)
    ]


def _outline(frame: Frame, *, inner: bool) -> tuple[str, str, int]:
    return frame.file, frame.function, 0 if inner else frame.line


def _ask_for_lock_of_python(process: ProcessFacts, window_s: float) -> list[ThreadFacts]:
    """These threads ask for it all the time, and get nowhere."""
    return [
        one
        for one in process.threads
        if one.wakes >= GIL_WAKES
        and one.cpu_s <= GIL_SHARE * window_s
        and wait_of("S", one.channel, one.call) is Wait.FUTEX
    ]


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


def _where(frames: Sequence[Frame], main: ThreadFacts) -> str:
    """The innermost frame of the user's own code, and what the kernel says."""
    kernel = "" if main.wait is Wait.NOTHING else f", waits for {_waits_for(main)}"
    return f"{_own(frames).place}{kernel}"


def _own(frames: Sequence[Frame]) -> Frame:
    return next((frame for frame in frames if not _is_in(frame, _LIBRARY)), frames[0])


def _waits_for(thread: ThreadFacts) -> str:
    on = f" from {thread.on}" if thread.on else ""
    return f"{thread.wait.value}{on}"


def _kernel_words(thread: ThreadFacts) -> str:
    channel = f", in the kernel's {thread.channel}" if thread.channel else ""
    on = f", at {thread.on}" if thread.on else ""
    return f"thread {thread.tid} ({thread.name}) is in state {thread.state}{channel}{on}"


def _of_loader(where: str, children: Sequence[ProcessFacts]) -> str:
    stuck = [(child, child.main) for child in children if child.main is not None and child.cpu_s == 0]
    shown = next(((child, main) for child, main in stuck if main.state in (*_STOPPED, "D")), None)
    if shown is None:
        shown = next(((child, main) for child, main in stuck if _at_work(child)), None)
    if shown is None:
        return where
    child, main = shown
    place = _child_place(child)
    return f"{where}; its process {child.pid} {place or f'is in state {main.state}, {_waits_for(main)}'}"


def _at_work(child: ProcessFacts) -> bool:
    """Fetching, and not waiting for an order."""
    return any(frame.function == "fetch" for frame in _main_frames(child.stacks))


def _child_place(child: ProcessFacts) -> str:
    frames = _main_frames(child.stacks)
    return f"stands at {_own(frames).place}" if frames else ""


# --- A text without source lines, command lines or variables: these may have secrets

MOST_CHARS = 256 * 1024
"""Of one worker's."""
_CUT = "\n... (cut)\n"
_MIB = 1 << 20


def one_line(state: RankState) -> str:
    """
    >>> one_line(RankState(3, Doing.ASLEEP, 7, where="train.py:9 in step"))
    'rank 3: asleep, train.py:9 in step, step 7'
    """
    parts = [
        f"rank {state.rank}: {state.doing.value}",
        state.collective,
        state.where,
        f"step {state.step}" if state.step is not None else "",
        f"still for {state.still_s:.0f} s" if state.still_s is not None else "",
    ]
    return ", ".join(filter(None, parts))


def report(facts: WorkerFacts, state: RankState, node: str, generation: int) -> str:
    lines = [
        one_line(state),
        f"local rank {facts.local_rank} on node {node}, generation {generation}",
        "",
        *_process(facts.process, facts.window_s),
    ]
    for child in facts.children:
        lines += ["", f"child of process {child.parent}:", *_process(child, facts.window_s)]
    if facts.recorded is not None:
        lines += ["", f"flight recorder, unchanged for at least {facts.recorded.still_s:.0f} s:"]
        lines += [f"  {_in_group(group)}" for group in facts.recorded.groups]
    if facts.last_lines:
        lines += ["", "last lines of its output:", *(f"  {line}" for line in facts.last_lines)]
    text = "\n".join(lines) + "\n"
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - len(_CUT)] + _CUT


def _in_group(group: InGroup) -> str:
    if group.waits_in is None:
        return f"group {group.group}: {group.collective} {group.entered} has ended"
    more = f", has entered all up to {group.entered}" if group.entered > group.waits_in else ""
    return f"group {group.group}: waits in {group.collective} {group.waits_in}{more}"


def _process(process: ProcessFacts, window_s: float) -> Iterator[str]:
    if not process.threads:
        yield f"process {process.pid} has ended"
        return
    used = f", {process.cpu_s:.2f} s of processor time in {window_s:.2f} s" if window_s else ""
    gpu = ", has a GPU open" if process.devices else ""
    yield f"process {process.pid} ({process.name}): {process.memory_bytes / _MIB:.0f} MiB resident{used}{gpu}"
    for thread in process.threads:
        yield f"  {_thread(thread, window_s)}"
    if process.why_no_stacks:
        yield f"no Python stacks: {process.why_no_stacks}"
    if process.stacks:
        yield "Python stacks, innermost frame first:"
        yield from _stacks(process.stacks)
    if process.later:
        same = process.later == process.stacks
        yield f"{window_s:.2f} s later: {'the same' if same else ''}"
        if not same:
            yield from _stacks(process.later)


def _thread(thread: ThreadFacts, window_s: float) -> str:
    before = f" (before: {thread.state_before})" if thread.state_before not in ("", thread.state) else ""
    parts = [
        f"thread {thread.tid} ({thread.name}): {thread.state}{before}",
        f"in the kernel's {thread.channel}" if thread.channel else "",
        f"in {thread.call}" if thread.call else "",
        f"at {thread.on}" if thread.on else "",
        f"{thread.cpu_s:.2f} s of processor time, sleeps {thread.wakes:.0f} times a second"
        if window_s
        else "",
    ]
    return ", ".join(filter(None, parts))


def _stacks(stacks: Sequence[ThreadStack]) -> Iterator[str]:
    for stack in stacks:
        yield f"  thread {stack.name}"
        for frame in stack.frames:
            yield f"    {frame.file}:{frame.line} in {frame.function}"
