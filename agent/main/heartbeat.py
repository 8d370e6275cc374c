"""Does the main loop turn? A thread watches, because nothing else here can be trusted when it does not.

A main loop that stands still (a disk that hangs, a bug) stops no workers and sees no other world, while other
threads keep its lease alive and answer its peers: the job would wait for it without bound. So

- the lease is renewed only while the loop counts as *turning* (`rendezvous_io.store_link` asks before each keep-alive);
- a loop that has been silent for `STUCK_AFTER_S` is *stuck*. So is one that has workers, and was silent while the proof
  of the lease ran out: it should have stopped them, and nothing else will before the store gives the lease away.

A stuck loop ends the agent: the guard kills the workers, the log says where the main thread stands, and the process
leaves with its own exit code. That way it has left before another generation can begin without it (I10).

A machine with too much to do is no reason. Silence is counted in looks, each for no more than the pause between two:
what the whole process has missed, stopped by SIGSTOP or starved, is not the loop's silence.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...health.http import Probe
from ...threads import Thread
from ..workers.processes.proc import thread_status

STUCK_AFTER_S = 30.0
"""Longer than anything that the loop does by itself, and what systemd's watchdog and a liveness probe wait, too."""

LOOKS_PER_TTL = 20
LONGEST_PAUSE_S = 0.25
LATE = 0.1
"""Of the lease's time to live: how late the loop may be to stop workers whose lease is not proven any more. It is to do
so at 0.6 of it. At 0.7 the loop is not waited for: on a clock that runs 20 % slow that leaves an eighth of it
for their end."""


@dataclass(frozen=True, slots=True)
class Turned:
    """One turn of the loop."""

    at: float
    stops_at: float | None = None
    """When it is to do the next thing to end its workers if nothing more happens; None without any."""


@dataclass(frozen=True, slots=True)
class Silence:
    """For how long the loop was seen not to turn."""

    since: Turned
    seen_at: float
    lasted_s: float = 0.0
    late_s: float = 0.0
    """Of that, after it should have stopped its workers."""

    def look(self, turned: Turned, proven_until: float, now: float, pause_s: float) -> Silence:
        """`proven_until` is until when the lease is proven, as the thread that renews it knows."""
        if turned is not self.since:
            return Silence(turned, now)
        due_at = max(turned.stops_at, proven_until) if turned.stops_at is not None else now
        return replace(
            self,
            seen_at=now,
            lasted_s=self.lasted_s + min(now - self.seen_at, pause_s),
            late_s=self.late_s + min(max(0.0, now - max(self.seen_at, due_at)), pause_s),
        )


def why_stuck(silence: Silence, lease_ttl_s: float) -> str:
    """Empty while it is not."""
    if silence.lasted_s >= STUCK_AFTER_S:
        return f"the main loop has not turned for {silence.lasted_s:.0f} s"
    if silence.late_s >= LATE * lease_ttl_s:
        return (
            f"the main loop has not turned for {silence.lasted_s:.1f} s, and has not stopped the workers though "
            "this node's lease is not proven any more"
        )
    return ""


class Heartbeat:
    """Watches one loop from `start` on: in the thread that turned last, and before that in the one that made this."""

    def __init__(
        self,
        lease_ttl_s: float,
        proven_until: Callable[[], float],
        end: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`end` is called once, in the thread that watches, with the reason."""
        self.turning = True
        """As far as is known: the thread that renews the lease asks."""
        self._lease_ttl_s = lease_ttl_s
        self._pause_s = min(LONGEST_PAUSE_S, lease_ttl_s / LOOKS_PER_TTL)
        self._proven_until = proven_until
        self._end = end
        self._clock = clock
        self._turned = Turned(clock())
        self._watches = False
        self._thread = threading.current_thread()
        self._closed = threading.Event()

    def start(self) -> None:
        self._turned, self._watches = Turned(self._clock()), True
        Thread(self._watch, "heartbeat").start()

    def close(self) -> None:
        """The loop has ended."""
        self._closed.set()

    def turned(self, stops_at: float | None) -> None:
        """A turn has ended. At its end, because what the turn has stopped is not due any more."""
        self._thread = threading.current_thread()
        self._turned = Turned(self._clock(), stops_at)

    def liveness(self) -> Probe:
        """Does the loop turn? Not whether the store answers: its outage is no reason to die. For any thread."""
        if not self._watches:
            return Probe(True, "starting")
        silent_s = self._clock() - self._turned.at
        return Probe(silent_s < STUCK_AFTER_S, f"the main loop turned {silent_s:.1f} s ago")

    def _watch(self) -> None:
        silence = Silence(self._turned, self._clock())
        while not self._closed.wait(self._pause_s):
            now = self._clock()
            silence = silence.look(self._turned, self._proven_until(), now, self._pause_s)
            problem = why_stuck(silence, self._lease_ttl_s)
            if problem:
                self.turning = False
                self._end(f"{problem}: {thread_status(self._thread.native_id)}\n{self._stack()}")
                return

    def _stack(self) -> str:
        ident = self._thread.ident
        frame = sys._current_frames().get(ident) if ident is not None else None
        return "".join(traceback.format_stack(frame)) if frame is not None else ""
