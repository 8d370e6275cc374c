"""The checks of one node, and their run: each in a fork of its own and within its time, from a process that the agent
starts for them.

Whatever happens there, the caller gets a finding for every check, and no error: an answer that is late, or is none, is
a finding like any other. A check that does not answer in its time is ended by the alarm that it has set. One that hangs
in the kernel, where no signal ends it, keeps this process, its parent, alive: so the agent, which adopts orphans, never
takes it for a worker's. Each answer is one message on a socket. No check shares anything else with another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NoReturn

from ...codec import AtMost, Checked, Codec, Document, Invalid, Seconds, Text
from ...threads import Thread
from .finding import ISOLATED, MOST_SUMMARY, Finding, NodeNeeds, Outcome, probe_command, worst_first
from .gpus import GPU_CHECKS, check_gpus, check_xids
from .machine import (
    SLOW_NAMES_ADVICE,
    WRONG_ADVICE,
    check_arithmetic,
    check_locked_memory,
    check_log_directory,
    check_names,
    check_open_files,
    check_shared_memory,
)

log = logging.getLogger(__name__)

NVML_S = 10.0
"""Without persistence mode the driver loads for each GPU in turn, a second or so each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """One process, and what it may find."""

    name: str
    """Also of the finding where there is no other."""
    find: Callable[[NodeNeeds], Finding | tuple[Finding, ...]]
    """In a process of its own."""
    needed: Callable[[NodeNeeds], object] = lambda needs: True
    """Whether this job needs it at all."""
    limit_s: float = 5.0
    without_answer: Outcome = Outcome.FAIL
    """The outcome when it does not answer or dies."""
    advice: str = ""
    """What to do then."""
    names: tuple[str, ...] = ()
    """Of its findings; empty: only its own."""


NODE_CHECKS = (
    NodeCheck(
        name="gpu-visible",
        find=check_gpus,
        needed=lambda needs: needs.gpus,
        limit_s=NVML_S,
        advice="the driver hangs: look at dmesg for an Xid, and reboot this machine",
        names=GPU_CHECKS,
    ),
    NodeCheck(
        name="gpu-xid",
        find=check_xids,
        needed=lambda needs: needs.gpus,
        without_answer=Outcome.UNKNOWN,
    ),
    NodeCheck(
        name="shared-memory",
        find=check_shared_memory,
        advice="look at dmesg, and whether memory is short (free -h)",
    ),
    NodeCheck(
        name="log-directory",
        find=check_log_directory,
        needed=lambda needs: needs.log_directory,
        advice="its disk or file server does not answer: look at dmesg, unmount it, or choose another --log-dir",
    ),
    NodeCheck(name="open-files", find=check_open_files, without_answer=Outcome.UNKNOWN),
    NodeCheck(
        name="locked-memory",
        find=check_locked_memory,
        needed=lambda needs: needs.rdma,
        without_answer=Outcome.UNKNOWN,
    ),
    NodeCheck(
        name="name-resolution",
        find=check_names,
        without_answer=Outcome.WARN,
        advice=SLOW_NAMES_ADVICE,
    ),
)

RECHECKS = (NodeCheck(name="arithmetic", find=check_arithmetic, limit_s=90.0, advice=WRONG_ADVICE),)
"""Checks of an excluded node before it is readmitted, in addition to those before a join. They take longer."""

BY_NAME = {check.name: check for check in (*NODE_CHECKS, *RECHECKS)}

AT_JOIN = tuple(name for check in NODE_CHECKS for name in check.names or (check.name,))
"""The findings of those before a join."""


def checks_for(needs: NodeNeeds) -> tuple[NodeCheck, ...]:
    """Those that this job needs."""
    return tuple(check for check in NODE_CHECKS if check.needed(needs))


# --- A run

START_S = 5.0
"""How long an interpreter may take to start on a machine with too much to do."""
KILLED_S = 1.0
"""A process that can be ended is gone within milliseconds."""
MOST_BYTES = 1 << 17
"""Of one check's answer."""
MOST_PROBLEM = 1024
_ANSWERS = 1
"""Standard output."""


@dataclass(frozen=True, slots=True)
class RunRequest(Checked):
    """Which checks to run at once, by name, and how long each may take."""

    limits_s: dict[str, Seconds]
    needs: NodeNeeds


@dataclass(frozen=True, slots=True)
class CheckAnswer(Checked):
    """What a check has found, or why there is no finding: `problem` completes "the probe ..."."""

    check: Annotated[str, Text(64)]
    findings: Annotated[tuple[Finding, ...], AtMost(16)] = ()
    problem: Annotated[str, Text(MOST_PROBLEM)] = ""


REQUEST = Document(RunRequest, version=1, most_chars=1 << 17)
ANSWER = Codec((CheckAnswer,), version=1, most_bytes=MOST_BYTES)


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
        self._checks, self._needs, self._python = checks, needs, python
        self._environment = dict(os.environ if environment is None else environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._answering: socket.socket | None = None
        self._until = 0.0
        self._problem = "has given no answer"

    @property
    def pid(self) -> int | None:
        """Of the process that runs the probes, while it is there."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        longest_s = max((check.limit_s for check in self._checks), default=0.0)
        self._until = time.monotonic() + longest_s + START_S
        request = RunRequest({check.name: check.limit_s for check in self._checks}, self._needs)
        command = [*probe_command(self._python, __name__, flags=ISOLATED), REQUEST.encode(request)]
        try:
            self._answering, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            self._problem = f"could not be started: {error.strerror}"

    def findings(self) -> tuple[Finding, ...]:
        """Of all checks, in their order. Returns within the longest limit and `START_S` more."""
        answers: dict[str, CheckAnswer] = {}
        while self._process is not None and self._answering is not None and len(answers) < len(self._checks):
            try:
                self._answering.settimeout(max(self._until - time.monotonic(), 0.001))
                answer = ANSWER.decode(self._answering.recv(MOST_BYTES) or b"none")
            except (OSError, Invalid):  # late, closed meanwhile, or no answer of ours
                break
            answers[answer.check] = answer
        none = [CheckAnswer(check.name, (), self._problem) for check in self._checks]
        return tuple(
            finding
            for check, answer in zip(self._checks, none, strict=True)
            for finding in findings_of(check, answers.get(check.name, answer))
        )

    def close(self) -> None:
        """The probes end, but for what hangs in the kernel. Findings that are waited for come at once."""
        if self._answering is not None:
            with contextlib.suppress(OSError):
                self._answering.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """All findings are there: leaves nothing where nothing hangs."""
        if self._process is not None and self._answering is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_S)
                self._answering.close()


def findings_of(check: NodeCheck, answer: CheckAnswer) -> tuple[Finding, ...]:
    """Of a check that has not answered there is one finding, of the check's own name."""
    if not answer.problem:
        return answer.findings
    summary = f"the probe {answer.problem}"[:MOST_SUMMARY]
    return (Finding(check.name, check.without_answer, summary, check.advice),)


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
    ) -> None:
        """`new_run` is called in the main thread, its result is used in another one."""
        self._new_run, self._post = new_run, post
        self._run: CheckRun | None = None
        """The newest. Its process may still be there: a probe that hangs in the kernel stays its child."""
        self._running = False
        self._found: Sequence[Finding] | None = None
        self._closed = False
        self._logged: frozenset[tuple[str, Outcome]] = frozenset()

    @property
    def pids(self) -> Sequence[int]:
        """Of this agent's children that are the checks'."""
        pid = self._run.pid if self._run is not None else None
        return [pid] if pid is not None else []

    def begin(self) -> bool:
        """Whether findings follow, of this run or of the one that goes on already: not while a probe of an earlier run
        hangs."""
        if not self._running and not self.pids:
            self._running = True
            self._run = run = self._new_run()

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
        if self._run is not None:
            self._run.close()

    def _wait_for(self, run: CheckRun) -> None:
        """In a thread of its own."""
        run.start()
        findings = run.findings()
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
                    logging.ERROR if fails else logging.WARNING,
                    "check %s %s: %s. To do: %s",
                    finding.check,
                    "failed" if fails else "warns",
                    finding.summary,
                    finding.advice,
                )
        self._logged = frozenset((finding.check, finding.outcome) for finding in bad)


# --- The process that runs them


def main() -> None:
    """Until all that was started here has ended, or the agent has: its end of the socket closes then."""
    request = REQUEST.decode(sys.argv[2])
    running = {}
    for name, limit_s in request.limits_s.items():
        pid = os.fork()
        if pid == 0:
            _find(BY_NAME[name], request.needs, limit_s)
        running[pid] = name

    def end_with_the_agent() -> None:
        with contextlib.suppress(OSError):
            os.read(_ANSWERS, 1)
        os.killpg(0, signal.SIGKILL)

    Thread(end_with_the_agent, "agent's end").start()
    while running:
        pid, status = os.wait()
        name, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            _answer(CheckAnswer(name, problem=f"has not answered within {request.limits_s[name]:g} s"))
        elif code != 0:
            how = f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
            _answer(CheckAnswer(name, problem=how))


def _find(check: NodeCheck, needs: NodeNeeds, limit_s: float) -> NoReturn:
    """In the fork. A driver's library may write where it likes: only the answer's descriptor is read."""
    code = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        answers, nowhere = os.dup(_ANSWERS), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _ANSWERS)
        try:
            found = check.find(needs)
            answer = CheckAnswer(check.name, found if isinstance(found, tuple) else (found,))
        except Exception as error:
            problem = f"has failed: {type(error).__name__}: {error}"[:MOST_PROBLEM]
            answer = CheckAnswer(check.name, problem=problem)
        _answer(answer, answers)
        code = 0
    finally:
        os._exit(code)


def _answer(answer: CheckAnswer, descriptor: int = _ANSWERS) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more
        os.write(descriptor, ANSWER.encode(answer))
