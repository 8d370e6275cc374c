"""A console that nobody reads (Ctrl-S, a pager, a stalled srun) costs lines, and nothing else."""

from __future__ import annotations

import re
import signal
import urllib.request

import pytest

from elastic_agent.agent.common.exits import ExitCode
from tests.consoles import full_pipe

from .harness import RECORDER, Job
from .processes import port_for_a_store

pytestmark = pytest.mark.usefixtures("in_etcd")


def test_training_restarts_and_leaves_go_on_though_the_console_is_not_read(job: Job) -> None:
    """The worker prints more than all buffers hold, and then fails; the leases are short enough to end meanwhile."""
    options = ("--nnodes=2", "--lease-ttl=3", "--last-call=0")
    script = (RECORDER, "--child=yes $(printf %099d 0) | head -c 3000000", "--fault=1:0:20:1")
    port = port_for_a_store()
    with full_pipe() as stuck:
        deaf = job.join("a", *options, f"--http-address=127.0.0.1:{port}", script=script, console=stuck.write)
        job.join("b", *options, script=(RECORDER,))
        first = job.wait_for_training(world=2)
        second = job.wait_for_training(world=2, after=first.number)
        assert (first.number, second.number) == (1, 2)
        job.wait_for_steps(second, for_s=4.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
            age_s = float(answer.read().split()[-3])
        assert age_s < 5.0, "the main loop turns"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            [dropped] = re.findall(
                rb'^elastic_agent_dropped_total\{.*what="console_lines".*\} (\S+)$', answer.read(), re.M
            )
        assert float(dropped) > 0
        deaf.signal(signal.SIGTERM)
        assert deaf.exit_code() == ExitCode.STOPPED_BY_SIGTERM
