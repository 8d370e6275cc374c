"""Starts the process that runs probes, waits for its answers within a bound, and judges them.

Whatever that process does, the caller gets a finding for every check, and no error: an answer that is late, or is none,
is a finding like any other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....codec import Invalid, from_plain
from ..finding import MOST_SUMMARY, Finding, Outcome
from ..needs import NodeNeeds
from ..probe_process import ISOLATED, start_probe_process
from .server import ANSWER, KILLED_S, MOST_PROBLEM, REQUEST, ProbeAnswer, ProbeFailure, RunEnded, RunRequest
from .table import NodeCheck

log = logging.getLogger(__name__)

_SERVER = f"{__name__.rpartition('.')[0]}.server"

START_S = 5.0
"""How long an interpreter may take to start on a machine with too much to do."""

_CHUNK = 65_536


class CheckRun:
    """One run of some checks. `start` and `findings` are for one thread, `close` for any; none of them raises."""

    def __init__(
        self,
        checks: Sequence[NodeCheck],
        needs: NodeNeeds,
        environment: Mapping[str, str] | None = None,
        limits_s: Mapping[str, float] | None = None,
        python: str = sys.executable,
    ) -> None:
        """`environment` is what the probes have; None: this process' own. `limits_s`: other limits than the table's."""
        self._checks, self._needs = checks, needs
        self._environment = dict(os.environ if environment is None else environment)
        self._limits_s = dict(limits_s or {})
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
        request = RunRequest(tuple(check.name for check in self._checks), self._needs, self._limits_s)
        try:
            self._process = start_probe_process(self._python, _SERVER, self._environment, flags=ISOLATED)
            assert self._process.stdin is not None
            self._process.stdin.write(REQUEST.encode(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self._problem = f"could not be started: {error.strerror}"
        except ValueError:  # closed meanwhile
            pass

    def findings(self) -> tuple[Finding, ...]:
        """Of all checks, in their order. Returns within the longest limit, and `START_S` and `KILLED_S` more."""
        longest_s = max((self._limit_s(check) for check in self._checks), default=0.0)
        answers = {}
        if self._process is not None and self._process.stdout is not None:
            with self._process.stdout as answering:
                answers = self._answers(answering.fileno(), self._started_at + longest_s + START_S + KILLED_S)
        lost_s = time.monotonic() - self._started_at
        return tuple(
            finding
            for check in self._checks
            for finding in findings_of(
                check,
                self._needs,
                answers.get(check.name)
                or ProbeFailure(check.name, lost_s, self._problem or "has given no answer"),
            )
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

    def _limit_s(self, check: NodeCheck) -> float:
        return self._limits_s.get(check.name, check.limit_s)

    def _answers(self, descriptor: int, until: float) -> dict[str, ProbeAnswer | ProbeFailure]:
        """By check, until the last one or that instant."""
        answers: dict[str, ProbeAnswer | ProbeFailure] = {}
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


def findings_of(
    check: NodeCheck, needs: NodeNeeds, answer: ProbeAnswer | ProbeFailure
) -> tuple[Finding, ...]:
    """Pure. Of a probe that has not answered there is one finding, of the check's own name."""
    if isinstance(answer, ProbeAnswer):
        try:
            body = json.loads(answer.facts)
            if not isinstance(body, dict):
                raise Invalid("no object")
            found = check.judge(from_plain(check.facts, body), needs)
        except (ValueError, RecursionError) as error:
            garbage = f"has answered with garbage: {error}"[:MOST_PROBLEM]
            return findings_of(check, needs, ProbeFailure(answer.check, answer.seconds, garbage))
        findings = found if isinstance(found, tuple) else (found,)
        return tuple(replace(finding, seconds=answer.seconds) for finding in findings)
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
