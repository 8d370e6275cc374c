"""The recorder; but where DIES_UNLESS names a file that is not there, it ends 0.1 s after its start."""

import os
import runpy
import threading
from pathlib import Path

unless = os.environ.get("DIES_UNLESS")
if unless and not Path(unless).exists():
    threading.Timer(0.1, os._exit, (7,)).start()

runpy.run_path(str(Path(__file__).with_name("recorder.py")), run_name="__main__")
