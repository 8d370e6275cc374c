"""The recorder, on a node that has all that it needs; elsewhere (LACKS_A_PACKAGE) it fails as it begins."""

import os
import runpy
from pathlib import Path

if os.environ.get("LACKS_A_PACKAGE"):
    import no_such_package  # noqa: F401

runpy.run_path(str(Path(__file__).with_name("recorder.py")), run_name="__main__")
