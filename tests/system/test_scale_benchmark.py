"""The command of the scale benchmark, on a real store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rendezvous_scale

LIMIT_S = 60


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed: .ci/system-packages etcd")
def test_the_command_measures_nodes_in_several_processes(tmp_path: Path) -> None:
    words = ["--system", "etcd", "--sizes", "4", "--our-sizes", "--repeat", "1", "--processes", "2"]
    words += ["--limit-s", str(LIMIT_S), "--json", str(tmp_path / "runs.json")]
    command = [sys.executable, rendezvous_scale.__file__, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    (one,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert (one["outcome"], len(one["parts"])) == ("done", 2)
    assert one["parts"][0]["writes"] == 5
    assert "| 4     | etcd   |" in ended.stdout
