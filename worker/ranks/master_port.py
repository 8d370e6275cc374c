"""Warns of a script that meets at another port than the agent has bound for it.

A script that sets MASTER_PORT anew works as long as all ranks set the same, and the port is free on the node of rank 0.
Where each rank looks for a free port by itself, all wait for a store that is not there, until torch's timeout.

`watch` puts the warning before torch's own handlers of `env://` and `tcp://`, which otherwise do what they did. It is
called in the process that workers are forked from, and by `init_process_group` of this library.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlparse

from ...codec import Invalid
from ..wire.environment import WorkerEnv

_SCHEMES = ("env", "tcp")


def problem_of(url: str, environ: Mapping[str, str]) -> str:
    """What was given, what was set, and on which rank; empty if they are the same, and without an agent.

    Also of a `tcp://` without a port, which torch refuses.
    """
    try:
        given = WorkerEnv.of(environ).master_port
        address = urlparse(url)
        own = environ.get("MASTER_PORT", "") if address.scheme == "env" else address.port
    except (Invalid, ValueError):
        return ""
    if not given or own is None or str(own) == str(given):
        return ""
    return (
        f"rank {environ.get('RANK', '?')} of this script meets at port {own or 'none'}; the agent has given it "
        f"MASTER_PORT={given}, which is bound and answers. Leave MASTER_PORT as it is: a port of the script's own may "
        "be taken, and ranks that each choose one never meet"
    )


def watch() -> None:
    """Nothing where torch is not imported, or keeps its handlers elsewhere."""
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", None)
    if not isinstance(handlers, dict):
        return
    for scheme in _SCHEMES:
        handler = handlers.get(scheme)
        if handler is not None and not hasattr(handler, "__wrapped__"):
            handlers[scheme] = _warning(handler)


def _warning(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def warn_first(url: str, *args: Any, **more: Any) -> Any:
        if problem := problem_of(url, os.environ):
            print(f"elastic-agent: {problem}", file=sys.stderr, flush=True)
        return handler(url, *args, **more)

    return warn_first
