"""What ends every generation in the same way: a state that nobody can load, and a directory that another run has.

Of the first the job goes on from an older one, on every rank, and says so; the second ends it at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.wire.environment import Run

from .harness import CHECKPOINTER_PRELOADED, Job

SCRIPT = Path(__file__).with_name("poisoned.py")
REFUSING = Path(__file__).with_name("refusing.py")
REPLACED = Path(__file__).with_name("replaced_run.py")


@pytest.mark.parametrize("where", ["memory", pytest.param("disk", marks=pytest.mark.long)])
def test_after_two_failures_right_after_the_load_an_older_state_is_loaded(job: Job, where: str) -> None:
    kept = "1GiB" if where == "memory" else "off"
    options = (CHECKPOINTER_PRELOADED, "--nproc-per-node=2", f"--memory-checkpoints={kept}")
    agent = job.start("a", *options, script=(SCRIPT, job.folder, where))
    assert agent.exit_code() == 0
    for rank in (0, 1):
        loaded = (job.folder / f"loaded-{rank}").read_text().splitlines()
        assert [json.loads(line) for line in loaded] == [[1, 0], [2, 5], [3, 5], [4, 4]]
    said = agent.text
    assert "generation 4 does not load the state of step 5, or what came of it: 2 times in a row" in said
    assert "going on from an older state: step=4 bad=5" in said


@pytest.mark.long
@pytest.mark.parametrize("kept", ["1GiB", "off"])
def test_a_state_that_the_script_refuses_is_not_a_bad_one(job: Job, kept: str) -> None:
    """What the agent saw as chosen is withdrawn: of another state the script would say the same."""
    agent = job.start(
        "a", CHECKPOINTER_PRELOADED, f"--memory-checkpoints={kept}", script=(REFUSING, job.folder)
    )
    assert agent.exit_code() == ExitCode.CRASH_LOOP
    assert (job.folder / "started").read_text().splitlines() == [""] * 5
    assert agent.says("made for another width")
    assert not agent.says("does not load the state of")


@pytest.mark.parametrize("when", ["load", pytest.param("save", marks=pytest.mark.long)])
def test_a_directory_of_another_run_ends_the_job_at_once(job: Job, when: str) -> None:
    directory = job.folder / "checkpoints"
    holder = CheckpointFiles(directory, keep=1, run=Run("other"))
    if when == "load":
        holder.claim.take(0)
    agent = job.start("a", CHECKPOINTER_PRELOADED, "--nproc-per-node=2", script=(REPLACED, job.folder, when))
    assert agent.exit_code() == ExitCode.FAILED
    for rank in (0, 1):
        assert (job.folder / f"started-{rank}").read_text().splitlines() == [when]
    assert agent.says("no restart helps")
    assert "give it a directory of its own" in agent.text or "give each a directory of its own" in agent.text
