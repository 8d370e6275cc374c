"""The facts of a worker as a text for people: a pure function.

Without source lines, command lines or variables: these may have secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....rendezvous.statements.inquiry import InGroup, RankState
from .facts import ProcessFacts, ThreadFacts, ThreadStack, WorkerFacts

MOST_CHARS = 256 * 1024
"""Of one worker's."""
_CUT = "\n... (cut)\n"
_MIB = 1 << 20


def one_line(state: RankState) -> str:
    """
    >>> from ....rendezvous.statements.inquiry import Doing
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
        same = process.later == tuple(_plain(process.stacks))
        yield f"{window_s:.2f} s later: {'the same' if same else ''}"
        if not same:
            yield from _stacks(process.later)
    if process.native:
        yield "as py-spy shows it:"
        yield from (f"  {line}" for line in process.native.splitlines())


def _plain(stacks: Sequence[ThreadStack]) -> Iterator[ThreadStack]:
    """Without the text of source lines, as a second look has them."""
    for stack in stacks:
        yield stack.without_source()


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
