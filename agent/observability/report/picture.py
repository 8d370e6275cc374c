"""A `Report` as a picture: where the time went, when, and the slowest recoveries. By matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..status.text import span
from .lives import RESTARTING, Use
from .report import Report
from .text import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
MOST_MARKS = 60
"""The most generations that are marked: more would hide the rest."""

_COLOURS: Mapping[Use, str] = {
    Use.PRODUCTIVE: "#2a9d5c",
    Use.REDONE: "#e9c46a",
    Use.SAVING: "#4f8fc0",
    Use.RUNNING: "#8fcfa8",
    Use.DETECT: "#7f0000",
    Use.STOP: "#b30000",
    Use.RENDEZVOUS: "#d7301f",
    Use.BACKOFF: "#ef6548",
    Use.START: "#fc8d59",
    Use.INIT: "#fdbb84",
    Use.LOAD: "#fdd49e",
    Use.FIRST_STEP: "#fee8c8",
    Use.DRAINING: "#9c7fc0",
    Use.WAITING: "#9aa5b1",
    Use.ABSENT: "#d9dde2",
}


class PictureError(Exception):
    """The picture was not drawn; the text says why, and what to do."""


def draw(report: Report, path: Path) -> None:
    """Raises PictureError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError(
            f"a picture needs matplotlib: pip install 'elastic-agent[report]' ({error})"
        ) from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    whole, when, slowest = figure.subplots(3, 1, height_ratios=(1.1, 3, 2.4))
    ettr = f"ETTR {report.ettr:.1%} of" if report.ettr is not None else "no steps reported in"
    figure.suptitle(
        f"{report.run}: {ettr} {span(report.wall_s)}",
        fontsize="x-large",
        x=0.01,
        ha="left",
    )
    _draw_whole(report, whole)
    _draw_timeline(report, when)
    _draw_recoveries(report, slowest)
    figure.legend(*whole.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise PictureError(f"{path}: {error.strerror}") from error


def _draw_whole(report: Report, axes: Axes) -> None:
    left = 0.0
    for use, seconds in report.seconds.items():
        if seconds:
            share = seconds / report.wall_s
            axes.barh(0, share, left=left, color=_COLOURS[use], label=f"{NAMES[use]} {share:.1%}")
            left += share
    axes.set_title("where the time went", loc="left")
    axes.set_xlim(0, 1)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter("{x:.0%}")


def _draw_timeline(report: Report, axes: Axes) -> None:
    _, unit_s, unit = next(row for row in _UNITS if report.wall_s >= row[0])
    edges = [(one.began_at - report.began_at) / unit_s for one in report.timeline]
    edges.append(report.wall_s / unit_s)
    lengths = [one.ended_at - one.began_at for one in report.timeline]
    bottom = [0.0] * len(lengths)
    for use in Use:
        shares = [one.seconds.get(use, 0.0) / s for one, s in zip(report.timeline, lengths, strict=True)]
        if any(shares):
            top = [below + share for below, share in zip(bottom, shares, strict=True)]
            axes.stairs(top, edges, baseline=bottom, fill=True, color=_COLOURS[use])
            bottom = top
    for one in report.generations[1:][-MOST_MARKS:]:
        at = (one.at - report.began_at) / unit_s
        axes.axvline(at, color="black", linewidth=0.5, linestyle=":")
        axes.annotate(
            f"{one.generation} {one.cause}",
            (at, 1.0),
            rotation=60,
            fontsize="xx-small",
            annotation_clip=False,
        )
    axes.set_title("when", loc="left", pad=28)
    axes.set_xlim(0, report.wall_s / unit_s)
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"{unit} since the start")
    axes.yaxis.set_major_formatter("{x:.0%}")


_UNITS = (
    (172_800.0, 86_400.0, "days"),
    (7200.0, 3600.0, "hours"),
    (120.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)
"""The length of a run from which a unit is used, the unit's seconds, and its name."""


def _draw_recoveries(report: Report, axes: Axes) -> None:
    names = [f"{one.generation} {one.cause} on {one.node}" for one in report.recoveries]
    left = [0.0] * len(names)
    for phase in RESTARTING:
        seconds = [one.phases.get(phase, 0.0) for one in report.recoveries]
        axes.barh(names, seconds, left=left, color=_COLOURS[phase])
        left = [before + s for before, s in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_title("slowest recoveries", loc="left")
    axes.set_xlabel("seconds")
