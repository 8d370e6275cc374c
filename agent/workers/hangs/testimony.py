"""Finds what one worker does, from the facts, and writes both for people: pure functions.

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

from collections.abc import Iterable, Iterator, Sequence

from ....health.hang_report import MAX_WHERE, InGroup, RankActivity, RankState
from .facts import BYTES, CHILD, LOCK, TIME, Frame, ThreadFacts, WorkerFacts

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


def rank_state(facts: WorkerFacts) -> RankState:
    """What this worker does."""
    doing, where, collective = _judge(facts)
    one = facts.target
    return RankState(
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


def one_line(state: RankState) -> str:
    """
    >>> one_line(RankState(3, RankActivity.WAITS, 7, where="train.py:9 in step"))
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


def report(facts: WorkerFacts, state: RankState, node: str, generation: int) -> str:
    return "\n".join(_lines(facts, state, node, generation))[:MOST_CHARS] + "\n"


def _lines(facts: WorkerFacts, state: RankState, node: str, generation: int) -> Iterator[str]:
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
