"""A job whose last save the disk has refused does not end with success, also where no copy in memory is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode

from .harness import CHECKPOINTER_PRELOADED, Job

SCRIPT = Path(__file__).with_name("refused_saver.py")


@pytest.mark.parametrize("ends", ["refused", pytest.param("saved", marks=pytest.mark.long)])
@pytest.mark.parametrize("form", ["replicated", pytest.param("sharded", marks=pytest.mark.long)])
def test_a_last_save_that_the_disk_refuses_is_no_success(job: Job, form: str, ends: str) -> None:
    directory = job.folder / "checkpoints"
    agent = job.start(
        "a", CHECKPOINTER_PRELOADED, "--memory-checkpoints=off", script=(SCRIPT, directory, form, ends)
    )
    code = agent.exit_code()
    assert code == (ExitCode.NOT_ON_DISK if ends == "refused" else ExitCode.SUCCESS)
    named = agent.says(rf"step 2 is NOT on disk in {directory}: its save was refused")
    assert bool(named) is (ends == "refused")
