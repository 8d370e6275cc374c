"""`elastic-agent status`: how a job is, from an agent or from the store. It only asks, and never joins.

Which source is taken: `--agent` names an agent; an endpoint, on the command line or in a file named there, means the
store; else all agents on this machine that belong to this user, and where there is none, the store that the
environment names, if it does. A JOB is looked for among the agents here, too, and then in the pool's store. The agent's
own command line with `status` before it works: what it would run is left aside.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ...rendezvous.records import Endpoint
from ...rendezvous.text import NAME
from ..common.exits import CommandCode
from ..configuration.config import CONFIG_FILE, HELP, SCRIPT, ConfigError, Problem
from ..configuration.derive import resolve_meeting_place, resolve_pool
from ..configuration.load import read_argv, read_environ
from ..configuration.parse import Group, Option, Parser, duration, read_endpoint
from ..configuration.rendezvous import (
    ENDPOINT,
    ETCD_OPTIONS,
    MASTER_ADDR,
    MEETING,
    STANDALONE,
    RendezvousConfig,
)
from ..configuration.settings import Settings
from ..observability.job_report import SCHEMA, JobReport, Watch, as_json
from ..observability.sources import AgentsSource, CannotShow, Found, Source, StoreSource
from ..observability.status_text import Screen, lines
from ..workers.processes.run_files import agents_here, run_directory_parents
from .store_command import command_help, one_line_errors, pause

_USAGE = """\
usage: elastic-agent status [--json] [--watch[=SECONDS]] [--agent HOST:PORT]
       elastic-agent status [...] --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]
       elastic-agent status JOB [...] [--pool NAME] [--rdzv-endpoint ...]

Shows what a job does and why: its state and generation, the last change and its cause, restarts, checkpoint, and every
node. Without an endpoint it asks the agents on this machine; with one, the store, with the options of the agents. JOB
is looked for among the agents on this machine, and then in the pool's store; with --pool or an endpoint only there.
"""

_INTERVAL = "2"


def _read_interval(text: str) -> float:
    return duration(0.1).parse(_INTERVAL if text == "true" else text)


def _read_agent(text: str) -> Endpoint:
    found = read_endpoint(text)
    if not found.port:
        raise ValueError("write its port, too: HOST:PORT")
    return found


STATUS_OPTIONS = Group("status")
AGENT: Option[Endpoint | None] = STATUS_OPTIONS.option(
    "agent",
    Parser("host:port", _read_agent),
    "ask the agent whose metrics are served there; its log says where",
    metavar="HOST:PORT",
)
JSON = STATUS_OPTIONS.flag("json", "one JSON document instead of text; with --watch one in each line")
WATCH: Option[float | None] = STATUS_OPTIONS.option(
    "watch",
    Parser(duration(0.1).expects, _read_interval),
    f"look again and again, every {_INTERVAL} s or as often as said, until Ctrl-C",
    metavar="[=DURATION]",
    flag=True,
)
TIMEOUT: Option[float] = STATUS_OPTIONS.option(
    "timeout", duration(0.1), "how long the store, and then the agents, may take to answer", default="3s"
)

_OF_THE_STORE = [option for option in (*MEETING, *ETCD_OPTIONS) if option is not STANDALONE]


def main(words: Sequence[str]) -> int:
    """Returns a `CommandCode`."""
    job = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(_with_interval_attached(words[1:] if job is not None else words), STATUS_OPTIONS)
    if HELP in command_line:
        print(command_help(_USAGE, CommandCode, STATUS_OPTIONS))
        return CommandCode.DONE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        source = choose_source(command_line, os.environ, job)
        watch = Watch(source, command_line[TIMEOUT].value, time.monotonic)
        screen = _json_screen if command_line[JSON].value else _text_screen
        with one_line_errors(CommandCode.INTERRUPTED):
            return _show(watch, screen, command_line[WATCH].value)
    except ConfigError as error:
        print(f"elastic-agent status: {error}", file=sys.stderr)
        return CommandCode.BAD_CONFIG
    except BrokenPipeError:
        return CommandCode.OUTPUT_CLOSED


# --- Which source


def choose_source(command_line: Settings, environ: Mapping[str, str], job: str | None = None) -> Source:
    """`job` is the only one to show. Raises ConfigError with all problems."""
    agent, timeout_s = command_line[AGENT].value, command_line[TIMEOUT].value
    if job is not None:
        return _one_job(job, command_line, environ)
    about_store = [command_line[option].origin for option in _OF_THE_STORE if option in command_line]
    if not about_store and CONFIG_FILE not in command_line and SCRIPT in command_line:
        advice = "leave it out, or write --agent HOST:PORT to ask one agent"
        command_line.problems.append(command_line[SCRIPT].problem("only options", advice))
    if agent is not None and about_store:
        advice = f"leave out either it or {', '.join(about_store)}"
        command_line.problems.append(command_line[AGENT].problem("an agent or the store to ask", advice))
    if agent is not None or not (about_store or CONFIG_FILE in command_line):
        if command_line.problems:
            raise ConfigError(command_line.problems)
    else:
        meeting_place = resolve_meeting_place(command_line, environ)
        if meeting_place is not None:
            return StoreSource(meeting_place, timeout_s)
        if about_store:
            advice = "add --rdzv-endpoint as the agents have it, or ask one of them: --agent HOST:PORT"
            raise ConfigError([Problem("rdzv-endpoint", None, "the address of the job's store", advice)])
    if agent is not None:
        return AgentsSource(lambda: [agent], timeout_s, here=False)
    here = _agents_here(timeout_s)
    given = read_environ(environ)
    static = MASTER_ADDR in given and resolve_meeting_place(command_line, environ) is not None
    if ENDPOINT not in given and not static:
        return here
    return _HereOrStore(here, lambda: resolve_meeting_place(command_line, environ), timeout_s)


def _agents_here(timeout_s: float, job: str | None = None) -> Source:
    return AgentsSource(
        lambda: agents_here(run_directory_parents(), os.getuid()), timeout_s, here=True, job=job
    )


def _one_job(job: str, command_line: Settings, environ: Mapping[str, str]) -> Source:
    """Raises ConfigError."""
    if not NAME.fullmatch(job):
        advice = "elastic-agent jobs lists them; or write --agent HOST:PORT to ask one agent"
        command_line.problems.append(Problem("command line", job, "the id of a job of the pool", advice))
    if AGENT in command_line:
        command_line.problems.append(
            command_line[AGENT].problem("a job or an agent", "leave out one of them")
        )
    pool, timeout_s = resolve_pool(command_line, environ), command_line[TIMEOUT].value
    place = replace(pool, pool=pool.job_id, job_id=job)
    if any(option in command_line for option in (*_OF_THE_STORE, CONFIG_FILE)):
        return StoreSource(place, timeout_s)
    return _HereOrStore(_agents_here(timeout_s, job), lambda: place, timeout_s)


class _HereOrStore(Source):
    """The agents on this machine; where there is none, the store that the environment names, or that of the pool."""

    def __init__(
        self, here: Source, meeting_place: Callable[[], RendezvousConfig | None], timeout_s: float
    ) -> None:
        self._here = here
        self._meeting_place = meeting_place
        self._timeout_s = timeout_s
        self._store: StoreSource | None = None

    def jobs(self) -> list[Found]:
        try:
            found = self._here.jobs()
            self.silent = self._here.silent
            return found
        except CannotShow as nothing:
            if nothing.code is not CommandCode.NOT_FOUND:
                raise
            if self._store is None:
                place = self._meeting_place()
                if place is None:
                    raise
                self._store = StoreSource(place, self._timeout_s)
            try:
                return self._store.jobs()
            except CannotShow as error:
                raise CannotShow(error.code, f"{nothing}; {error}") from None


# --- Looking


Seen: TypeAlias = list[JobReport] | CannotShow
"""What one look has brought."""


def _show(
    watch: Watch, screen: Callable[[Seen, Sequence[str], float | None], str], interval_s: float | None
) -> int:
    """Once, or until it is interrupted."""
    while True:
        seen: Seen
        try:
            seen = watch.look()
        except CannotShow as nothing:
            seen = nothing
        text = screen(seen, watch.silent, interval_s)
        if text:
            print(text, flush=True)
        if isinstance(seen, CannotShow) and (interval_s is None or seen.code is CommandCode.BAD_CONFIG):
            print(f"elastic-agent status: {seen}", file=sys.stderr)
            return seen.code
        if interval_s is None:
            return CommandCode.DONE
        pause(interval_s)


def _json_screen(seen: Seen, silent: Sequence[str], interval_s: float | None) -> str:
    """There always is a document, also of a problem."""
    document: dict[str, Any] = {"schema": SCHEMA, "at": round(time.time(), 3), "jobs": [], "problem": None}
    document["notes"] = list(silent)
    if isinstance(seen, CannotShow):
        document["problem"] = {"code": int(seen.code), "name": seen.code.name, "text": str(seen)}
    else:
        document["jobs"] = [as_json(job) for job in seen]
    return json.dumps(document, indent=2 if interval_s is None else None)


def _text_screen(seen: Seen, silent: Sequence[str], interval_s: float | None) -> str:
    """A terminal is drawn anew each time; in a pipe, blocks follow each other."""
    terminal = sys.stdout.isatty()
    again = interval_s is not None
    if isinstance(seen, CannotShow):
        block = [f"elastic-agent status: {seen}"] if again else []
    else:
        size = shutil.get_terminal_size()
        limits = Screen(
            width=size.columns if terminal else None,
            height=(size.lines - 2 - 2 * len(silent)) // len(seen) if terminal and again else None,
            colour=terminal and not os.environ.get("NO_COLOR"),
        )
        block = [line for job in seen for line in (*lines(job, limits), "")][:-1]
        block += ["", *(f"! {text}" for text in silent)] if silent else []
    if again:
        moment = f"{time.strftime('%H:%M:%S')}, again every {interval_s:g} s; Ctrl-C ends"
        block = [*block, "", moment] if terminal else [moment, *block, ""]
    if not terminal or not again:
        return "\n".join(block)
    clear_to_end, clear_below = "\x1b[K", "\x1b[J"
    return "\x1b[H" + "".join(f"{line}{clear_to_end}\n" for line in block) + clear_below


# --- Words


def _with_interval_attached(words: Sequence[str]) -> list[str]:
    """`--watch 5` means `--watch=5`: its value may be left out, which no other option's may."""
    attached: list[str] = []
    for word in words:
        if attached and attached[-1] == "--watch" and re.match(r"[0-9.]", word):
            attached[-1] += f"={word}"
        else:
            attached.append(word)
    return attached
