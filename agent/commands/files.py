"""`elastic-agent files KIND DIR`: write the files for a deployment out of the installed package.

They are those of `deploy/`, for this version of the agent: a systemd unit, a Helm chart, a Grafana dashboard, rules and
scrape configuration for Prometheus, a Dockerfile, batch scripts for Slurm, a component of TorchX. A file that is there
already, with another content, is never replaced unless `--force` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..common.exits import ExitCode
from .command import EXIT_CODES

DEPLOY = Path(__file__).parents[2] / "deploy"

KINDS = {
    "systemd": "the units elastic-agent-pool (a daemon) and elastic-agent@ (one job), with examples of their files",
    "helm": "the chart for Kubernetes",
    "grafana": "the dashboard, and its provisioning",
    "prometheus": "alert and recording rules, their tests, and a scrape configuration",
    "docker": "the Dockerfile",
    "slurm": "batch scripts: a job that is queued again, and one that goes on without a lost node",
    "torchx": "the component elastic.py:ddp, with the arguments of TorchX's dist.ddp",
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
    if len(names) != 2 or names[0] not in KINDS or names[1].startswith("-"):
        kinds = ", ".join(KINDS)
        print(
            f"elastic-agent files: expected KIND DIR, with KIND one of {kinds}; see --help", file=sys.stderr
        )
        return ExitCode.BAD_CONFIG
    source, target, kept = DEPLOY / names[0], Path(names[1]), False
    try:
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            place, content = target / file.relative_to(source), file.read_bytes()
            if place.exists() and place.read_bytes() != content and "--force" not in words:
                kept = True
                print(f"{place} has another content and is kept; --force replaces it", file=sys.stderr)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            print(place, flush=True)
    except OSError as error:
        print(f"elastic-agent files: {error.filename or target}: {error.strerror}", file=sys.stderr)
        return ExitCode.NOT_HERE
    return ExitCode.FAILED if kept else ExitCode.SUCCESS


def _help() -> str:
    kinds = [f"  {kind:<12}{what}" for kind, what in KINDS.items()]
    return "\n".join([_USAGE, "Kinds:", *kinds, "", EXIT_CODES])
