"""Leaves the torch beside this file to those whom it suffices: agents and store servers, and what serves no worker that
has a use for torch. All others find the real one."""

import os
import sys
from pathlib import Path

program = sys.orig_argv[1:3]
if "SYSTEM_TEST_WITHOUT_TORCH" not in os.environ and not (
    program == ["-m", "elastic_agent"]
    or (program[1:] == ["store"] and program[0].endswith("/fork_server.py"))
):
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
