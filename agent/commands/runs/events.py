"""`elastic-agent events`: the events of a job, from its agents while it goes on, or from the files of a run.

It only asks and reads. Events of several nodes are sorted by time, each by the clock of the node that wrote it.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from ....codec import Invalid, load_object
from ....rendezvous.records import Endpoint
from ....rendezvous.text import NAME
from ...common.exits import ExitCode
from ...configuration.config import HELP, SCRIPT, ConfigError
from ...configuration.load import read_argv
from ...configuration.parse import Group, Option, duration
from ...observability.sources import CannotShow, Unreachable, ask, problem
from ...output.journal import EVENT, EVENTS_PATH, JobEvent, Kind
from ...workers.processes.run_files import agents_here, run_directory_parents
from ..status import AGENT
from ..store_command import CannotDo, one_line_errors, pause
from .diagnose import find_run, given_log_dir, journals_in, run_help

_USAGE = """\
usage: elastic-agent events [JOB] [--follow] [--json] [--agent HOST:PORT]
       elastic-agent events RUN [--json] [--log-dir DIR]

Shows the events of a job: worlds and their causes, failures, recoveries, saves, excluded nodes. Asks the agents on this
machine, or one by its address, for the newest events that each has in memory. If no agent of JOB runs here, or RUN is
the folder of a run, it reads the files of all agents there.
"""

MOST_ANSWER = 16 * 2**20
FOLLOWS_S = 1.0
"""The pause before an agent is asked for more events."""

EVENTS_OPTIONS = Group("events")
JSON = EVENTS_OPTIONS.flag("json", "one JSON object a line, as in the files")
FOLLOW = EVENTS_OPTIONS.flag("follow", "then show new events, until the agents have ended or Ctrl-C")
TIMEOUT: Option[float] = EVENTS_OPTIONS.option(
    "timeout", duration(0.1), "how long an agent may take to answer", default="3s"
)


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    subject = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(words[1:] if subject is not None else words, (*EVENTS_OPTIONS, AGENT))
    if HELP in command_line:
        print(run_help(_USAGE, (*EVENTS_OPTIONS, AGENT)))
        return ExitCode.SUCCESS
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    problems = command_line.problems
    agent, follow = command_line[AGENT].value, bool(command_line[FOLLOW].value)
    if SCRIPT in command_line:
        problems.append(command_line[SCRIPT].problem("one job, or one run", "leave it out"))
    if agent is not None and subject is not None:
        problems.append(command_line[AGENT].problem("an agent, or a job", f"leave out it or {subject}"))
    if problems:
        print(f"elastic-agent events: {ConfigError(problems)}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    log_dir = given_log_dir(command_line)
    show = _as_json if command_line[JSON].value else _as_text
    try:
        with one_line_errors(ExitCode.STOPPED_BY_SIGINT):
            source = _choose(subject, agent, log_dir, command_line[TIMEOUT].value)
            _show(source, show, follow=follow)
            return ExitCode.SUCCESS
    except (CannotShow, CannotDo) as error:
        print(f"elastic-agent events: {error}", file=sys.stderr)
        return error.code
    except BrokenPipeError:
        return ExitCode.OUTPUT_CLOSED


def _choose(subject: str | None, agent: Endpoint | None, log_dir: Path | None, timeout_s: float) -> Source:
    """Raises CannotShow and CannotDo."""
    if agent is not None:
        return AgentsSource((agent,), None, timeout_s)
    folder = Path(subject) if subject is not None else None
    if folder is not None and (folder.is_dir() or NAME.fullmatch(str(folder)) is None):
        return FilesSource(str(folder), log_dir)
    try:
        found = agents_here(run_directory_parents(), os.getuid())
        source = AgentsSource(found, subject, timeout_s)
        whose = f"if it is of job {subject}, " if subject is not None else ""
        for text in source.problems:
            print(f"elastic-agent events: {text}: {whose}its events are missing", file=sys.stderr)
        return source
    except CannotShow as nothing:
        if subject is None or nothing.code is not ExitCode.NOT_FOUND:
            raise
        try:
            return FilesSource(subject, log_dir)
        except CannotDo as error:
            reason = f"no agent of job {subject} answers here, and {error}"
            raise CannotShow(ExitCode.NOT_FOUND, reason) from None


def _show(source: Source, show: Callable[[JobEvent], str], *, follow: bool) -> None:
    """Raises CannotShow and CannotDo."""
    while True:
        for event in source.read():
            if text := show(event):
                print(text)
        sys.stdout.flush()
        if not follow or source.over:
            return
        pause(FOLLOWS_S)


# --- Agents


@dataclass(slots=True)
class _Agent:
    http: Endpoint
    life: str = ""
    seen: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    job: str
    life: str
    newest: int
    events: tuple[JobEvent, ...]


class AgentsSource:
    """The agents on this machine, or one by its address; they may belong to several jobs."""

    def __init__(self, agents: Iterable[Endpoint], job: str | None, timeout_s: float) -> None:
        """`job`: ask only the agents of this job; None: all. Raises CannotShow."""
        self._timeout_s = timeout_s
        self._waiting: list[JobEvent] = []
        self._agents: list[_Agent] = []
        self.problems: list[str] = []
        """Why other agents did not answer."""
        asked = [_Agent(http) for http in agents]
        with ThreadPoolExecutor(len(asked) or 1, thread_name_prefix="ask") as pool:
            answers = list(pool.map(self._ask, asked))
        silent = [
            (each.http, how) for each, how in zip(asked, answers, strict=True) if isinstance(how, Unreachable)
        ]
        # The address of an agent that was killed stays for a moment.
        silent = [(http, how) for http, how in silent if how is not Unreachable.REFUSED]
        for agent, answer in zip(asked, answers, strict=True):
            if isinstance(answer, _Answer) and job in (None, answer.job):
                self._agents.append(agent)
                self._waiting += self._take(agent, answer)
        self.problems = [problem(http, how, timeout_s) for http, how in silent]
        if self._agents:
            return
        if silent and job is None:
            raise self._cannot(*silent[0])
        whose = f"of job {job} " if job is not None else ""
        raise CannotShow(
            ExitCode.NOT_FOUND,
            f"no agent {whose}answers here: ask one by the address in its log, --agent HOST:PORT, or name a run",
        )

    def read(self) -> list[JobEvent]:
        """The events since the last call, in order. Raises CannotShow."""
        events, self._waiting = self._waiting, []
        for agent in self._agents:
            if not agent.over:
                events += self._take(agent, self._ask(agent))
        return sorted(events, key=lambda event: (event.at, event.node, event.number))

    @property
    def over(self) -> bool:
        """No more events will come."""
        return all(agent.over for agent in self._agents)

    def _take(self, agent: _Agent, answer: _Answer | Unreachable) -> list[JobEvent]:
        """All new events of this agent, beginning with `answer`. Raises CannotShow."""
        events: list[JobEvent] = []
        while True:
            if answer is Unreachable.REFUSED:
                agent.over = True
                return events
            if isinstance(answer, Unreachable):
                raise self._cannot(agent.http, answer)
            if agent.life not in ("", answer.life):  # a new agent, which numbers its events from 1
                agent.seen, agent.life = 0, ""
                answer = self._ask(agent)
                continue
            agent.life = answer.life
            events += answer.events
            before = agent.seen
            agent.seen = max((event.number for event in answer.events), default=before)
            if agent.seen >= answer.newest or agent.seen == before:
                return events
            answer = self._ask(agent)

    def _ask(self, agent: _Agent) -> _Answer | Unreachable:
        return ask(agent.http, f"{EVENTS_PATH}?since={agent.seen}", _answer, self._timeout_s, MOST_ANSWER)

    def _cannot(self, http: Endpoint, how: Unreachable) -> CannotShow:
        code = ExitCode.MISMATCH if how is Unreachable.STRANGE else ExitCode.NO_ANSWER
        return CannotShow(code, problem(http, how, self._timeout_s))


def _answer(text: str) -> _Answer:
    """Raises Invalid."""
    body = load_object(text, "page")
    job, life, newest, events = (body.get(key) for key in ("job", "incarnation", "newest", "events"))
    if isinstance(job, str) and isinstance(life, str) and type(newest) is int and isinstance(events, list):
        return _Answer(job, life, newest, tuple(_readable(events)))
    raise Invalid("page without events")


def _readable(events: Iterable[Any]) -> Iterable[JobEvent]:
    for event in events:
        try:
            yield EVENT.unpack(dict(event) if isinstance(event, dict) else {})
        except Invalid:
            continue  # of a kind that this version does not know


# --- Files


class FilesSource:
    """The event files of all agents in the folder of a run."""

    over = True

    def __init__(self, run: str, log_dir: Path | None) -> None:
        """Raises CannotDo."""
        self._folder = find_run(run, log_dir)

    def read(self) -> list[JobEvent]:
        """Raises CannotDo."""
        events = chain.from_iterable(journals_in(self._folder))
        return sorted(events, key=lambda event: event.at)  # of one node and instant, as it wrote


Source: TypeAlias = AgentsSource | FilesSource


# --- Words


def _as_json(event: JobEvent) -> str:
    return EVENT.encode(event)


def _as_text(event: JobEvent) -> str:
    """A line for people; empty for accounting, which is for other programs."""
    if event.kind is Kind.ACCOUNTING:
        return ""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    where = f"rank {event.rank}" if event.rank is not None else ""
    if event.about and event.kind is Kind.FAILURE:
        where = f"{where} on {event.about}".strip()
    text = f"{where}: {event.text}" if where and where not in event.text else event.text
    kind = "generation" if event.kind is Kind.WORLD else event.kind.value.replace("_", " ")
    return f"{moment}  {event.node:<12}  {event.generation:>4}  {kind:<15}  {text}"
