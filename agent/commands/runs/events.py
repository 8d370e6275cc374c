"""`elastic-agent events`: the events of a job, from its agents while it goes on, or from the files of a run.

It only asks and reads. Events of several nodes are sorted by time, each by the clock of the node that wrote it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ....codec import Invalid, load_object
from ....rendezvous.records import Endpoint
from ....rendezvous.text import NAME
from ...common.exits import CannotDo, ExitCode
from ...configuration.config import ConfigError
from ...configuration.load import Settings
from ...configuration.parse import Group, Option, duration
from ...observability.sources import Unreachable, ask, problem
from ...output.journal import EVENT, EVENTS_PATH, JobEvent, Kind
from ...workers.processes.run_files import agents_here, run_directory_parents
from ..status import AGENT
from ..store_command import pause
from .diagnose import find_run, given_log_dir, journals_in, run_command

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
    return run_command("events", words, _USAGE, (*EVENTS_OPTIONS, AGENT), _work)


def _work(subject: str | None, command_line: Settings) -> None:
    """Raises CannotDo and ConfigError."""
    agent = command_line[AGENT].value
    if agent is not None and subject is not None:
        raise ConfigError([command_line[AGENT].problem("an agent, or a job", f"leave out it or {subject}")])
    show = EVENT.encode if command_line[JSON].value else _as_text
    source = _choose(subject, agent, given_log_dir(command_line), command_line[TIMEOUT].value)
    if isinstance(source, Path):
        # Those of one node and instant stay as it wrote them.
        _print(sorted(chain.from_iterable(journals_in(source)), key=lambda event: event.at), show)
        return
    _print(source.read(), show)
    while command_line[FOLLOW].value and not source.over:
        pause(FOLLOWS_S)
        _print(source.read(), show)


def _choose(
    subject: str | None, agent: Endpoint | None, log_dir: Path | None, timeout_s: float
) -> AgentsSource | Path:
    """The agents to ask, or the folder of a run. Raises CannotDo."""
    if agent is not None:
        return AgentsSource((agent,), None, timeout_s)
    if subject is not None and (Path(subject).is_dir() or NAME.fullmatch(subject) is None):
        return find_run(subject, log_dir)
    try:
        source = AgentsSource(agents_here(run_directory_parents(), os.getuid()), subject, timeout_s)
    except CannotDo as nothing:
        if subject is None or nothing.code is not ExitCode.NOT_FOUND:
            raise
        try:
            return find_run(subject, log_dir)
        except CannotDo as error:
            reason = f"no agent of job {subject} answers here, and {error}"
            raise CannotDo(ExitCode.NOT_FOUND, reason) from None
    whose = f"if it is of job {subject}, " if subject is not None else ""
    for text in source.problems:
        print(f"elastic-agent events: {text}: {whose}its events are missing", file=sys.stderr)
    return source


def _print(events: Iterable[JobEvent], show: Callable[[JobEvent], str]) -> None:
    for event in events:
        if text := show(event):
            print(text)
    sys.stdout.flush()


# --- Agents


@dataclass(slots=True)
class _Agent:
    http: Endpoint
    life: str = ""
    seen: int = 0
    """The number of the newest event that it has told."""
    over: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    job: str
    life: str
    events: tuple[JobEvent, ...]


class AgentsSource:
    """The agents on this machine, or one by its address; they may belong to several jobs."""

    def __init__(self, agents: Iterable[Endpoint], job: str | None, timeout_s: float) -> None:
        """`job`: ask only the agents of this job; None: all. Raises CannotDo."""
        self._timeout_s = timeout_s
        asked = [_Agent(http) for http in agents]
        with ThreadPoolExecutor(len(asked) or 1, thread_name_prefix="ask") as pool:
            answers = list(zip(asked, pool.map(self._ask, asked), strict=True))
        self._agents = [
            agent for agent, how in answers if isinstance(how, _Answer) and job in (None, how.job)
        ]
        # The address of an agent that was killed stays for a moment.
        silent = [
            self._cannot(agent.http, how)
            for agent, how in answers
            if isinstance(how, Unreachable) and how is not Unreachable.REFUSED
        ]
        self.problems = [str(error) for error in silent]
        """Why other agents did not answer."""
        if not self._agents:
            if silent and job is None:
                raise silent[0]
            whose = f"of job {job} " if job is not None else ""
            raise CannotDo(
                ExitCode.NOT_FOUND,
                f"no agent {whose}answers here: ask one by the address in its log, --agent HOST:PORT, or name a run",
            )

    def read(self) -> list[JobEvent]:
        """The events since the last call, in order. Raises CannotDo."""
        events = [event for agent in self._agents if not agent.over for event in self._take(agent)]
        return sorted(events, key=lambda event: (event.at, event.node, event.number))

    @property
    def over(self) -> bool:
        """No more events will come."""
        return all(agent.over for agent in self._agents)

    def _take(self, agent: _Agent) -> Iterator[JobEvent]:
        """All new events of this agent. Raises CannotDo."""
        while not agent.over:
            answer = self._ask(agent)
            if answer is Unreachable.REFUSED:
                agent.over = True
            elif isinstance(answer, Unreachable):
                raise self._cannot(agent.http, answer)
            elif agent.life not in ("", answer.life):  # a new agent, which numbers its events from 1
                agent.seen, agent.life = 0, answer.life
            elif not answer.events:
                return
            else:
                agent.seen, agent.life = max(event.number for event in answer.events), answer.life
                yield from answer.events

    def _ask(self, agent: _Agent) -> _Answer | Unreachable:
        return ask(agent.http, f"{EVENTS_PATH}?since={agent.seen}", _answer, self._timeout_s, MOST_ANSWER)

    def _cannot(self, http: Endpoint, how: Unreachable) -> CannotDo:
        code = ExitCode.MISMATCH if how is Unreachable.STRANGE else ExitCode.NO_ANSWER
        return CannotDo(code, problem(http, how, self._timeout_s))


def _answer(text: str) -> _Answer:
    """Raises Invalid."""
    body = load_object(text, "page")
    job, life, events = (body.get(key) for key in ("job", "incarnation", "events"))
    if isinstance(job, str) and isinstance(life, str) and isinstance(events, list):
        return _Answer(job, life, tuple(_readable(events)))
    raise Invalid("page without events")


def _readable(events: Iterable[Any]) -> Iterable[JobEvent]:
    for event in events:
        try:
            yield EVENT.unpack(dict(event) if isinstance(event, dict) else {})
        except Invalid:
            continue  # of a kind that this version does not know


# --- Words


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
