"""Draws `docs/demo.svg` from what `make demo` has printed: `make demo | python docs/demo_picture.py docs/demo.svg`.

Training steps over seconds. A standstill begins with the fault, or with the step after which all workers end, and is as
long as the demo has measured; nothing is drawn that was not printed.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 840, 300, 56, 16, 92, 44
LINE = re.compile(r"\s*([\d.]+) s  (.*)")
FIRST = re.compile(r"training at step (\d+)")
AGAIN = re.compile(r"training again at step (\d+); it stood still for ([\d.]+) s")
ENDS = re.compile(r"all workers end after the same step")
EVENT = re.compile(r"([A-Z][A-Z ]+): ")


@dataclass(frozen=True)
class Run:
    points: list[tuple[float, float]]
    """Seconds and steps."""
    events: list[tuple[float, str]]
    stood: list[float]
    """Seconds, one for each event."""


def read(text: str) -> Run:
    run, stands_since = Run([], [], []), 0.0
    for at_s, what in LINE.findall(text):
        at = float(at_s)
        if found := EVENT.match(what):
            run.events.append((at, found[1].lower()))
            stands_since = at
        elif ENDS.match(what.strip()):
            stands_since = at
        elif found := FIRST.search(what):
            run.points.append((at, float(found[1])))
        elif found := AGAIN.search(what):
            step, stood = float(found[1]), float(found[2])
            run.points.extend([(stands_since, step - 1), (stands_since + stood, step)])
            run.stood.append(stood)
    if not run.points or len(run.stood) != len(run.events):
        sys.exit("this is not the whole of what make demo prints")
    return run


def draw(run: Run) -> str:
    first, last = run.points[0][0], run.points[-1][0]
    most = run.points[-1][1]

    def x(at: float) -> float:
        return LEFT + (at - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(step: float) -> float:
        return HEIGHT - BOTTOM - step / most * (HEIGHT - TOP - BOTTOM)

    line = " ".join(f"{x(at):.1f},{y(step):.1f}" for at, step in run.points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="13" role="img" aria-label="training steps over seconds, with four faults">',
        "<style>text{fill:#57606a}.axis{stroke:#8c959f}.event{stroke:#cf222e;stroke-dasharray:3 3}"
        ".steps{fill:none;stroke:#0969da;stroke-width:2.5}.title{font-weight:bold}"
        "@media(prefers-color-scheme:dark){text{fill:#c9d1d9}.steps{stroke:#58a6ff}.event{stroke:#ff7b72}}</style>",
    ]
    for row, ((at, name), stood) in enumerate(zip(run.events, run.stood, strict=True)):
        height = 18 + 18 * row
        parts.append(
            f'<line class="event" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{height + 5}" y2="{HEIGHT - BOTTOM}"/>'
        )
        side = "start" if x(at) < WIDTH * 0.6 else "end"
        shift = 5 if side == "start" else -5
        parts.append(
            f'<text x="{x(at) + shift:.1f}" y="{height + 10}" text-anchor="{side}">'
            f'<tspan class="title">{name}</tspan>: training stood still for {stood:.2f} s</text>'
        )
    parts += [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>',
        f'<polyline class="steps" points="{line}"/>',
        f'<text x="{LEFT - 8}" y="{y(most) + 5:.1f}" text-anchor="end">{most:.0f}</text>',
        f'<text x="{LEFT - 8}" y="{y(most / 2):.1f}" text-anchor="end">steps</text>',
        f'<text x="{LEFT - 8}" y="{y(0):.1f}" text-anchor="end">0</text>',
    ]
    for second in range(0, int(last - first) + 1, 2):
        place = x(first + second)
        parts.append(
            f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{second} s</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(read(sys.stdin.read())))
