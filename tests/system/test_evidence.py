"""What real agents keep of their workers before they end them, and where they say it is."""

from __future__ import annotations

import json
import re
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
