"""torch's gloo threads have done what they need Python's lock for before a process group is destroyed."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from elastic_agent.worker.steps import torch_workarounds
from elastic_agent.worker.steps.torch_workarounds import (
    LOOKS,
    MOST_S,
    settle,
    settle_before_destroy,
    thread_states,
)


def played(monkeypatch: pytest.MonkeyPatch, states: list[list[str]]) -> list[float]:
    """What `settle` has slept when its looks find these states; the last of them for ever."""
    slept: list[float] = []
    looks = iter(states)
    monkeypatch.setattr(torch_workarounds, "thread_states", lambda name: next(looks, states[-1]))
    settle(lambda: sum(slept), slept.append)
    return slept


def test_without_a_thread_of_gloo_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(monkeypatch, [[]]) == []


def test_it_waits_until_all_have_slept_for_some_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [["S", "R"], ["S", "S"], ["R", "S"], ["S", "S"]]
    assert len(played(monkeypatch, states)) == 3 + LOOKS


def test_a_thread_that_never_sleeps_is_waited_for_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sum(played(monkeypatch, [["R"]])) == pytest.approx(MOST_S, rel=0.01)


def test_torch_destroys_what_it_was_asked_to_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    inner, outer = ModuleType("inner"), ModuleType("outer")
    inner.destroy_process_group = lambda group=None: done.append(group)  # type: ignore[attr-defined]
    outer.destroy_process_group = inner.destroy_process_group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", inner)
    monkeypatch.setitem(sys.modules, "torch.distributed", outer)
    monkeypatch.setattr(torch_workarounds, "settle", lambda: done.append("settled"))
    settle_before_destroy()
    settle_before_destroy()
    outer.destroy_process_group("group")  # type: ignore[attr-defined]
    assert done == ["settled", "group"]
    inner.destroy_process_group()  # type: ignore[attr-defined]
    assert done == ["settled", "group", "settled", None]


def test_the_states_are_those_of_the_threads_of_this_name() -> None:
    name, quit_ = "of this name", threading.Event()  # other tests may have left threads of gloo itself

    def wait() -> None:
        Path("/proc/thread-self/comm").write_text(name)
        quit_.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        give_up_at = time.monotonic() + 20
        while list(thread_states(name)) != ["S"]:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        assert list(thread_states("no thread")) == []
    finally:
        quit_.set()
        thread.join()
