"""What `--run-path` starts: the script by runpy, with its error in the error file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from elastic_agent.agent.configuration.config import Command
from elastic_agent.agent.workers.processes.workers import command_line

SCRIPT = """\
import os, sys
print(__name__, sys.argv[1:], sys.path[0] in ("", os.getcwd()), flush=True)
raise ValueError("not recorded by the script")
"""


def test_the_script_runs_in_a_module_of_ours_from_the_current_folder() -> None:
    command = Command("run-path", "sub/train.py", ("--rank=${local_rank}",)).started
    assert command_line(command, 3)[1:] == [
        "-u",
        "-m",
        "elastic_agent.launcher",
        "--run-path",
        "sub/train.py",
        "--rank=3",
    ]
    plain = Command("script", "sub/train.py")
    assert plain.started == plain


def test_an_error_of_the_script_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub" / "train.py"
    script.write_text(SCRIPT)
    file = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-m", "elastic_agent.launcher", "--run-path", script, "a", "-b"],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "__main__ ['a', '-b'] True\n")
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: not recorded by the script"
