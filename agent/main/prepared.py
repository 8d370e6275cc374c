"""What a process can have ready before it is the agent of any job: its threads' queue, its mark, and preloaded modules.

An agent makes this when it starts. A daemon's standby (`pool/standby.py`) has made it long before, and preloads
meanwhile what workers import: then the first workers of its job are forked at once.
"""

from __future__ import annotations

import queue
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...threads import listen
from ...worker.wire.environment import WorkerEnv
from ...worker.wire.shared_progress import clock
from ..common.events import Event, IoThread
from ..workers.preloader.spares import Interpreter, Spares
from ..workers.processes.subreaper import Subreaper, adopt_orphans
from ..workers.processes.workers import job_python
from .process import thread_failed


@dataclass(frozen=True, slots=True)
class Prepared:
    incarnation: str
    events: queue.SimpleQueue[Event]
    io: IoThread
    """It runs."""
    subreaper: Subreaper
    adoption_error: str
    """Why orphans of workers are not adopted, and none can be forked; empty where they are."""
    spares: Spares | None = None
    """Those of an unknown job, which are being preloaded."""


def prepare_process() -> Prepared:
    """To be called once, before this process has started any other. Raises OSError."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    listen(lambda thread, error: thread_failed(events, thread, error))
    subreaper, adoption_error, io = Subreaper(), adopt_orphans(), IoThread()
    io.start()
    return Prepared(uuid.uuid4().hex[:12], events, io, subreaper, adoption_error)


def preload(prepared: Prepared, words: Sequence[str], environment: Mapping[str, str]) -> Prepared:
    """With what these words of --preload name, in this environment, where that can be."""
    if prepared.adoption_error or not words:
        return prepared
    spares = new_spares(prepared, interpreter_of(prepared, environment), words, wanted=0)
    spares.start()
    return replace(prepared, spares=spares)


def interpreter_of(prepared: Prepared, environment: Mapping[str, str]) -> Interpreter:
    """By its mark the guard finds the preloaded process, too."""
    marked = {**environment, **WorkerEnv(incarnation=prepared.incarnation).variables()}
    return Interpreter(job_python(environment), marked)


def new_spares(prepared: Prepared, interpreter: Interpreter, words: Sequence[str], wanted: int) -> Spares:
    return Spares(interpreter, words, wanted, prepared.io, prepared.events.put, clock)
