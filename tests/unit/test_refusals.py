"""Every rank raises together: a type that the other ranks do not have is the nearest that they have there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from elastic_agent.worker.errors import BadCheckpoint, CheckpointError, NotPlainData, Sharded
from elastic_agent.worker.ranks.group import Group, raise_together
from elastic_agent.worker.wire.messages import MAX_REASON_CHARS


@dataclass
class Meeting:
    """Where the threads that stand for ranks exchange bytes."""

    ranks: int
    payloads: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.ranks, timeout=60)

    def exchange(self, rank: int, payload: bytes) -> list[bytes]:
        self.payloads[rank] = payload
        self._barrier.wait()
        found = [self.payloads[one] for one in range(self.ranks)]
        self._barrier.wait()
        return found


class ThreadGroup(Group):
    """One rank of a group of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, meeting.ranks, torch.device("cpu"))
        object.__setattr__(self, "meeting", meeting)

    def gather(self, payload: bytes) -> list[bytes]:
        found: list[bytes] = self.meeting.exchange(self.rank, payload)  # type: ignore[attr-defined]
        return found


def on_each_rank(part: Callable[[Group], object], ranks: int = 2) -> list[BaseException | None]:
    """What each of them raises."""
    meeting = Meeting(ranks)
    raised: list[BaseException | None] = [None] * ranks

    def run(rank: int) -> None:
        try:
            part(ThreadGroup(meeting, rank))
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


class Own(CheckpointError):
    """A script's."""


class OwnNotPlain(NotPlainData):
    """A script's, of one of the types here."""


def named(name: str) -> type[CheckpointError]:
    return type(name, (Own,), {})


class ClusterEnvironmentError(Own):
    """As one of the types here that is no CheckpointError."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Sharded("text"), Sharded),
        (Own("text"), CheckpointError),
        (OwnNotPlain("text"), NotPlainData),
        (named("E" * 70)("text"), CheckpointError),
        (named("no word")("text"), CheckpointError),
        (named("annotations")("text"), CheckpointError),
        (ClusterEnvironmentError("text"), CheckpointError),
        (BadCheckpoint(3, "a/path", "text"), CheckpointError),
        (named("Long")("text" * MAX_REASON_CHARS), CheckpointError),
    ],
    ids=lambda one: type(one).__name__[:20] if isinstance(one, CheckpointError) else "",
)
def test_every_rank_gets_the_nearest_type_that_it_has_with_the_text(
    error: CheckpointError, expected: type[CheckpointError]
) -> None:
    own, others = on_each_rank(lambda group: raise_together(group, error if group.rank == 0 else None))
    assert own is error
    assert type(others) is expected
    assert str(others).startswith("rank 0: ")
    assert "text" in str(others)
    assert len(str(others)) < MAX_REASON_CHARS + 100


def test_where_no_rank_has_an_error_nothing_is_raised() -> None:
    assert on_each_rank(lambda group: raise_together(group, None)) == [None, None]
