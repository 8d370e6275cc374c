"""Runs checks, each in a fork of its own and within its time, by a process that the agent starts for them.

Whatever happens there, the caller gets a finding for every check, and no error: an answer that is late, or is none, is
a finding like any other.

The process gets a `RunRequest` as a line of standard input, and answers with a `CheckAnswer` for each check as soon as
it is known, and with `RunEnded`. A check that does not answer in its time is killed. One that SIGKILL does not end,
because it hangs in the kernel, is waited for `KILLED_S`; then the process stays its parent, says so, and lives until it
ends or standard input does. So the agent, which adopts orphans, never takes it for a worker's. The process itself reads
no file, asks no driver and waits for nothing without a limit. No check shares anything with another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, NoReturn

from ...codec import AtMost, Checked, Codec, Document, Invalid, Seconds, Text
from ...threads import Thread
from .finding import MOST_BYTES, MOST_SUMMARY, Finding, NodeNeeds, Outcome, worst_first
from .processes import ISOLATED, start_probe_process
from .table import BY_NAME, NodeCheck

log = logging.getLogger(__name__)

START_S = 5.0
"""How long an interpreter may take to start on a machine with too much to do."""
KILLED_S = 1.0
"""A process that can be ended is gone within milliseconds."""
LOOK_S = 0.005
MOST_FINDINGS = 16
"""Of one check."""
MOST_PROBLEM = 1024
_CHUNK = 65_536
_STDIN = 0


@dataclass(frozen=True, slots=True)
class RunRequest(Checked):
    """Which checks to run at once, by name, and how long each may take."""

    limits_s: dict[str, Seconds]
    needs: NodeNeeds


@dataclass(frozen=True, slots=True)
class CheckAnswer(Checked):
    """What a check has found, or why there is no finding: `problem` completes "the probe ..."."""

    check: Annotated[str, Text(64)]
    seconds: Seconds = 0.0
    findings: Annotated[tuple[Finding, ...], AtMost(MOST_FINDINGS)] = ()
    problem: Annotated[str, Text(MOST_PROBLEM)] = ""


@dataclass(frozen=True, slots=True)
class RunEnded(Checked):
    """The last line. `left` are the processes that SIGKILL has not ended."""

    left: Annotated[tuple[Annotated[str, Text(256)], ...], AtMost(64)]


REQUEST = Document(RunRequest, version=1, most_chars=1 << 17)
ANSWER: Codec[CheckAnswer | RunEnded] = Codec(
    (CheckAnswer, RunEnded), version=1, most_bytes=MOST_FINDINGS * MOST_BYTES
)


class CheckRun:
    """One run of some checks. `start` and `findings` are for one thread, `close` for any; none of them raises."""

    def __init__(
        self,
        checks: Sequence[NodeCheck],
        needs: NodeNeeds,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """`environment` is what the probes have; None: this process' own."""
        self._checks, self._needs = checks, needs
        self._environment = dict(os.environ if environment is None else environment)
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = time.monotonic()
        self._problem = ""
        self.hangs = False
        """A probe is left that SIGKILL does not end. `close` makes it another process' child."""

    @property
    def pid(self) -> int | None:
        """Of the process that runs the probes, while it is there."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        self._started_at = time.monotonic()
        if not self._checks:
            return
        request = RunRequest({check.name: check.limit_s for check in self._checks}, self._needs)
        try:
            self._process = start_probe_process(self._python, __name__, self._environment, flags=ISOLATED)
            assert self._process.stdin is not None
            self._process.stdin.write(REQUEST.encode(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self._problem = f"could not be started: {error.strerror}"
        except ValueError:  # closed meanwhile
            pass

    def findings(self) -> tuple[Finding, ...]:
        """Of all checks, in their order. Returns within the longest limit, and `START_S` and `KILLED_S` more."""
        longest_s = max((check.limit_s for check in self._checks), default=0.0)
        answers = {}
        if self._process is not None and self._process.stdout is not None:
            with self._process.stdout as answering:
                answers = self._answers(answering.fileno(), self._started_at + longest_s + START_S + KILLED_S)
        lost_s = time.monotonic() - self._started_at
        none = self._problem or "has given no answer"
        found = [
            answers.get(check.name) or CheckAnswer(check.name, lost_s, (), none) for check in self._checks
        ]
        return tuple(
            finding
            for check, answer in zip(self._checks, found, strict=True)
            for finding in findings_of(check, self._needs, answer)
        )

    def close(self) -> None:
        """The probes' process ends, but for what hangs in the kernel. Findings that are waited for come at once."""
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:  # it has ended before it read its order
                pass

    def end(self) -> None:
        """Closes it, and leaves no zombie where nothing hangs."""
        self.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_S)

    def _answers(self, descriptor: int, until: float) -> dict[str, CheckAnswer]:
        """By check, until the last one or that instant."""
        answers: dict[str, CheckAnswer] = {}
        begun = b""
        poll = select.poll()  # select refuses descriptors from 1024 on
        poll.register(descriptor, select.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            if not poll.poll(left_s * 1000):
                break
            data = os.read(descriptor, _CHUNK)
            *lines, begun = (begun + data).split(b"\n")
            try:
                for answer in map(ANSWER.decode, lines):
                    if not isinstance(answer, RunEnded):
                        answers[answer.check] = answer
                        continue
                    self.hangs = bool(answer.left)
                    for hung in answer.left:
                        log.warning(
                            "a check's process does not end, not even by SIGKILL, and is left: %s", hung
                        )
                    return answers
            except Invalid as error:
                self._problem = f"has answered with garbage: {error}"[:MOST_PROBLEM]
                return answers
            if not data or len(begun) > ANSWER.most_bytes:
                self._problem = "has ended without an answer"
                return answers
        return answers


def findings_of(check: NodeCheck, needs: NodeNeeds, answer: CheckAnswer) -> tuple[Finding, ...]:
    """Of a check that has not answered there is one finding, of the check's own name."""
    if not answer.problem:
        return tuple(replace(finding, seconds=answer.seconds) for finding in answer.findings)
    advice = "" if check.on_probe_failure is Outcome.UNKNOWN else check.advice
    subject = check.subject(needs)
    summary = f"{subject}: the probe {answer.problem}" if subject else f"the probe {answer.problem}"
    return (Finding(check.name, check.on_probe_failure, summary[:MOST_SUMMARY], advice, {}, answer.seconds),)


def run_checks(
    checks: Sequence[NodeCheck], needs: NodeNeeds, environment: Mapping[str, str] | None = None
) -> tuple[Finding, ...]:
    """All at once, for a process that does nothing else meanwhile."""
    run = CheckRun(checks, needs, environment)
    run.start()
    try:
        return run.findings()
    finally:
        run.close()


def failed(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.outcome is Outcome.FAIL]


class BackgroundChecks:
    """For the main thread. `post` takes, in any thread, a call that the main loop makes: then `take` has findings."""

    def __init__(
        self,
        new_run: Callable[[], CheckRun],
        post: Callable[[Callable[[], object]], object],
        *,
        errors: bool,
    ) -> None:
        """`new_run` is called in the main thread, its result is used in another one. `errors`: what fails is logged as
        an error, not as a warning."""
        self._new_run, self._post, self._errors = new_run, post, errors
        self._runs: list[CheckRun] = []
        """Those whose process may still be there: a probe that hangs in the kernel stays its child."""
        self._running = False
        self._found: Sequence[Finding] | None = None
        self._closed = False
        self._logged: frozenset[tuple[str, Outcome]] = frozenset()

    @property
    def pids(self) -> Sequence[int]:
        """Of this agent's children that are the checks'."""
        return [pid for run in self._runs if (pid := run.pid) is not None]

    def begin(self) -> bool:
        """Whether findings follow, of this run or of the one that goes on already: not while a probe of an earlier run
        hangs."""
        hangs = any(run.hangs and run.pid is not None for run in self._runs)
        if not self._running and not hangs:
            self._running = True
            run = self._new_run()
            self._runs = [*(run for run in self._runs if run.pid is not None), run]

            def not_run() -> None:
                self._post(partial(self._ended, run.findings()))

            Thread(lambda: self._wait_for(run), "node-checks", not_run).start()
        return self._running

    def take(self) -> Sequence[Finding] | None:
        """The findings of the run that has ended since the last call; None without one."""
        findings, self._found = self._found, None
        self._running = self._running and findings is None
        return findings

    def close(self) -> None:
        self._closed = True
        for run in self._runs:
            run.close()

    def _wait_for(self, run: CheckRun) -> None:
        """In a thread of its own."""
        run.start()
        findings = run.findings()
        if not run.hangs:
            run.end()
        if self._closed:
            return  # it was cut short
        self._log(findings)
        self._post(partial(self._ended, findings))

    def _ended(self, findings: Sequence[Finding]) -> None:
        self._found = findings

    def _log(self, findings: Sequence[Finding]) -> None:
        """What is as bad as it was at the last run is logged already."""
        bad = [
            finding for finding in worst_first(findings) if finding.outcome in (Outcome.FAIL, Outcome.WARN)
        ]
        for finding in bad:
            if (finding.check, finding.outcome) not in self._logged:
                fails = finding.outcome is Outcome.FAIL
                log.log(
                    logging.ERROR if fails and self._errors else logging.WARNING,
                    "check %s %s: %s. To do: %s",
                    finding.check,
                    "failed" if fails else "warns",
                    finding.summary,
                    finding.advice,
                )
        self._logged = frozenset((finding.check, finding.outcome) for finding in bad)


# --- The process that runs them


def main() -> None:
    """Until all that was started here has ended, or standard input has."""
    request = REQUEST.decode(sys.stdin.readline())
    forks = [CheckFork(BY_NAME[name], request.needs, limit_s) for name, limit_s in request.limits_s.items()]
    left = _collect(forks)
    _say(RunEnded(tuple(f"{fork.check.name}, process {fork.pid}: {fork.where()}" for fork in left)))
    while left and not _alone(1.0):
        left = [fork for fork in left if not fork.has_ended()]


class CheckFork:
    """One check's process."""

    def __init__(self, check: NodeCheck, needs: NodeNeeds, limit_s: float) -> None:
        self.check, self.limit_s = check, limit_s
        self.began_at = time.monotonic()
        self.ends_at = self.began_at + limit_s
        self._data = bytearray()
        self._status: int | None = None
        self.descriptor, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _find(check, needs, writing)
        os.close(writing)

    def read(self) -> CheckAnswer | None:
        """What has come; None: there is more to come."""
        data = os.read(self.descriptor, _CHUNK)
        self._data += data
        if len(self._data) > ANSWER.most_bytes:
            return self.failure(f"has answered with more than {ANSWER.most_bytes} bytes")
        return self._answer() if not data else None

    def failure(self, problem: str) -> CheckAnswer:
        return CheckAnswer(self.check.name, time.monotonic() - self.began_at, (), problem[:MOST_PROBLEM])

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

    def _answer(self) -> CheckAnswer:
        if not self._data:
            return self.failure(self._death())
        try:
            answer = ANSWER.decode(bytes(self._data))
        except Invalid as error:
            return self.failure(f"has answered with garbage: {error}")
        if not isinstance(answer, CheckAnswer):
            return self.failure("has answered with garbage")
        return replace(answer, seconds=time.monotonic() - self.began_at)

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


def _find(check: NodeCheck, needs: NodeNeeds, writing: int) -> NoReturn:
    """In the fork. A driver's library may write where it likes: only `writing` is read."""
    code = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        try:
            found = check.find(needs)
            answer = CheckAnswer(check.name, findings=found if isinstance(found, tuple) else (found,))
        except Exception as error:
            problem = f"has failed: {type(error).__name__}: {error}"[:MOST_PROBLEM]
            answer = CheckAnswer(check.name, problem=problem)
        with open(writing, "wb") as pipe:
            pipe.write(ANSWER.encode(answer))
        code = 0
    finally:
        os._exit(code)


def _collect(forks: Sequence[CheckFork]) -> list[CheckFork]:
    """Says what each has found. Returns those that have not ended."""
    running = {fork.descriptor: fork for fork in forks}
    killed: list[tuple[float, CheckFork]] = []
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


def _ends(fork: CheckFork, until: float) -> bool:
    while not fork.has_ended():
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_S)
    return True


def _alone(within_s: float) -> bool:
    """Whether standard input ends within that time, as it does with the agent."""
    return bool(select.select([_STDIN], [], [], within_s)[0])


def _say(answer: CheckAnswer | RunEnded) -> None:
    try:
        sys.stdout.buffer.write(ANSWER.encode(answer))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass
