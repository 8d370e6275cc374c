"""Each kind of failure and of hang on real processes: how long until it is seen, who is named, what is done.

    make faults                                      the table of docs/runbook.md, torchrun beside it
    python benchmarks/faults.py asleep killed        some of them
    python benchmarks/faults.py --markdown           put the table into docs/runbook.md

Two nodes of two workers train with gloo on this machine; rank 1 on node `a` does what the row says (`faults_job.py`).
What was seen and named comes from the journals that the agents write; of torchrun it is what its agents print.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from local_run import LAUNCHERS, Run

JOB = Path(__file__).with_name("faults_job.py")
DOCUMENT = Path(__file__).parent.parent / "docs" / "runbook.md"
PLACE = "faults"
PATIENCE_S = 45.0
"""More than the 30 s after which a script that reports no steps is suspected. gloo waits for 30 minutes."""

ENDS = (
    *("killed", "segfault", "exception", "assertion", "import-error", "cuda-memory", "port-taken"),
    *("disk-full", "silent-exit", "bad-node"),
)
HANGS = (
    *("asleep", "holding-gil", "busy", "stopped", "deadlock", "reading-socket", "data-loader"),
    *("extra-collective", "other-group"),
)
MUTE = ("asleep,mute", "stopped,mute", "busy,mute")
SEEN = {"failure", "verdict"}


@dataclass(frozen=True)
class Outcome:
    """Seconds count from the fault; None: not within PATIENCE_S."""

    launcher: str
    kind: str
    seen_s: float | None
    trains_s: float | None
    named: str
    done: str
    notes: list[str] = field(default_factory=list)


def try_out(launcher: str, kind: str) -> Outcome:
    run = Run(launcher, JOB)
    try:
        return _try_out(run, kind)
    finally:
        for one in run.history():  # a stopped one does not see SIGKILL's group otherwise
            _signal(one["pid"], signal.SIGCONT)
        run.close()


def _try_out(run: Run, kind: str) -> Outcome:
    nodes = ("a", "bad", "c") if kind == "bad-node" else ("a", "b")
    count = "2" if kind != "bad-node" else "1:3"
    ours = run.launcher == "elastic-agent"
    options = [f"--log-dir={run.folder / 'logs'}"] if ours else ["--max-restarts=3"]
    for node in nodes:
        run.join(node, count, "--nproc-per-node=2", *options, mode=kind)
    fault = run.wait_for(lambda: run.history("fault"), "fault")
    if fault is None:
        return Outcome(run.launcher, kind, None, None, "", "no fault came")
    at = fault[0]["at"]

    def goes_on() -> bool:
        over = all(code is not None for code in run.exit_codes().values())
        return over or bool(run.history("step", after=_last_fault(run)) and run.history(after=at))

    went_on = run.wait_for(goes_on, "step after it", PATIENCE_S)
    steps = [one["at"] for one in run.history("step", after=_last_fault(run))]
    trains_s = min(steps) - at if went_on and steps and run.history(after=at) else None
    seen_s, named, done = _ours(run, at) if ours else _theirs(run, at)
    return Outcome(run.launcher, kind, seen_s, trains_s, named, done)


def _last_fault(run: Run) -> float:
    return float(run.history("fault")[-1]["at"])


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _ours(run: Run, fault_at: float) -> tuple[float | None, str, str]:
    """From the journals of all nodes, which have wall-clock instants."""
    offset = _wall_clock_offset()
    events: list[dict[str, Any]] = []
    for file in (run.folder / "logs").rglob("events-*.jsonl"):
        events += [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    events = sorted((one for one in events if one["at"] - offset >= fault_at), key=lambda one: one["at"])
    seen = [one for one in events if one["kind"] in SEEN]
    if not seen:
        return None, "", "nothing was seen"
    named = next((one for one in seen if one.get("rank") is not None), seen[0])
    who = f"rank {named['rank']} on node {named['about']}" if named.get("rank") is not None else named["text"]
    cause = named.get("cause") or ""
    excluded = next((one["text"] for one in events if one["kind"] == "exclusion"), "")
    codes = {code for code in run.exit_codes().values() if code is not None}
    restarted = "restarted" if run.history(after=fault_at) else "left alone until a later limit"
    did = excluded or (f"ended with {sorted(codes)}" if codes else restarted)
    return seen[0]["at"] - offset - fault_at, f"{who}: {cause}" if cause else who, did


def _theirs(run: Run, fault_at: float) -> tuple[float | None, str, str]:
    starts = run.history(after=fault_at)
    said = re.findall(
        r"local_rank: (\d+) \(pid: \d+\)|rank\s*: (\d+) \(local_rank", "".join(map(run.log, run.agents))
    )
    codes = [code for code in run.exit_codes().values() if code is not None]
    if not starts and not codes:
        return None, "", f"nothing within {PATIENCE_S:g} s"
    seen_s = min(one["at"] for one in starts) - fault_at if starts else None
    named = f"rank {next(filter(None, said[0]))}" if said else "an exit code"
    return seen_s, named, "restarted" if starts and not codes else f"ended with {sorted(set(codes))}"


def _wall_clock_offset() -> float:
    return time.time() - time.monotonic()


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| what happened | elastic-agent: seen after | named | done | trains again after | torchrun |",
        "|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys(one.kind for one in outcomes)
    for kind in kinds:
        ours = next((one for one in outcomes if one.kind == kind and one.launcher == "elastic-agent"), None)
        theirs = next((one for one in outcomes if one.kind == kind and one.launcher == "torchrun"), None)
        cells = [kind.replace(",mute", ", no `step()`").replace("-", " ")]
        cells += [_seconds(ours.seen_s), ours.named, ours.done, _seconds(ours.trains_s)] if ours else [""] * 4
        cells.append(
            f"{theirs.done}{f', trains after {_seconds(theirs.trains_s)}' if theirs.trains_s else ''}"
            if theirs
            else ""
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=[*ENDS, *HANGS, *MUTE])
    parser.add_argument("--only", choices=LAUNCHERS, help="one launcher alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run here")
    parser.add_argument("--markdown", action="store_true", help="put the table into docs/runbook.md")
    chosen = parser.parse_args()
    outcomes: list[Outcome] = []
    for kind in chosen.kinds:
        for launcher in [chosen.only] if chosen.only else LAUNCHERS:
            outcomes.append(try_out(launcher, kind))
            print(f"  {outcomes[-1]}", flush=True)
            report.keep(outcomes, chosen.json)
    how = "`make faults`, one run of each"
    report.publish(table(outcomes), how, DOCUMENT if chosen.markdown else None, PLACE)


if __name__ == "__main__":
    main()
