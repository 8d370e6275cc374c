"""Faults in an agent's own threads, planted by the environment of a test: found on PYTHONPATH, and read by agents only.

PLANTED is `dies NAME` or `cannot start NAME` for the first thread of that name, or `stuck FILE`: the main loop stands
still as soon as there is such a file,
and the agent ends of that after a second; with `stands still FILE` after its own time. `lists FILE`: every turn of the
main loop writes the names of all threads there. `constants FIELD=SECONDS` sets a field of the configuration that no
option sets.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any


def plant(fault: str) -> None:
    what, _, subject = fault.rpartition(" ")
    if what in ("stuck", "stands still"):
        stick(subject, soon=what == "stuck")
    elif what == "cannot start":
        refuse(subject)
    elif what == "constants":
        set_constant(subject)
    elif what == "lists":
        list_threads(subject)
    else:
        end(subject)


def end(name: str) -> None:
    from elastic_agent.threads import Thread

    run = Thread.run

    def die(thread: Thread) -> None:
        if thread.name == name:
            thread._work = planted
        run(thread)

    def planted() -> None:
        raise MemoryError("planted")

    Thread.run = die  # type: ignore[method-assign]


def refuse(name: str) -> None:
    start = threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_or_not  # type: ignore[method-assign]


def stick(file: str, *, soon: bool) -> None:
    from elastic_agent.agent.main import heartbeat
    from elastic_agent.agent.main.loop import Loop

    if soon:
        heartbeat.STUCK_AFTER_S = 1.0
    turn = Loop._turn

    def turn_or_stand_still(loop: Loop) -> float | None:
        if os.path.exists(file):
            threading.Event().wait()
        return turn(loop)

    Loop._turn = turn_or_stand_still  # type: ignore[method-assign]


def set_constant(subject: str) -> None:
    from elastic_agent.agent.configuration import derive

    filled, (name, _, seconds) = derive._filled, subject.partition("=")

    def filled_and_planted(part: Any, settings: Any, **known: object) -> Any:
        if name in part.__dataclass_fields__:
            known[name] = float(seconds)
        return filled(part, settings, **known)

    derive._filled = filled_and_planted


def list_threads(file: str) -> None:
    from elastic_agent.agent.main.loop import Loop

    turn = Loop._turn

    def turn_and_list(loop: Loop) -> float | None:
        with open(f"{file}.new", "w") as scratch:
            scratch.write("\n".join(sorted(thread.name for thread in threading.enumerate())))
        os.replace(f"{file}.new", file)
        return turn(loop)

    Loop._turn = turn_and_list  # type: ignore[method-assign]


if "elastic_agent" in sys.orig_argv and (planted := os.environ.pop("PLANTED", "")):
    plant(planted)
