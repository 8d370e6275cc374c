"""What Slurm's environment says of a job step: for workers that srun has started itself, and for agents.

Pure. What an error means for a person depends on the option that would replace the value, so callers say that.
"""

from __future__ import annotations

import re

FIRST_PORT, PORTS = 20000, 10000
"""Below the ports that Linux gives to outgoing connections."""

PORTS_BETWEEN_STEPS = 997
"""Steps keep away from jobs with the next numbers, which may share a node."""


def port_of(job: int, step: int = 0, restarts: int = 0) -> int:
    """The same on all nodes, where none is given: two steps of one job, and two jobs, rarely have the same.

    A job that was requeued has another one, for what had the last one may have it still.

    >>> port_of(1234567), port_of(1234567, step=1), port_of(1234567, step=1, restarts=1)
    (24567, 25564, 26561)
    """
    return FIRST_PORT + (job + PORTS_BETWEEN_STEPS * (step + restarts)) % PORTS


def first_node(node_list: str) -> str:
    """The first host in Slurm's short form. Raises ValueError.

    >>> first_node("gpu[07-09,12],cpu3")
    'gpu07'
    """
    host, rest = "", node_list
    while found := re.match(
        r"([^\[\],]+)|\[(\w+)[-,\w]*\]", rest
    ):  # each bracket begins with its first host's number
        host += found[1] or found[2]
        rest = rest[found.end() :]
    if not host or (rest and not rest.startswith(",")):
        raise ValueError(f"Slurm's list of nodes is {node_list!r}")
    return host
