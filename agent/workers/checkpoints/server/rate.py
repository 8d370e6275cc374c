"""How fast copies leave this node: one limit for all partners together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Rate:
    """At most so many bytes per second, with no saving up for later. For any thread."""

    def __init__(
        self,
        bytes_per_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """0: no limit."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pause(self, count: int) -> None:
        """Wait until so many bytes may go."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._bytes_per_s
        if begin > now:
            self._sleep(begin - now)
