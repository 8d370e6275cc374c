"""The process that runs probes, each in a fork of its own: the other end of `runner`.

The first line of standard input is a `RunRequest`. For each check there is a line of standard output as soon as it is
known: a `ProbeAnswer` with facts, or a `ProbeFailure`. A probe that does not answer in its time is killed. One that
SIGKILL does not end, because it hangs in the kernel, is waited for `KILLED_S`; then this process stays its parent, says
so, and lives until it ends or standard input does. So the agent, which adopts orphans, never takes it for a worker's.

This process itself reads no file, asks no driver and waits for nothing without a limit. No probe shares anything with
another: a crash, a hang or garbage is that probe's alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from ....codec import AtMost, Checked, Codec, Document, Seconds, Text, plain
from ..needs import NodeNeeds
from .table import BY_NAME

KILLED_S = 1.0
"""A process that can be ended is gone within milliseconds."""

MOST_FACTS = 65_536
"""Bytes."""

MOST_PROBLEM = 1024

LOOK_S = 0.005

_CHUNK = 16_384
_STDIN = 0


@dataclass(frozen=True, slots=True)
class RunRequest(Checked):
    """Which checks to run at once, and how long each may take."""

    checks: Annotated[tuple[Annotated[str, Text(64)], ...], AtMost(64)]
    needs: NodeNeeds
    limits_s: dict[str, Seconds]


@dataclass(frozen=True, slots=True)
class ProbeAnswer(Checked):
    check: Annotated[str, Text(64)]
    seconds: Seconds
    facts: Annotated[str, Text(MOST_FACTS)]
    """As JSON, not looked at here."""


@dataclass(frozen=True, slots=True)
class ProbeFailure(Checked):
    """There are no facts. `problem` completes "the probe ..."."""

    check: Annotated[str, Text(64)]
    seconds: Seconds
    problem: Annotated[str, Text(MOST_PROBLEM)]


@dataclass(frozen=True, slots=True)
class RunEnded(Checked):
    """The last line. `left` are the processes that SIGKILL has not ended."""

    left: Annotated[tuple[Annotated[str, Text(256)], ...], AtMost(64)]


REQUEST = Document(RunRequest, version=1, most_chars=1 << 17)
ANSWER: Codec[ProbeAnswer | ProbeFailure | RunEnded] = Codec(
    (ProbeAnswer, ProbeFailure, RunEnded), version=1, most_bytes=8 * MOST_FACTS
)


def main() -> None:
    """Until all that was started here has ended, or standard input has."""
    request = REQUEST.decode(sys.stdin.readline())
    forks = [
        ProbeFork(name, BY_NAME[name].probe, request.needs, request.limits_s.get(name, BY_NAME[name].limit_s))
        for name in request.checks
    ]
    left = _collect(forks)
    _say(RunEnded(tuple(f"{fork.check}, process {fork.pid}: {fork.where()}" for fork in left)))
    while left and not _alone(1.0):
        left = [fork for fork in left if not fork.has_ended()]


class ProbeFork:
    """One probe's process."""

    def __init__(
        self, check: str, probe: Callable[[NodeNeeds], Any], needs: NodeNeeds, limit_s: float
    ) -> None:
        self.check, self.limit_s = check, limit_s
        self.began_at = time.monotonic()
        self.ends_at = self.began_at + limit_s
        self._data = bytearray()
        self._status: int | None = None
        self.descriptor, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _probe(probe, needs, writing)
        os.close(writing)

    def read(self) -> ProbeAnswer | ProbeFailure | None:
        """What has come; None: there is more to come."""
        data = os.read(self.descriptor, _CHUNK)
        self._data += data
        if len(self._data) > MOST_FACTS:
            return self.failure(f"has answered with more than {MOST_FACTS} bytes")
        return self._answer() if not data else None

    def failure(self, problem: str) -> ProbeFailure:
        return ProbeFailure(self.check, time.monotonic() - self.began_at, problem)

    def kill(self) -> None:
        os.close(self.descriptor)
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        if self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if found else None
        return self._status is not None

    def where(self) -> str:
        """Its state, and the kernel's function where it waits."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            with open(f"/proc/{self.pid}/wchan") as file:
                waits_in = file.read().strip("0\n")
        except OSError:
            return "in an unknown state"
        return f"state {state}" + (f", waits in {waits_in}" if waits_in else "")

    def _answer(self) -> ProbeAnswer | ProbeFailure:
        if not self._data:
            return self.failure(self._death())
        try:
            answer = json.loads(self._data)
        except ValueError:
            answer = None
        match answer:
            case {"facts": facts}:
                return ProbeAnswer(self.check, time.monotonic() - self.began_at, json.dumps(facts))
            case {"problem": str(problem)}:
                return self.failure(problem)
            case _:
                return self.failure(f"has answered with no facts: {bytes(self._data[:60])!r}")

    def _death(self) -> str:
        """Its end of the pipe is closed, so it is ending."""
        until = time.monotonic() + KILLED_S
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(LOOK_S)
        if self._status is None:
            return "has closed its pipe and given no answer"
        if os.WIFSIGNALED(self._status):
            return f"was ended by signal {os.WTERMSIG(self._status)}"
        return f"has ended with exit code {os.waitstatus_to_exitcode(self._status)} and no answer"


def _probe(probe: Callable[[NodeNeeds], Any], needs: NodeNeeds, writing: int) -> NoReturn:
    """In the fork. A driver's library may write where it likes: only `writing` is read."""
    code = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        try:
            answer = {"facts": plain(probe(needs))}
        except Exception as error:
            answer = {"problem": f"has failed: {type(error).__name__}: {error}"[:MOST_PROBLEM]}
        with open(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        code = 0
    finally:
        os._exit(code)


def _collect(forks: Sequence[ProbeFork]) -> list[ProbeFork]:
    """Says what each has found. Returns those that have not ended."""
    running = {fork.descriptor: fork for fork in forks}
    killed: list[tuple[float, ProbeFork]] = []
    while running:
        wait_s = min(fork.ends_at for fork in running.values()) - time.monotonic()
        readable = select.select([*running, _STDIN], [], [], max(0.0, wait_s))[0]
        if _STDIN in readable:  # nothing is sent there: it has ended, and so has the agent
            for fork in running.values():
                fork.kill()
            return []
        answers = [(fork, fork.read()) for descriptor, fork in running.items() if descriptor in readable]
        late = [fork for fork in running.values() if time.monotonic() >= fork.ends_at]
        answers += [
            (fork, fork.failure(f"has not answered within {fork.limit_s:g} s ({fork.where()})"))
            for fork in late
            if fork.descriptor not in readable
        ]
        for fork, answer in answers:
            if answer is not None:
                del running[fork.descriptor]
                fork.kill()
                killed.append((time.monotonic(), fork))
                _say(answer)
    return [fork for at, fork in killed if not _ends(fork, at + KILLED_S)]


def _ends(fork: ProbeFork, until: float) -> bool:
    while not fork.has_ended():
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_S)
    return True


def _alone(within_s: float) -> bool:
    """Whether standard input ends within that time, as it does with the agent."""
    return bool(select.select([_STDIN], [], [], within_s)[0])


def _say(answer: ProbeAnswer | ProbeFailure | RunEnded) -> None:
    try:
        sys.stdout.buffer.write(ANSWER.encode(answer))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass
