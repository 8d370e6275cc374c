"""The process of a daemon: its console, signals and service manager, around `run_daemon`."""

from __future__ import annotations

import logging
import os
import queue
from typing import Any

from ...threads import listen
from ...worker.wire.shared_progress import clock
from ..common.exits import ExitCode
from ..configuration.derive import Resolved
from ..machine.network.addresses import unique_node_id
from ..main.process import catch_signals, log_to, take_environment, thread_failed
from ..main.service_manager import ServiceManager
from ..output.console import take as take_console
from .assembly import run_daemon

log = logging.getLogger(__name__)


def run(resolved: Resolved) -> int:
    """Returns when this node has left the pool: the exit code."""
    config = resolved.config
    name = config.node_id or unique_node_id()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listen(lambda thread, error: thread_failed(events, thread, error))
    console = take_console(name)
    log_to(console, name, config.logs)
    manager = ServiceManager.take(os.environ, os.getpid(), clock)
    environment = take_environment()
    catch_signals(events, config.stop.more_signals.numbers)
    manager.ready()
    ending = run_daemon(config, name, resolved.settings, environment, events, manager.turn)
    level = logging.INFO if ending.code is ExitCode.SUCCESS else logging.ERROR
    log.log(level, "ended with exit code %d: %s", ending.code, ending.reason)
    manager.stopping(f"ended with exit code {ending.code:d}: {ending.reason}")
    console.close()
    return ending.code
