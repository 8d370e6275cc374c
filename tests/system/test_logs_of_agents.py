"""Where the workers' output goes: the merged console, one file per rank, and a log directory that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import RECORDER, Job


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def test_each_rank_has_its_file_and_its_prefix_on_the_console(job: Job) -> None:
    logs = job.folder / "logs"
    script = (RECORDER, "--say=at", "--fault=1:1:10:1", "--fault=1:0:50:1", "--steps=60")
    agent = job.start("n", "--nproc-per-node=2", f"--log-dir={logs}", script=script)
    assert agent.exit_code() == 0
    for rank in (0, 1):
        assert agent.says(rf"^\[n/{rank}\] at 60$")
    files = {path: path.read_text() for path in logs.rglob("stdout.log")}
    assert len(files) == 4, "of two generations two ranks each"
    assert sum(text.endswith("at 60\n") for text in files.values()) == 2
    assert any(text.endswith(("at 10\n", "at 50\n")) for text in files.values()), (
        "of the rank that failed first"
    )


def test_torchruns_flags_say_what_goes_where(job: Job) -> None:
    """`-r`, `-t`, the filters and the template, for two workers that print on both streams."""
    script = "echo out $LOCAL_RANK $ROLE_NAME; echo loss $LOCAL_RANK; printf '\\r1%%\\r2%%\\n' >&2"
    agent = job.start(
        "n",
        "--nproc-per-node=2",
        "-r1:2",
        "--tee=0:1",
        "--duplicate-stdout-filters=loss,nan",
        "--role=reader",
        script=("--no-python", "sh", "-c", script),
        environment={
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}> ",
            "TMPDIR": str(job.folder),
        },
    )
    assert agent.exit_code() == 0
    shown = [line for line in agent.text.splitlines() if line.startswith("<")]
    assert sorted(shown) == [
        "<reader 0> 2%",
        "<reader 0> loss 0",
        "<reader 0> out 0 reader",
        "<reader 1> loss 1",
        "<reader 1> out 1 reader",
    ]
    [folder] = job.folder.glob("elastic_agent_logs_*")
    assert agent.says(f"what workers print is in {folder}")
    files = {"/".join(path.parts[-2:]): path.read_bytes() for path in folder.rglob("*.log")}
    assert files == {
        "rank0/stdout.log": b"out 0 reader\nloss 0\n",
        "rank1/stderr.log": b"\r1%\r2%\n",
        "node-n/filtered_stdout.log": b"<reader 0> loss 0\n",
    }


@pytest.mark.parametrize("line", ["short", pytest.param("long" * 1000, marks=pytest.mark.long)])
def test_a_full_log_disk_stops_no_training(job: Job, small_disk: Path, line: str) -> None:
    script = (RECORDER, "--step-s=0.001", f"--say={line}")
    agent = job.start("n", f"--log-dir={small_disk}", script=script)
    job.wait_for(lambda: os.statvfs(small_disk).f_bfree == 0, "the disk to be full")
    generation = job.wait_for_training(world=1)
    done = len(job.history(what="step"))
    job.wait_for(lambda: len(job.history(what="step")) > done + 500, "training to go on")
    os.kill(generation.pid(0), signal.SIGKILL)
    job.wait_for_training(world=1, after=generation.number)
    assert agent.says("No space left on device"), "it is said"
    shown = int(agent.text.rpartition(f"[n/0] {line} ")[2].split()[0])
    assert shown > 0, "and the console still shows what the worker prints"


def test_a_log_directory_that_cannot_be_made_is_refused_before_anything_starts(job: Job) -> None:
    in_the_way = job.folder / "file"
    in_the_way.touch()
    agent = job.start("n", f"--log-dir={in_the_way}/logs", script=(RECORDER, "--say=at", "--steps=5"))
    assert agent.exit_code() == 73
    assert agent.says(r"--log-dir .* but .*/file is no folder")
    assert not job.history()


@pytest.mark.long
def test_the_last_lines_of_a_killed_worker_are_shown(job: Job) -> None:
    agent = job.start("n", "--max-restarts=0", script=(RECORDER, "--say=last words", "--fault=*:*:7:9"))
    assert agent.exit_code() == 1
    assert agent.says(r"exit code 9")
    summary = agent.text.partition("Worker failure in generation 1")[2]
    assert "last words 7" in summary


def test_each_line_of_an_agent_s_own_log_can_be_one_json_object(job: Job) -> None:
    logs = job.folder / "logs"
    options = ("--log-format=json", f"--log-dir={logs}", "--redirects=3", "--max-restarts=1")
    agent = job.start("n", *options, script=(RECORDER, "--fault=1:0:5:1", "--steps=20"))
    assert agent.exit_code() == 0
    lines = [json.loads(line) for line in agent.text.splitlines()]
    assert {line["node"] for line in lines} == {"n"}
    assert {line["level"] for line in lines} >= {"info", "error"}
    stopped, ended = (
        next(line for line in lines if line["message"].startswith(text))
        for text in ("stopping generation 1", "generation 2: 1 worker here ended")
    )
    assert (stopped["level"], stopped["generation"], ended["generation"]) == ("error", 1, 2)
