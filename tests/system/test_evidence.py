"""What real agents keep of their workers before they end them, and where they say it is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from .harness import RECORDER, Agent, Job

pytestmark = pytest.mark.usefixtures("in_etcd")

CANARY = "c4n4ry-Value9"
TALKATIVE = """
import os, sys
print(dict(os.environ))
print(sys.argv, file=sys.stderr)
def train(token):
    raise RuntimeError(f"cannot log in with token={token!r} at https://me:{token}@host/")
train(sys.argv[2])
"""

WARM = "--preload=json"
"""So that workers are forked from a spare; nothing heavy."""


def folder_of(agent: Agent) -> Path:
    """Which the failure's summary names."""
    found = agent.says(r"evidence: (\S+)")
    assert found is not None
    return Path(found[1])


def test_a_failure_leaves_on_every_node_where_its_workers_stood(job: Job, tmp_path: Path) -> None:
    options = "--nnodes=2", "--nproc-per-node=2", WARM, f"--log-dir={tmp_path / 'logs'}"
    agents = [job.join(name, *options) for name in ("a", "b")]
    old = job.wait_for_training(world=4)
    os.kill(old.pid(1), signal.SIGKILL)
    job.wait_for_training(world=4, after=old.number)
    stood: list[re.Match[str] | None] = []
    for agent in agents:
        folder = folder_of(agent)
        assert (folder.parent.name, folder.name) == (f"gen{old.number}", "evidence")
        ranks = [
            rank
            for rank in range(4)
            if old.starts[rank]["env"]["ELASTIC_AGENT_NODE"] == agent.name and rank != 1
        ]
        looked = folder / agent.name / "1-failure"
        job.wait_for(lambda: (looked / "summary.txt").exists(), "the files")  # noqa: B023
        events = (folder.parents[1] / f"events-{agent.name}.jsonl").read_text()
        assert '"kind":"evidence"' in events
        assert str(looked) in events
        texts = [(looked / f"rank{rank}.txt").read_text() for rank in ranks]
        # A restart waits for stacks only shortly: a process that gets no processor meanwhile has not answered.
        assert all(re.search(r"recorder\.py:\d+ in |it has not answered", text) for text in texts), texts
        stood += [re.search(r"recorder\.py:\d+ in ", text) for text in texts]
    assert any(stood)


def test_workers_that_hang_are_looked_at_before_they_are_ended(job: Job, tmp_path: Path) -> None:
    options = WARM, f"--log-dir={tmp_path / 'logs'}", "--hang-timeout=2s", "--max-restarts=0"
    agent = job.start("a", *options, script=(RECORDER, "--report", "--fault=1:0:3:hang"))
    agent.exit_code()
    [first, *_] = sorted((folder_of(agent) / "a").glob("*/summary.txt"))
    assert re.match(r"rank 0: waits, recorder\.py:\d+ in ", first.read_text())
    (journal,) = folder_of(agent).parents[1].glob("events-*.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    told = [
        (one["kind"], one["rank"], one["about"]) for one in events if one["kind"] in ("verdict", "failure")
    ]
    assert ("failure", 0, "a") in told
    assert ("verdict", 0, "a") in told


def test_an_archive_of_a_run_has_no_secret(job: Job, tmp_path: Path) -> None:
    """Not of the environment, nor of arguments, though the script prints all of them."""
    script = tmp_path / "talkative.py"
    script.write_text(TALKATIVE)
    options = WARM, f"--log-dir={tmp_path / 'logs'}", "--max-restarts=0"
    environment = {"MY_API_KEY": CANARY, "DATABASE_PASSWORD": CANARY}
    agent = job.start("a", *options, script=(script, "--api-key", CANARY), environment=environment)
    agent.exit_code()
    assert "evidence: " not in agent.text, "its only worker had ended: there was none to look at"
    (run,) = (tmp_path / "logs").iterdir()
    assert (run / "configuration-a.toml").stat().st_mode & 0o777 == 0o600
    archive = tmp_path / "run.tar.gz"
    command = [sys.executable, "-m", "elastic_agent", "diagnose", str(run), f"--output={archive}"]
    subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(archive) as tar:
        texts = {
            member.name: content.read().decode() for member in tar if (content := tar.extractfile(member))
        }
    for part in ("stdout.log", "stderr.log", "events-a.jsonl", "configuration-a.toml"):
        assert [name for name in texts if name.endswith(part)], part
    assert "RuntimeError: cannot log in" in "".join(texts.values())
    assert not [name for name, text in texts.items() if CANARY in text]
