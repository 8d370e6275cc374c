"""The batch scripts of `deploy/slurm`, and what `docs/deploy.md` says of exit codes: both follow the table of codes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from tests.names import ONLY_OF_COMMANDS, REQUEUE

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "deploy" / "slurm").glob("*.sbatch"))
SOMETIMES = {ExitCode.STOPPED_BY_SIGTERM}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_is_sound_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


def test_the_script_requeues_what_another_start_can_help() -> None:
    text = (ROOT / "deploy" / "slurm" / "requeue.sbatch").read_text()
    (codes,) = re.findall(r"([0-9 |]+)\) again=yes", text)
    assert {int(code) for code in codes.split("|")} == REQUEUE


def test_the_document_has_each_code_once() -> None:
    section = (ROOT / "docs" / "deploy.md").read_text().partition("### Slurm: exit codes and requeue")[2]
    rows = re.findall(r"^\| ([0-9, ]+) \| (yes|no|if Slurm wanted it) \|", section, flags=re.MULTILINE)
    found = {(int(code), answer) for codes, answer in rows for code in codes.split(",")}
    answers = {
        code: "yes" if code in REQUEUE else "no" for code in set(ExitCode) - ONLY_OF_COMMANDS
    } | dict.fromkeys(SOMETIMES, "if Slurm wanted it")
    assert found == {(int(code), answer) for code, answer in answers.items()}


SRUN = """\
#!/bin/bash
exit $EXIT_OF_SRUN
"""
SCONTROL = """\
#!/bin/bash
if [ "$1" = requeue ]; then echo "requeued $2"; else echo "JobId=7 $SHOWN_BY_SCONTROL"; fi
"""


@pytest.mark.parametrize(
    ("code", "shown", "restarts", "requeued"),
    [
        (0, "JobState=RUNNING", 0, False),
        (80, "JobState=RUNNING", 0, True),
        (80, "JobState=RUNNING", 100, False),
        (3, "JobState=RUNNING", 0, False),
        (75, "JobState=RUNNING", 5, True),
        (143, "JobState=CANCELLED Reason=None PreemptTime=None", 0, False),
        (143, "JobState=COMPLETING Reason=None PreemptTime=None", 0, False),
        (143, "JobState=COMPLETING Reason=TimeLimit PreemptTime=None", 0, True),
        (143, "JobState=RUNNING PreemptTime=None", 0, False),
        (143, "JobState=RUNNING PreemptTime=2026-11-23T00:30:54", 0, True),
        (143, "JobState=TIMEOUT PreemptTime=None", 0, True),
    ],
)
def test_what_the_script_makes_of_an_exit_code(
    code: int, shown: str, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_RESTART_COUNT": str(restarts),
        "EXIT_OF_SRUN": str(code),
        "SHOWN_BY_SCONTROL": shown,
    }
    script = ROOT / "deploy" / "slurm" / "requeue.sbatch"
    done = subprocess.run(
        ["bash", str(script), "train.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ("requeued 7" in done.stdout) == requeued
    assert done.returncode == (0 if requeued else code)
