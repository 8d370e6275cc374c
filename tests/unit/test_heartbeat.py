"""When a main loop counts as stuck, on tables of instants; and what then becomes of its lease and its process."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from pathlib import Path

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.main import heartbeat as heartbeat_module
from elastic_agent.agent.main.heartbeat import STUCK_AFTER_S, Heartbeat, Silence, Turned, why_stuck
from elastic_agent.agent.rendezvous_io.store_link import StoreLink
from elastic_agent.agent.workers.processes.proc import process_status
from elastic_agent.rendezvous.store.memory import MemoryStore
from tests.recorder import Recorder

PATIENCE_S = 20.0
TTL_S = 5.0


def seen(turned: Turned, looks: list[float], proven_until: float = 1000.0) -> Silence:
    silence = Silence(turned, looks[0])
    for now in looks[1:]:
        silence = silence.look(turned, proven_until, now, 0.25)
    return silence


def every_quarter(until_s: float) -> list[float]:
    return [0.25 * number for number in range(int(until_s / 0.25) + 1)]


@pytest.mark.parametrize(
    ("looks", "stops_at", "proven_until", "stuck"),
    [
        (every_quarter(STUCK_AFTER_S - 1), None, 100.0, False),
        (every_quarter(STUCK_AFTER_S), None, 100.0, True),
        ([0.0, 1000.0], None, 100.0, False),  # the process stood still, and the watch with it
        (
            [float(second) for second in range(100)],
            None,
            100.0,
            False,
        ),  # starved: most of it is not the loop's
        (every_quarter(3.25), 3.0, 3.0, False),
        (every_quarter(3.5), 3.0, 3.0, True),  # 0.7 of the lease after it was confirmed at 0
        (every_quarter(3.5), None, 3.0, False),  # no workers, no harm
        (
            every_quarter(3.75),
            3.0,
            3.5,
            False,
        ),  # the lease is still confirmed, though the loop has not heard it
        (every_quarter(4.0), 11.0, 3.0, False),  # a world that is whole goes on without the store
        (every_quarter(STUCK_AFTER_S - 1), math.inf, 3.0, False),  # the lease has no end
        (every_quarter(STUCK_AFTER_S), math.inf, 3.0, True),
        ([*every_quarter(3.0), 9.0], 3.0, 3.0, False),  # starved just when the workers were to be stopped
    ],
)
def test_stuck_is_who_did_not_turn_while_others_did(
    looks: list[float], stops_at: float | None, proven_until: float, stuck: bool
) -> None:
    assert bool(why_stuck(seen(Turned(0.0, stops_at), looks, proven_until), TTL_S)) is stuck


def test_a_turn_ends_the_silence() -> None:
    silence = seen(Turned(0.0), every_quarter(29.0))
    assert silence.look(Turned(29.1), 1000.0, 29.25, 0.25).lasted_s == 0.0


def test_a_stuck_loop_is_reported_once_with_the_line_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "STUCK_AFTER_S", 0.05)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    heartbeat = Heartbeat(0.1, lambda: 0.0, told.put, time.monotonic)
    heartbeat.start()
    said = told.get(timeout=PATIENCE_S)  # this thread has made it, and stands here
    assert not heartbeat.turning
    assert "the main loop has not turned for" in said
    assert "test_a_stuck_loop_is_reported_once" in said
    assert "process" in said
    heartbeat.close()


def test_a_lease_is_not_confirmed_while_the_main_loop_does_not_turn() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    turning, asked = threading.Event(), threading.Semaphore(0)

    def turns() -> bool:
        asked.release()
        return turning.is_set()

    store = MemoryStore()
    recorder = Recorder()
    link = StoreLink(store, recorder, 0.25, events.put, time.monotonic, random.Random(1), turns)
    link.start()
    link.keep(store.grant(60.0))
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE_S)
    assert events.empty()
    assert link.confirmed_at < 0
    turning.set()
    confirmed = recorder.next(events, PATIENCE_S)
    assert confirmed[0] == "lease_confirmed"
    assert link.confirmed_at >= confirmed[2]
    link.close()


# --- Where a process stands


def process(proc: Path, pid: int, state: str, wchan: str, **threads: str) -> None:
    tasks = [(proc / str(pid) / "task" / name[1:], status) for name, status in threads.items()]
    for folder, status in ((proc / str(pid), state), *tasks):
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (a (b) c) {status} 1 1 1")
        (folder / "wchan").write_text(wchan)


def test_what_does_not_end_is_named_with_its_state_and_its_place_in_the_kernel(tmp_path: Path) -> None:
    process(tmp_path, 7, "D", "nfs_wait_bit_killable")
    process(tmp_path, 9, "Z", "nvidia_close", t9="Z", t10="D")
    assert process_status(tmp_path / "7") == (
        "process 7 (a (b) c) is in uninterruptible sleep (D), in the kernel's nfs_wait_bit_killable"
    )
    assert process_status(tmp_path / "9") == (
        "process 9 (a (b) c) is in uninterruptible sleep (D), in the kernel's nvidia_close"
    )
