"""Folders of a pool's jobs: which have processes here still."""

from __future__ import annotations

import subprocess
from pathlib import Path

from elastic_agent.pool.job_logs import JobFolders, hold


def test_a_job_is_unfinished_while_a_process_has_its_output_open(tmp_path: Path) -> None:
    earlier = JobFolders(tmp_path, "pool", "a")
    for job in ("one", "two"):
        with earlier.begin(job).open("ab") as output:
            hold(output.fileno())
            if job == "one":
                child = subprocess.Popen(["sleep", "600"], stdout=output)
    other = JobFolders(tmp_path, "pool", "b")
    assert other.unfinished() == (), "another node's"
    later = JobFolders(tmp_path, "pool", "a")
    assert later.unfinished() == ("one",)
    assert later.unfinished() == ("one",)
    child.kill()
    child.wait()
    assert later.unfinished() == ()
    assert JobFolders(tmp_path / "none", "pool", "a").unfinished() == ()
