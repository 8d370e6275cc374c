"""Work for a thread that may stand still, in a queue that is bounded: who brings it waits for room once at most.

A console that is not read and a disk that does not answer hold their writers, for any time. So a thread that
does nothing else does it, and all others bring what is to be done. What finds no room is refused and never comes; the
first that finds none may wait for a while, the next do not, until the thread goes on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

from ...threads import Thread

_T = TypeVar("_T")


class Backlog(ABC, Generic[_T]):
    """All methods are for any thread. The `_do` of each item comes in the order in which they were put."""

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._changed = threading.Condition()
        self._waiting: deque[tuple[_T, int]] = deque()
        self._size = 0  # of what waits or is being done
        self._stuck = False
        self._closing = False
        self._thread = Thread(self._serve, name)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: _T, size: int, most: float, patience_s: float = 0.0) -> bool:
        """Whether it will be done: if less than `most` is waiting. This caller may wait for `patience_s` for room."""
        with self._changed:
            if patience_s and not self._stuck:
                self._stuck = not self._changed.wait_for(lambda: self._size < most, patience_s)
            if (patience_s and self._stuck) or self._size >= most:
                self._refused(item)
                return False
            self._waiting.append((item, size))
            self._size += size
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """The thread ends when all is done; see `join`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Whether all is done within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _do(self, item: _T) -> None:
        """In the thread; may take any time."""

    @abstractmethod
    def _refused(self, item: _T) -> None:
        """It will not be done. No other item comes in or is done meanwhile."""

    @abstractmethod
    def _moved(self) -> None:
        """One was done. No other item comes in or is done meanwhile, but this may put some."""

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                item, size = self._waiting.popleft()
            self._do(item)
            with self._changed:
                self._size -= size
                self._stuck = False
                self._changed.notify_all()
                self._moved()
