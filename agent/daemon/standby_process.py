"""The standby: a process that waits to be the agent of a job, with all that takes long done already.

The daemon starts it while the node is idle, through `elastic_agent/standby.py`. It has imported what an agent needs,
and holds a preloaded process, from which the job's workers will be forked. Everything that the job decides (directory,
environment, console, log level, signals, cgroup) it takes over with the job, as a process does that starts with it.
It ends when the daemon ends: with its socket, and by the signal of its parent's death.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ...codec import Invalid
from ...worker.wire.shared_progress import clock
from ..common.events import SpareReadable, ThreadFailed
from ..configuration.values import STORES
from ..main.prepared import Prepared, preload, prepare_process
from .hand_over import receive_job, send_ready, send_taken
from .job_agent import DAEMON_ENDED, signal_at_daemons_end

log = logging.getLogger(__name__)

LONGEST_TURN_S = 60.0


@dataclass(frozen=True, slots=True)
class _DaemonSpoke:
    """The daemon's socket can be read."""


def await_job(
    descriptor: int, preloads: Sequence[str], store: str
) -> tuple[tuple[str, ...], Prepared] | None:
    """The words of the job's agent, which this process is from now on; None when the daemon has ended.

    `descriptor` is that of the daemon's socket, `preloads` the words of --preload, `store` the kind of the pool's.
    """
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    prepared = prepare_process()
    STORES[store].load()
    try:
        send_ready(channel)
        prepared = preload(prepared, preloads, os.environ)
        _wait(channel, prepared)
        received = receive_job(channel)
        if received is None:
            return None
        job, output = received
        os.chdir(job.directory)
        signal_at_daemons_end(DAEMON_ENDED)
        send_taken(channel)
    except (OSError, Invalid) as error:
        log.warning("no job of the daemon can be taken: %s", error)
        return None
    channel.close()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(job.environment)
    time.tzset()
    return job.words, prepared


def _wait(channel: socket.socket, prepared: Prepared) -> None:
    """Until the daemon speaks, or has ended. What is preloaded is served meanwhile."""
    spares, events = prepared.spares, prepared.events
    spoke = _DaemonSpoke()
    prepared.io.watch(channel.fileno(), partial(_tell_once, prepared, channel.fileno(), spoke))
    while True:
        now = clock()
        due_at = spares.turn(now) if spares is not None else None
        timeout_s = due_at - now if due_at is not None and due_at > now else LONGEST_TURN_S
        try:
            event: object = events.get(timeout=min(timeout_s, LONGEST_TURN_S))
        except queue.Empty:
            continue
        if event is spoke:
            return
        if isinstance(event, ThreadFailed):
            raise SystemExit(event.reason)
        if isinstance(event, SpareReadable) and spares is not None:
            spares.handle(event, clock())


def _tell_once(prepared: Prepared, descriptor: int, spoke: _DaemonSpoke) -> None:
    """In the io thread."""
    prepared.io.forget(descriptor)
    prepared.events.put(spoke)  # type: ignore[arg-type]
