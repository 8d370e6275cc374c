"""`elastic-agent status`: how a job is, from an agent or from the store. It only asks, and never joins.

Which source is taken: `--agent` names an agent; an endpoint, on the command line or in a file named there, means the
store; else all agents on this machine that belong to this user, and where there is none, the store that the
environment names, if it does. A JOB is looked for among the agents here, too, and then in the pool's store. The agent's
own command line with `status` before it works: what it would run is left aside.

The text says first what the job does, then its nodes, then what is wrong. No text of another program reaches the
terminal but as printable characters. Without a width nothing is cut, so that the lines can be searched.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ...rendezvous.coordinator import stragglers
from ...rendezvous.coordinator.exclusions import in_words, left_out
from ...rendezvous.records import Endpoint
from ...rendezvous.text import NAME, counted, shortened
from ..common.exits import ExitCode
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
from ..observability.job_report import SCHEMA, JobReport, NodeReport, RestartReport, Watch, as_json
from ..observability.sources import AgentsSource, CannotShow, Found, Source, StoreSource, Unreachable
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
    """Returns an `ExitCode`."""
    job = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(_with_interval_attached(words[1:] if job is not None else words), STATUS_OPTIONS)
    if HELP in command_line:
        print(command_help(_USAGE, STATUS_OPTIONS))
        return ExitCode.SUCCESS
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        source = choose_source(command_line, os.environ, job)
        watch = Watch(source, command_line[TIMEOUT].value, time.monotonic)
        screen = _json_screen if command_line[JSON].value else _text_screen
        with one_line_errors(ExitCode.STOPPED_BY_SIGINT):
            return _show(watch, screen, command_line[WATCH].value)
    except ConfigError as error:
        print(f"elastic-agent status: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except BrokenPipeError:
        return ExitCode.OUTPUT_CLOSED


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
            if nothing.code is not ExitCode.NOT_FOUND:
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
        if isinstance(seen, CannotShow) and (interval_s is None or seen.code is ExitCode.BAD_CONFIG):
            print(f"elastic-agent status: {seen}", file=sys.stderr)
            return seen.code
        if interval_s is None:
            return ExitCode.SUCCESS
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


MOST_NOTES = 12

_RED, _YELLOW, _GREEN, _BOLD, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[1m", "\x1b[0m"
_COLOURS = {
    "running": _GREEN,
    "succeeded": _GREEN,
    "failed": _RED,
    "gone": _RED,
    "lost": _RED,
    "stopped": _RED,
    "no answer": _RED,
    "standby": "",
    "excluded": _YELLOW,
    "hidden": "",
}
"""By state; every other one is on its way to somewhere."""


@dataclass(frozen=True, slots=True)
class Screen:
    """What can be shown. None: no limit."""

    width: int | None = None
    height: int | None = None
    colour: bool = False


def lines(report: JobReport, screen: Screen) -> list[str]:
    """All of it. With a height, healthy nodes give way to those that are not."""
    head = _head(report, screen)
    notes = _notes(report, screen)
    room = screen.height - len(head) - len(notes) - 3 if screen.height is not None else None
    table = _table(report.nodes, screen, room)
    return [*head, "", *table, *([""] if notes else []), *notes]


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


# --- What the job does


def _head(report: JobReport, screen: Screen) -> list[str]:
    state = report.state if report.result is None else f"{report.state} ({report.result.value})"
    if state == "running" and not report.step:
        state = "running (no steps reported)"
    since = (
        f" for {span(report.phase_age_s)}" if report.phase_age_s is not None and report.result is None else ""
    )
    title = f"job {_bold(report.job, screen)}: {_paint(state, report.state, screen)}"
    title += f", generation {report.generation}{since}" if report.generation else " for its first world"
    rows = []
    if report.generation:
        rows.append(("world", _world(report)))
    if report.waiting_for:
        rows.append(("waiting", report.waiting_for))
    if report.cause is not None:
        text, known_as = report.cause.text, report.cause.known_as or ""
        rows.append(("last change", text if known_as in text else f"{text} ({known_as})"))
    rows.append(("restarts", _restarts(report.restarts)))
    if report.step:
        rows.append(("step", str(report.step)))
    checkpoint = report.checkpoint
    if checkpoint is not None:
        age = f", saved {span(checkpoint.age_s)} ago" if checkpoint.age_s is not None else ", loaded"
        rows.append(("checkpoint", f"step {checkpoint.step}{age}"))
    rows.append(("source", report.asked))
    return [title, *(line for name, text in rows for line in _wrapped(f"  {name:<13}", _safe(text), screen))]


def _world(report: JobReport) -> str:
    master = f", master {report.master}" if report.master is not None else ""
    nodes = counted(report.group_world_size, "node")
    return f"{nodes}, {counted(report.world_size, 'worker')}{master}"


def _restarts(restarts: RestartReport) -> str:
    used = f"{counted(restarts.failures, 'failure')} so far"
    pause = f"; the next start waits {span(restarts.backoff_s)}" if restarts.backoff_s else ""
    if not restarts.limit_known:
        return f"{used}; the limit is not known, no agent answers"
    if restarts.limit is not None:
        return f"{used}, {restarts.left} left of {restarts.limit}{pause}"
    streak = f", {restarts.fruitless} in a row without progress" if restarts.fruitless else ""
    return f"{used}{streak}; gives up after {restarts.fruitless_left} more without progress{pause}"


# --- Its nodes


_TITLES = ("NODE", "RANKS", "STATE", "STEP", "CHECKPOINT", "LEASE", "AGENT")


def _table(nodes: Sequence[NodeReport], screen: Screen, room: int | None) -> list[str]:
    shown, left_out = _chosen(nodes, room)
    rows = [list(_TITLES), *([_safe(cell) for cell in _cells(node)] for node in shown)]
    widths = _widths(rows)
    if screen.width is not None:
        # Names are the longest cells, and still differ when they are cut.
        most = max(12, widths[0] - max(0, sum(widths) + 2 * (len(widths) - 1) - screen.width))
        rows = [[_cut(row[0], most), *row[1:]] for row in rows]
        widths = _widths(rows)
    out = []
    for number, row in enumerate(rows):
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if number:
            padded[2] = _paint(row[2], shown[number - 1].state, screen) + " " * (widths[2] - len(row[2]))
        out.append("  ".join(padded).rstrip())
    if left_out:
        out.append(f"... and {counted(left_out, 'node')} more; a pipe shows all: elastic-agent status | less")
    return out


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _chosen(nodes: Sequence[NodeReport], room: int | None) -> tuple[list[NodeReport], int]:
    """In their order; where there is no room for all, those that need attention come first."""
    if room is None or len(nodes) <= room:
        return list(nodes), 0
    healthy = ("running", "standby", "succeeded")
    by_need = sorted(
        range(len(nodes)), key=lambda at: (nodes[at].state in healthy, not nodes[at].coordinates)
    )
    kept = sorted(by_need[: max(1, room - 1)])
    return [nodes[at] for at in kept], len(nodes) - len(kept)


def _cells(node: NodeReport) -> tuple[str, ...]:
    status = node.status
    name = f"{node.node} *" if node.coordinates else node.node
    state = f"{node.state}, leaving" if node.leaving and node.state != "draining" else node.state
    address = str(node.address) if node.address is not None else "-"
    if status is None:
        state += f" {span(node.silent_s)}" if node.silent_s is not None else ""
        return (name, node.ranks or "-", state, "-", "-", "-", address)
    checkpoint = "-"
    if status.checkpoint is not None:
        age_s = status.checkpoint.age_s
        checkpoint = (
            f"{status.checkpoint.step}, {span(age_s)}" if age_s is not None else str(status.checkpoint.step)
        )
    lease = span(status.lease_age_s) if status.lease_age_s is not None else "none"
    return (name, node.ranks or "-", state, str(status.step or "-"), checkpoint, lease, address)


# --- What is wrong


def _notes(report: JobReport, screen: Screen) -> list[str]:
    notes = [
        *_absences(report.nodes),
        *_waiting_members(report),
        *_notices(report.nodes),
        *_checks(report.nodes),
        *_missing_replicas(report.nodes),
        *_old_leases(report.nodes),
        *_exclusions(report),
        *_stragglers(report),
        *report.notes,
    ]
    if not report.complete:
        notes.append("the coordinator does not answer: nodes beyond the world may be missing here")
    shown = notes[:MOST_NOTES]
    if len(notes) > len(shown):
        shown.append(f"and {len(notes) - len(shown)} more")
    legend = ["* coordinates: decides on the next world"] if any(n.coordinates for n in report.nodes) else []
    return [*(line for note in shown for line in _wrapped("! ", _safe(note), screen)), *legend]


def _exclusions(report: JobReport) -> Iterator[str]:
    if report.result is None:  # all exclusions end with the job
        yield from (f"node {one.node} is {in_words(one)}" for one in left_out(report.exclusions).values())


def _stragglers(report: JobReport) -> Iterator[str]:
    for straggler in report.stragglers:
        yield stragglers.in_words(straggler, report.usual_us or 0)


def _absences(nodes: Iterable[NodeReport]) -> Iterator[str]:
    known = {True: "; the store still has its record", False: "; its lease has ended", None: ""}
    for node in nodes:
        if node.silence not in (None, Unreachable.HIDDEN):
            yield f"node {node.node}: {node.silence.sentence.format(http=node.address)}{known[node.has_lease]}"


def _waiting_members(report: JobReport) -> Iterator[str]:
    """Members without workers, while the job as a whole does not wait."""
    for node in report.nodes:
        waiting_for = node.status.waiting_for if node.status is not None else ""
        if waiting_for and node.member and node.state == "joining" and not report.waiting_for:
            yield f"node {node.node} has no workers, waiting: {waiting_for}"


def _old_leases(nodes: Iterable[NodeReport]) -> Iterator[str]:
    for node in nodes:
        status = node.status
        if status is not None and status.lease_age_s is not None and status.lease_age_s > status.lease_ttl_s:
            yield (
                f"node {node.node}: its lease was last confirmed {span(status.lease_age_s)} ago and lives "
                f"{status.lease_ttl_s:g} s: it does not reach the store"
            )


def _notices(nodes: Iterable[NodeReport]) -> Iterator[str]:
    for node in nodes:
        status = node.status
        if status is not None and status.notice:
            left = (
                f"{span(status.notice_s)} are left" if status.notice_s is not None else "no deadline is known"
            )
            yield f"node {node.node}: {status.notice}; {left}"


def _checks(nodes: Iterable[NodeReport]) -> Iterator[str]:
    for node in nodes:
        for check in node.status.checks if node.status is not None else ():
            yield f"node {node.node}: check {check.check} {check.outcome}s: {check.summary}"


def _missing_replicas(nodes: Iterable[NodeReport]) -> Iterator[str]:
    for node in nodes:
        if node.status is not None and node.status.partners_unreachable:
            who = shortened(node.status.partners_unreachable)
            yield (
                f"node {node.node}: its shards have no replica on {who}: if it is lost now, the job may go back to the "
                "newest checkpoint on disk"
            )


# --- Words


def _safe(text: str) -> str:
    """One line of printable characters."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def _wrapped(first: str, text: str, screen: Screen) -> Iterable[str]:
    if screen.width is None or len(first) + len(text) <= screen.width:
        return [first + text]
    rest = " " * len(first)
    width = max(40, screen.width)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _bold(text: str, screen: Screen) -> str:
    return f"{_BOLD}{text}{_PLAIN}" if screen.colour else text


def _paint(text: str, state: str, screen: Screen) -> str:
    colour = _COLOURS.get(state, _YELLOW) if screen.colour else ""
    return f"{colour}{text}{_PLAIN}" if colour else text
