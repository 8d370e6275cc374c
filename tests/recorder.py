"""Stands for whoever is told something, and keeps what it is told."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any


class Recorder:
    """Any call of a method is one of `told`: its name and arguments."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.told.append((name, *args))

    def next(self, events: queue.SimpleQueue[Any], within_s: float) -> tuple[Any, ...]:
        """What the next call that is posted tells, or the record that is posted in the place of one."""
        event = events.get(timeout=within_s)
        if not callable(event):
            return (event,)
        event()
        return self.told.pop()
