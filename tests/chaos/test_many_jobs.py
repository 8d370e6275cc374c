"""Many jobs start at one instant on one host, in a range with one port more than there are jobs, all of them just used.

`make soak` has 64 jobs in 65 ports; a few are among all tests. All hold their ports at the same time, in two
generations: so each agent gives its first port back while the others look for their second.
"""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from tests.system.harness import Job
from tests.system.processes import listening_ports

JOBS = int(os.environ.get("SOAK_JOBS", "8"))
SEED = int(os.environ.get("SOAK_SEED", "1"))

MEET = """
echo $MASTER_PORT >$0/$ELASTIC_AGENT_GENERATION-$ELASTIC_AGENT_NODE
while [ $(ls $0 | grep -c ^$ELASTIC_AGENT_GENERATION-) -lt $1 ]; do sleep 0.2; done
exit $((2 - ELASTIC_AGENT_GENERATION))
"""
"""In the first generation it fails, in the second one it ends, and each time only when all jobs are there."""


def a_range(size: int) -> range:
    """Ports that no process listens on, below those which the kernel gives to others."""
    taken, rng = listening_ports(), random.Random(SEED)
    for first in rng.sample(range(20000, 32000 - size), 1000):
        if taken.isdisjoint(range(first, first + size)):
            return range(first, first + size)
    raise AssertionError(f"no {size} ports in a row are free")


def leave_in_time_wait(port: int) -> None:
    """The side that closes first keeps the connection."""
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        assert client.recv(1) == b""
        client.close()


@pytest.mark.long
@pytest.mark.timeout(60 + 10 * JOBS)
def test_no_job_is_stuck_and_no_port_is_given_twice(job: Job, tmp_path: Path) -> None:
    ports, met = a_range(JOBS + 1), tmp_path / "met"
    met.mkdir()
    for port in ports:
        leave_in_time_wait(port)
    options = f"--port-range={ports[0]}-{ports[-1]}", "--max-restarts=1", "--no-python"
    script = "--", "sh", "-c", MEET, met, str(JOBS)
    agents = [job.start(f"job{number}", *options, script=script) for number in range(JOBS)]
    for agent in agents:
        assert agent.exit_code(50 + 10 * JOBS) == 0, agent.text
    for generation in (1, 2):
        got = [int(file.read_text()) for file in met.glob(f"{generation}-*")]
        assert len(set(got)) == JOBS
        assert set(got) <= set(ports)
