"""Nothing of a collective is left to torch's threads when it has returned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import dlpack

from elastic_agent.worker.ranks import group
from elastic_agent.worker.ranks.group import Group

GROUP = Group(0, 2, torch.device("cpu"))


class SlowThread:
    """Lets go of the tensors of the newest collective some time after that has returned."""

    def __init__(self, hold: Callable[[torch.Tensor], Any], after_s: float | None) -> None:
        """None: it never does."""
        self.holds: list[Any] = []
        self._hold = hold
        self._after_s = after_s

    def all_gather(self, rows: list[torch.Tensor], mine: torch.Tensor) -> None:
        for row in rows:
            row.copy_(mine)
        self._take([mine, *rows])

    def broadcast(self, chunk: torch.Tensor, source: int) -> None:
        self._take([chunk])

    def _take(self, tensors: list[torch.Tensor]) -> None:
        self.holds = [self._hold(tensor) for tensor in tensors]
        if self._after_s is not None:
            threading.Timer(self._after_s, self.holds.clear).start()


HOLDS = [pytest.param(lambda tensor: tensor, id="python"), pytest.param(dlpack.to_dlpack, id="c++")]


@pytest.mark.parametrize("hold", HOLDS)
def test_a_collective_returns_when_nobody_has_its_tensors_any_more(
    hold: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = SlowThread(hold, 0.05)
    monkeypatch.setattr(dist, "all_gather", thread.all_gather)
    monkeypatch.setattr(dist, "broadcast", thread.broadcast)
    assert GROUP.gather(b"abc") == [b"abc"] * 2
    assert not thread.holds
    GROUP.send(None, 10, source=1)
    assert not thread.holds


def test_who_never_lets_go_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LET_GO_S", 0.01)
    thread = SlowThread(lambda tensor: tensor, None)
    monkeypatch.setattr(dist, "all_gather", thread.all_gather)
    assert GROUP.gather(b"abc") == [b"abc"] * 2
    assert thread.holds


def test_an_error_of_a_collective_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LET_GO_S", 60.0)
    thread = SlowThread(lambda tensor: tensor, None)

    def fail(rows: list[torch.Tensor], mine: torch.Tensor) -> None:
        thread.all_gather(rows, mine)
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(dist, "all_gather", fail)
    with pytest.raises(RuntimeError, match="closed by peer"):
        GROUP.gather(b"abc")
    assert thread.holds
