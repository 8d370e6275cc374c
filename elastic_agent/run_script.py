"""What a worker runs with `--run-path`: `python -m elastic_agent.run_script SCRIPT ARGS...`, as torchrun does it there.

The script is run by runpy: the folder in which Python looks first is the current one and not the script's, and an
error that nothing catches is written to TORCHELASTIC_ERROR_FILE without a `@record` of the script's own.
"""

from __future__ import annotations

import runpy
import sys

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
