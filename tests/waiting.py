"""How tests wait: for something that they name, until a deadline, and then they say what they have seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T],
    what: str,
    within_s: float,
    *,
    seen: Callable[[], object] = str,
    every_s: float = 0.02,
) -> T:
    """The condition's value as soon as it is true. `what` completes "waited for"; `seen` is asked at the end."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            last = "" if value is None or value is False else f", and it is {value!r}"
            raise AssertionError(f"waited {within_s:g} s for {what}{last}\n{seen()}".rstrip())
        time.sleep(every_s)
    return value
