"""`elastic-agent status`: how a job is, from an agent or from the store. It only asks, and never joins.

Which source is taken: `--agent` names an agent; an endpoint, on the command line or in a file named there, means the
store; else all agents on this machine that belong to this user, and where there is none, the store that the
environment names, if it does. A JOB is looked for among the agents here, too, and then in the pool's store. The agent's
own command line with `status` before it works: what it would run is left aside.

The text says first what the job does, then its nodes, then what is wrong. No text of another program reaches the
terminal but as printable characters.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...rendezvous.records import Endpoint
from ...rendezvous.text import NAME, counted
from ..common.exits import CannotDo
from ..configuration.config import CONFIG_FILE, SCRIPT, ConfigError, Problem
from ..configuration.derive import resolve_meeting_place, resolve_pool
from ..configuration.load import Settings
from ..configuration.parse import Option, OptionGroup, Parser, duration, read_endpoint
from ..configuration.rendezvous import (
    ETCD_OPTIONS,
    MEETING,
    STANDALONE,
    RendezvousConfig,
)
from ..machine.agents_here import agents_here, run_directory_parents
from ..observability.job_report import SCHEMA, JobReport, NodeReport, RestartReport, as_json, look
from ..observability.sources import AgentsSource, JobSource, StoreSource
from .command import columns, printable, run_command

_USAGE = """\
usage: elastic-agent status [--json] [--agent HOST:PORT]
       elastic-agent status [...] --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]
       elastic-agent status JOB [...] [--pool NAME] [--rdzv-endpoint ...]

Shows what a job does and why: its state and generation, the last change and its cause, restarts, checkpoint, and every
node. Without an endpoint it asks the agents on this machine; with one, the store, with the options of the agents. JOB
is looked for among the agents on this machine, and then in the pool's store; with --pool or an endpoint only there.
"""


def _read_agent(text: str) -> Endpoint:
    found = read_endpoint(text)
    if not found.port:
        raise ValueError("write its port, too: HOST:PORT")
    return found


STATUS_OPTIONS = OptionGroup("status")
AGENT: Option[Endpoint | None] = STATUS_OPTIONS.option(
    "agent",
    Parser("host:port", _read_agent, metavar="HOST:PORT"),
    "ask the agent whose metrics are served there; its log says where",
)
JSON = STATUS_OPTIONS.flag("json", "one JSON document instead of text")
TIMEOUT: Option[float] = STATUS_OPTIONS.option(
    "timeout", duration(0.1), "how long the store, and then the agents, may take to answer", default="3s"
)

_OF_THE_STORE = [option for option in (*MEETING, *ETCD_OPTIONS) if option is not STANDALONE]


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    return run_command("status", words, _USAGE, STATUS_OPTIONS, _work, takes="[JOB]", of_store=True)


def _work(job: str, command_line: Settings) -> None:
    source = choose_source(command_line, os.environ, job or None)
    jobs: list[JobReport] = []
    problem: CannotDo | None = None
    try:
        jobs = look(source, command_line[TIMEOUT].value)
    except CannotDo as nothing:
        problem = nothing
    if command_line[JSON].value:
        print(_document(jobs, source.silent, problem), flush=True)
    else:
        blocks = ["\n".join(lines(one)) for one in jobs]
        if source.silent:
            blocks.append("\n".join(f"! {text}" for text in source.silent))
        print("\n\n".join(blocks), flush=True, end="\n" if blocks else "")
    if problem is not None:
        raise problem


# --- Which source


def choose_source(command_line: Settings, environ: Mapping[str, str], job: str | None = None) -> JobSource:
    """`job` is the only one to show. Raises ConfigError with all problems."""
    agent, timeout_s = command_line[AGENT].value, command_line[TIMEOUT].value
    store_options = any(option in command_line for option in _OF_THE_STORE)
    about_store = store_options or CONFIG_FILE in command_line
    if agent is not None and (job is not None or store_options):
        problem = command_line[AGENT].problem("an agent, a job, or the store to ask", "leave out the others")
        command_line.problems.append(problem)
    if job is not None:
        if not NAME.fullmatch(job):
            advice = "elastic-agent jobs lists them; or write --agent HOST:PORT to ask one agent"
            command_line.problems.append(Problem("command line", job, "the id of a job of the pool", advice))
        pool = resolve_pool(command_line, environ)
        place = replace(pool, pool=pool.job_id, job_id=job)
        return StoreSource(place, timeout_s) if about_store else _agents_here(timeout_s, lambda: place, job)
    if not about_store and SCRIPT in command_line:
        advice = "leave it out, or write --agent HOST:PORT to ask one agent"
        command_line.problems.append(command_line[SCRIPT].problem("only options", advice))
    if agent is None and about_store:
        meeting_place = resolve_meeting_place(command_line, environ)
        if meeting_place is not None:
            return StoreSource(meeting_place, timeout_s)
        if CONFIG_FILE not in command_line:
            advice = "add --rdzv-endpoint as the agents have it, or ask one of them: --agent HOST:PORT"
            raise ConfigError([Problem("rdzv-endpoint", None, "the address of the job's store", advice)])
    if command_line.problems:
        raise ConfigError(command_line.problems)
    if agent is not None:
        return AgentsSource(lambda: [agent], timeout_s, here=False)
    return _agents_here(timeout_s, lambda: resolve_meeting_place(command_line, environ))


def _agents_here(
    timeout_s: float, place: Callable[[], RendezvousConfig | None], job: str | None = None
) -> JobSource:
    """Where there is none, the store is asked that the environment names, or that of the pool."""
    here = partial(agents_here, run_directory_parents(), os.getuid())
    return AgentsSource(here, timeout_s, here=True, job=job, otherwise=place)


def _document(jobs: Iterable[JobReport], silent: Iterable[str], problem: CannotDo | None) -> str:
    """There always is one, also of a problem."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "at": round(time.time(), 3),
        "jobs": [as_json(job) for job in jobs],
        "problem": None,
        "notes": list(silent),
    }
    if problem is not None:
        document["problem"] = {"code": int(problem.code), "name": problem.code.name, "text": str(problem)}
    return json.dumps(document, indent=2)


# --- Words


MOST_NOTES = 12
_TITLES = ("NODE", "RANKS", "STATE", "STEP", "CHECKPOINT", "LEASE", "AGENT")


def lines(report: JobReport) -> list[str]:
    """All of it."""
    notes = [f"! {printable(note)}" for note in report.notes]
    if len(notes) > MOST_NOTES:
        notes = [*notes[:MOST_NOTES], f"! and {len(notes) - MOST_NOTES} more"]
    if any(node.coordinates for node in report.nodes):
        notes.append("* coordinates: decides on the next world")
    return [*_head(report), "", *_table(report.nodes), *([""] if notes else []), *notes]


def span(seconds: float) -> str:
    """A duration in the two units that matter.

    >>> span(0.42), span(59.6), span(312), span(11_220), span(187_200)
    ('0.4 s', '1 min 00 s', '5 min 12 s', '3 h 07 min', '2 d 04 h')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, below, its_name in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below:02d} {its_name}"
    return f"{whole} s"


def _head(report: JobReport) -> list[str]:
    state = report.state if report.result is None else f"{report.state} ({report.result.value})"
    if state == "running" and not report.step:
        state = "running (no steps reported)"
    age_s = report.phase_age_s if report.result is None else None
    since = f" for {span(age_s)}" if age_s is not None else ""
    title = f"job {report.job}: {state}"
    title += f", generation {report.generation}{since}" if report.generation else " for its first world"
    rows = []
    if report.generation:
        master = f", master {report.master}" if report.master is not None else ""
        nodes, workers = counted(report.group_world_size, "node"), counted(report.world_size, "worker")
        rows.append(("world", f"{nodes}, {workers}{master}"))
    if report.waiting_for:
        rows.append(("waiting", report.waiting_for))
    if report.cause is not None:
        text, known_as = report.cause.text, report.cause.known_as or ""
        rows.append(("last change", text if known_as in text else f"{text} ({known_as})"))
    if report.generation:
        rows.append(("restarts", _restarts(report.restarts)))
    if report.step:
        rows.append(("step", str(report.step)))
    if report.checkpoint is not None:
        saved_s = report.checkpoint.age_s
        age = f", saved {span(saved_s)} ago" if saved_s is not None else ", loaded"
        rows.append(("checkpoint", f"step {report.checkpoint.step}{age}"))
    rows.append(("source", report.asked))
    return [printable(title), *(f"  {name:<13}{printable(text)}" for name, text in rows)]


def _restarts(restarts: RestartReport) -> str:
    used = f"{counted(restarts.failures, 'failure')} so far"
    pause = f"; the next start waits {span(restarts.backoff_s)}" if restarts.backoff_s else ""
    if restarts.limit is not None:
        return f"{used}, {restarts.left} left of {restarts.limit}{pause}"
    streak = f", {restarts.fruitless} in a row without progress" if restarts.fruitless else ""
    return f"{used}{streak}; gives up after {restarts.fruitless_left} more without progress{pause}"


def _table(nodes: Iterable[NodeReport]) -> list[str]:
    return [*columns([_TITLES, *([printable(cell) for cell in _cells(node)] for node in nodes)])]


def _cells(node: NodeReport) -> tuple[str, ...]:
    status = node.status
    name = f"{node.node} *" if node.coordinates else node.node
    state = f"{node.state}, leaving" if node.leaving and node.state != "draining" else node.state
    address = str(node.address) if node.address is not None else "-"
    if status is None:
        return (name, node.ranks or "-", state, "-", "-", "-", address)
    saved = status.checkpoint
    checkpoint = str(saved.step) if saved is not None else "-"
    if saved is not None and saved.age_s is not None:
        checkpoint += f", {span(saved.age_s)}"
    lease = span(status.lease_age_s) if status.lease_age_s is not None else "none"
    return (name, node.ranks or "-", state, str(status.step or "-"), checkpoint, lease, address)
