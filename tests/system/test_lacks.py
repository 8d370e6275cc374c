"""A machine without room for temporary files, or without descriptors: each command says so, and none fails by it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elastic_agent.agent.common.exits import ExitCode

FULL = "size=4k t {0}; head -c 8192 /dev/zero >{0}/fill 2>/dev/null"
TRAIN = ("--nproc-per-node", "1", "--preload", "none", "--no-python", "true")

ENDS = {
    TRAIN: ExitCode.NOT_HERE,
    ("--min-nodes", "1"): ExitCode.NOT_HERE,
    ("status",): ExitCode.NOT_FOUND,
    ("events",): ExitCode.NOT_FOUND,
    ("jobs",): ExitCode.NO_ANSWER,
    ("submit", "--", "true"): ExitCode.NO_ANSWER,
    ("exclude", "n1"): ExitCode.BAD_CONFIG,
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for mounts of one process")
@pytest.mark.parametrize(
    "how",
    [pytest.param(FULL, id="full"), pytest.param("ro t {0}", id="read-only", marks=pytest.mark.long)],
)
def test_without_a_temporary_directory_each_command_says_what_to_do(how: str) -> None:
    places = [place for place in ("/tmp", "/var/tmp", "/usr/tmp") if os.path.isdir(place)]
    mounts = "; ".join("mount -t tmpfs -o " + how.format(place) for place in places)
    there = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'{mounts}; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "elastic_agent",
    ]
    begun = {
        words: subprocess.Popen(
            [*there, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")},
            text=True,
        )
        for words in ENDS
    }
    for words, process in begun.items():
        said, _ = process.communicate(timeout=60)
        assert "Traceback" not in said, said
        assert process.returncode == ENDS[words], (words, said)
        if ENDS[words] is ExitCode.NOT_HERE:
            assert "TMPDIR" in said


def test_an_agent_with_too_few_descriptors_names_them() -> None:
    limited = 'ulimit -n 20; exec "$@"'
    agent = ["sh", "-c", limited, "sh", sys.executable, "-m", "elastic_agent", *TRAIN]
    done = subprocess.run(agent, capture_output=True, text=True, timeout=60)
    assert "raise `ulimit -n`" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == ExitCode.NOT_HERE
