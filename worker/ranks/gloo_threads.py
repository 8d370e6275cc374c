"""Waits, before a process group is destroyed, until torch's gloo threads have done what they need Python's lock for.

torch joins these threads where the group's last reference is dropped. With a DDP model that is where the model is
freed, and the thread that frees it has Python's lock (GIL). A gloo thread that is about to free its last work needs the
lock for that, so both wait for ever, after the script's last step (torch 2.13). Until then such a thread is only late:
while this one sleeps it gets the lock, and then sleeps itself.

`watch` is called in the process that workers are forked from, and by `init_process_group` of this library.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

THREAD = "pt_gloo_runloop"
LOOK_S = 0.001
LOOKS = 3
"""In a row must find all of them asleep."""
MOST_S = 2.0


def watch() -> None:
    """From now on torch's `destroy_process_group` waits for them. Nothing where torch.distributed is not imported."""
    for name in ("torch.distributed.distributed_c10d", "torch.distributed"):
        module = sys.modules.get(name)
        destroy = getattr(module, "destroy_process_group", None)
        if destroy is not None and not hasattr(destroy, "__wrapped__"):
            module.destroy_process_group = _settled(destroy)  # type: ignore[union-attr]


def _settled(destroy: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(destroy)
    def settle_first(*args: Any, **more: Any) -> Any:
        settle()
        return destroy(*args, **more)

    return settle_first


def settle(clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when no gloo thread of this process has anything to do, or after `MOST_S`."""
    give_up_at, asleep = clock() + MOST_S, 0
    while asleep < LOOKS and clock() < give_up_at:
        states = list(thread_states(THREAD))
        if not states:
            return
        asleep = asleep + 1 if all(state == "S" for state in states) else 0
        sleep(LOOK_S)


def thread_states(name: str, tasks: str = "/proc/self/task") -> Iterator[str]:
    """Of this process' threads of this name: the kernel's letter for their state."""
    for task in os.listdir(tasks):
        try:
            with open(f"{tasks}/{task}/stat", "rb") as file:
                command, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        except OSError:  # it has just ended
            continue
        if command.decode(errors="replace") == name[:15]:
            yield rest.split()[0].decode()
