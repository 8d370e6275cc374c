"""A `JobReport` as lines for a person: first what the job does, then its nodes, then what is wrong.

A pure function of the report and of what the terminal can show. No text of another program reaches the terminal
but as printable characters. Without a width nothing is cut, so that the lines can be searched.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...rendezvous.coordinator import stragglers
from ...rendezvous.coordinator.exclusions import in_words, left_out
from ...rendezvous.text import counted, shortened
from .job_report import JobReport, NodeReport, RestartReport
from .sources import Unreachable

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
    lease = span(status.lease_s) if status.lease_s is not None else "none"
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
        if status is not None and status.lease_s is not None and status.lease_s > status.lease_ttl_s:
            yield (
                f"node {node.node}: its lease was last confirmed {span(status.lease_s)} ago and lives "
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
