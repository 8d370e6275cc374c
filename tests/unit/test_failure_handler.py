"""Which failures of a generation are told to the other nodes, and that the next one begins without them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic_agent.rendezvous.records import Failure

from .supervised import Supervised

TRACEBACK = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>')
COLLATERAL = (*TRACEBACK, "ConnectionResetError: [Errno 104] Connection reset by peer")
ROOT = (*TRACEBACK, "ValueError: the loss is not a number")


@pytest.fixture
def node(tmp_path: Path) -> Supervised:
    node = Supervised(tmp_path, 4)
    node.start()
    return node


def end(node: Supervised, local_rank: int, returncode: int, lines: tuple[str, ...] = ()) -> None:
    """The worker ends, and its last lines are read."""
    node.exit(local_rank, returncode)
    node.turn()
    node.logs.lines = lines
    node.logs.answer()
    node.turn()


def test_the_root_is_told_after_a_failure_that_follows_from_it(
    node: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    end(node, 0, 1, COLLATERAL)
    end(node, 1, -signal.SIGTERM, ROOT)
    first, root = node.participant.failures
    assert (first.collateral, first.rank, root.collateral, root.rank) == (True, 0, False, 1)
    assert "rank 1 failed before that, and the others because of it" in caplog.text


def test_a_worker_that_another_program_has_killed_is_the_root(node: Supervised) -> None:
    end(node, 0, 1, COLLATERAL)
    end(node, 1, -signal.SIGKILL)
    assert [failure.rank for failure in node.participant.failures] == [0, 1]


def test_one_that_ends_as_it_was_asked_to_has_not_failed(node: Supervised) -> None:
    end(node, 0, 1, COLLATERAL)
    end(node, 1, -signal.SIGTERM)
    end(node, 2, -signal.SIGTERM, COLLATERAL)
    assert [failure.rank for failure in node.failures] == [0]


def test_after_a_root_nothing_is_sought(node: Supervised) -> None:
    end(node, 0, 1, ROOT)
    end(node, 1, 1, ROOT)
    node.exit(2, -signal.SIGTERM)
    node.turn()
    assert not node.logs.asked, "nobody reads the last lines of one that ends as it was asked to"
    assert [failure.rank for failure in node.participant.failures] == [0]
    assert [failure.rank for failure in node.failures] == [0, 1]


def test_the_next_generation_begins_without_failures(node: Supervised) -> None:
    end(node, 0, 1, COLLATERAL)
    for rank in range(1, 4):
        end(node, rank, -signal.SIGTERM)
    node.start(2)
    assert node.failures == []
    node.supervisor.stop(5.0, gently=True, reason="a planned change")
    node.exit(0, -signal.SIGKILL)
    node.turn()
    assert not node.logs.asked, "the failure that follows from another one was of generation 1"


def test_a_failure_of_another_generation_is_shown_without_the_evidence_of_this_one(
    node: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    node.evidence.kept_in = "/logs/gen1"
    generation = node.supervisor._generation
    assert generation is not None
    node.supervisor._failures.look(generation, "inquiry-1")
    end(node, 0, 1, ROOT)
    assert "evidence: /logs/gen1" in caplog.text
    caplog.clear()
    node.supervisor.show_failure(Failure(7, "f", "a node is gone"))
    assert [record.message for record in caplog.records] == ["generation 7 failed: a node is gone"]
