"""Run as a module with DESCRIPTOR WORDS STORE: a daemon's process that waits to be the agent of a job.

When the job comes it is the `elastic-agent` of that job's command line, by the same `main`. WORDS are of --preload.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # As at the start of any agent: a scheduler's warning waits until `run` has handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    from .__main__ import end

    # `main` imports these two when it knows that it needs them.
    from .agent.machine import inventory as inventory
    from .agent.main import run as run
    from .cli import main
    from .pool.standby import await_job

    descriptor, preloads, store = sys.argv[1:]
    job = await_job(int(descriptor), preloads.split(","), store)
    if job is None:
        os._exit(0)
    words, prepared = job
    sys.argv[1:] = words
    end(main(words, prepared))
