"""torch.distributed under the agent: every way to meet, every collective, before and after a worker is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .harness import TORCH_PRELOADED, Job
from .processes import port_for_a_store

SCRIPT = Path(__file__).with_name("conformance.py")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_torch_distributed_is_whole_before_and_after_a_kill(job: Job) -> None:
    meeting = job.folder / "meeting"
    script = (SCRIPT, meeting, port_for_a_store(), 1)
    agent = job.start("a", "--nproc-per-node=3", TORCH_PRELOADED, script=script)
    assert agent.exit_code(within_s=150) == 0
    assert not agent.says("WRONG")
    for how in ("env", "tcp", "file", "store"):
        for generation in (1, 2):
            assert agent.text.count(f"ok: generation {generation} met by {how}") == 3
    checked = re.findall(r"ok: (?!generation)(.*)", agent.text)
    assert len(set(checked)) == 2 * (2 * 4 + 5) + 3 + 4 + 4
    assert len(re.findall(r"rank \d has done it all", agent.text)) >= 3
    table = dict(re.findall(r"backend (\w+) +(built in|absent) +devices", agent.text))
    assert (table["gloo"], table["mpi"]) == ("built in", "absent"), "docs say which wheels have what"
    assert "nccl" in table
    print("\n".join(dict.fromkeys(re.findall(r"backend \w+ +(?:built in|absent) .*", agent.text))))
    assert list(meeting.iterdir()) == []
