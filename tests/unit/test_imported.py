"""When a process with what it has imported is no longer fit to fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_file_that_has_changed_is_found(tmp_path: Path) -> None:
    ours = tmp_path / "ours.py"
    ours.write_text("x = 1")
    program = (
        "import sys\n"
        "from elastic_agent.agent.workers.preloader.imported import Imported, Unfit\n"
        "found = Imported(['ours', 'nowhere.to_be_found'])\n"
        "print(list(found.skipped), found.edited()); open(sys.argv[1], 'a').write(' '); print(found.edited())\n"
        "try: found.check()\n"
        "except Unfit as unfit: print(unfit.stale, unfit)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ours)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "['nowhere.to_be_found'] ",
        str(ours),
        f"True {ours} has changed since it was imported",
    ], done.stderr
