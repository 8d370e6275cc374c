"""`elastic-agent files KIND DIR`: write the files for a deployment out of the installed package.

They are those of `deploy/`, for this version of the agent: a systemd unit, a Helm chart, a Grafana dashboard, rules and
scrape configuration for Prometheus, a Dockerfile, batch scripts for Slurm. A file that is there already, with another
content, is never replaced unless `--force` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.exits import ExitCode, exit_codes

DEPLOY = Path(__file__).parents[2] / "deploy"

KINDS = {
    "systemd": "the units elastic-agent-pool (a daemon) and elastic-agent@ (one job), with examples of their files",
    "helm": "the chart for Kubernetes",
    "grafana": "the dashboard, and its provisioning",
    "prometheus": "alert and recording rules, their tests, and a scrape configuration",
    "docker": "the Dockerfile",
    "slurm": "batch scripts: a job that is queued again, and one that goes on without a lost node",
}

_USAGE = """\
usage: elastic-agent files KIND DIR [--force]

Writes the files of one kind of deployment into DIR, which is made if it is not there. Files there with another content
are kept, and named, unless --force is given.
"""


def main(words: Sequence[str]) -> int:
    """Returns an `ExitCode`."""
    if "--help" in words or "-h" in words:
        print(_help())
        return ExitCode.SUCCESS
    names = [word for word in words if word != "--force"]
    if names[:1] == ["shell"]:
        advice = "write elastic-agent --print-completion bash, or --help-all in place of the manual page"
        print(f"elastic-agent files: no such kind any more; {advice}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    if len(names) != 2 or names[0] not in KINDS or names[1].startswith("-"):
        kinds = ", ".join(KINDS)
        print(
            f"elastic-agent files: expected KIND DIR, with KIND one of {kinds}; see --help", file=sys.stderr
        )
        return ExitCode.BAD_CONFIG
    try:
        contents = contents_of(names[0])
    except OSError as error:
        print(f"elastic-agent files: {error.filename}: {error.strerror}", file=sys.stderr)
        return ExitCode.NOT_HERE
    outcome = write(contents, Path(names[1]), replace="--force" in words)
    try:
        print("".join(f"{file}\n" for file in outcome.there), end="", flush=True)
    except OSError as error:
        problem = f"the output cannot be written ({error.strerror}): the names of the files are not shown"
        print(f"elastic-agent files: {problem}", file=sys.stderr)
    if outcome.problem:
        print(f"elastic-agent files: {outcome.problem}", file=sys.stderr)
        return ExitCode.NOT_HERE
    for file in outcome.kept:
        print(
            f"elastic-agent files: {file} has another content and is kept; --force replaces it",
            file=sys.stderr,
        )
    return ExitCode.FAILED if outcome.kept else ExitCode.SUCCESS


def contents_of(kind: str) -> dict[Path, bytes]:
    """By the path in the directory that they are written to. Raises OSError."""
    source = DEPLOY / kind
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return {file.relative_to(source): file.read_bytes() for file in files}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `write` has done. After a problem, the remaining files were not tried."""

    there: tuple[Path, ...]
    kept: tuple[Path, ...]
    problem: str = ""


def write(contents: Mapping[Path, bytes], target: Path, *, replace: bool) -> Outcome:
    there: list[Path] = []
    kept: list[Path] = []
    problem = ""
    for name, content in contents.items():
        place = target / name
        try:
            if place.exists() and place.read_bytes() != content and not replace:
                kept.append(place)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        except OSError as error:
            problem = f"{error.filename or place}: {error.strerror}"  # a full disk is reported without a name
            break
        there.append(place)
    return Outcome(tuple(there), tuple(kept), problem)


def _help() -> str:
    kinds = [f"  {kind:<12}{what}" for kind, what in KINDS.items()]
    return "\n".join([_USAGE, "Kinds:", *kinds, "", *exit_codes()])
