"""What the supervisor makes of its workers' ends, without processes: the loop never waits for a log disk."""

from __future__ import annotations

import errno
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.configuration.stopping import TimeoutConfig
from elastic_agent.agent.output.journal import EventKind
from elastic_agent.agent.workers.failure_handler import KNOWN_WITHIN_S, SEEN_WITHIN_S
from elastic_agent.agent.workers.hang_detector import VERDICT_S
from elastic_agent.health.hang_report import HangFinding, HangProbe, Urgency
from elastic_agent.rendezvous.node.drain import End
from elastic_agent.rendezvous.node.node_actions import Drain
from elastic_agent.rendezvous.records import Action, Failure, Phase
from elastic_agent.worker.steps.drain import DRAINED
from elastic_agent.worker.wire.messages import Go, Guarding, Held, Hold, Keep, Kept, SaveReport
from elastic_agent.worker.wire.shared_progress import LEAVES_SIGTERM

from .supervised import Supervised

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "ValueError: the loss is not a number",
)


@pytest.fixture
def node(tmp_path: Path) -> Supervised:
    node = Supervised(tmp_path, 8)
    node.start()
    return node


def test_a_failure_is_reported_with_the_last_lines_of_the_worker(node: Supervised) -> None:
    node.exit(3, 1)
    node.turn()
    assert not node.reported, "its last lines are not here yet"
    assert not node.group.stopping
    node.logs.lines = TRACEBACK
    node.logs.answer()
    node.turn()
    assert node.reported == ["exit code 1: ValueError: the loss is not a number"]
    assert node.group.signals == [(rank, signal.SIGTERM) for rank in range(8) if rank != 3]


def test_a_log_disk_that_hangs_while_eight_workers_fail_does_not_hold_the_loop(node: Supervised) -> None:
    """The fake disk never answers: a supervisor that waited for it would not return."""
    for rank in range(8):
        node.exit(rank, 1)
    began = node.now
    node.turn()
    assert not node.reported
    assert node.now == began
    due_at = min(at for at in node.supervisor.wake_at() if at is not None)
    assert due_at == began + KNOWN_WITHIN_S
    assert node.turn(KNOWN_WITHIN_S), "all have ended, and nothing is waited for twice"
    assert node.reported == ["exit code 1"]
    assert len(node.failures) == 8


def test_a_failure_is_reported_with_what_nvml_says(node: Supervised) -> None:
    nvml = node.with_gpus()
    node.exit(3, 7)
    node.turn()
    assert nvml.asked == 1
    node.logs.answer()
    node.turn()
    assert not node.reported, "NVML has not answered yet"
    node.nvml_says(2)
    node.turn()
    assert [failure.cause for failure in node.participant.failures] == ["gpu_fault"]
    assert node.reported[0].endswith("; NVML: GPU 0000:3b:00.0: uncorrected memory errors: 2, were 0")


def test_nvml_that_hangs_holds_up_one_failure_within_the_bound_and_no_later_one(node: Supervised) -> None:
    nvml = node.with_gpus()
    node.exit(3, 7)
    node.turn()
    node.logs.answer()
    began = node.now
    assert not node.reported
    assert min(at for at in node.supervisor.wake_at() if at is not None) == began + KNOWN_WITHIN_S
    node.turn(KNOWN_WITHIN_S)
    assert len(node.reported) == 1
    for rank in {*range(8)} - {3}:
        node.exit(rank, -signal.SIGTERM)
    assert node.turn()
    node.start(2)
    node.exit(0, 2)
    node.turn()
    assert len(node.reported) == 1, "the log disk was never late"
    node.logs.answer()
    node.turn()
    assert len(node.reported) == 2
    assert nvml.asked == 1, "no second question while the first has no answer"


def test_a_generation_is_not_over_before_its_last_failure_is_examined(node: Supervised) -> None:
    node.supervisor.stop(1.0, gently=False, reason="another node has failed")
    for rank in range(8):
        node.exit(rank, 1)
    assert not node.turn()
    node.logs.answer()
    assert node.turn()
    assert len(node.failures) == 8
    assert not node.reported, "they have failed after they were asked to end"


def test_workers_that_end_with_success_end_the_generation(node: Supervised) -> None:
    for rank in range(8):
        node.exit(rank, 0)
        assert node.turn() == (rank == 7)
    assert node.supervisor.group is None
    assert not node.reported
    assert node.supervisor.wake_at() == ()


@pytest.mark.parametrize("kept", [False, True])
def test_an_error_after_the_last_step_counts_only_if_its_state_is_not_kept(
    node: Supervised, kept: bool
) -> None:
    """Without a Checkpointer it is the script's own save, as far as the agent knows, and so a failure."""
    node.supervisor.drain(Drain(1, True, "a node joins"))
    node.supervisor.worker_answered(1, 3, 5, End(5))
    if kept:
        node.supervisor.worker_kept(1, 3)
    node.exit(3, 1)
    node.turn()
    node.logs.lines = TRACEBACK
    node.logs.answer()
    node.turn()
    assert node.reported == ([] if kept else ["exit code 1: ValueError: the loss is not a number"])


def test_what_comes_of_another_generation_is_refused(node: Supervised) -> None:
    node.group.codes[0] = 1
    saved = SaveReport(9, 0, 5, "ok", 1.0, 10)
    node.supervisor.worker_exited(9, 0, node.now)
    node.supervisor.guard_sent(9, 0, Guarding(9, 0))
    node.supervisor.worker_answered(9, 0, 5, End(5))
    node.supervisor.worker_kept(9, 0)
    node.supervisor.stop_read(9, None)
    node.links.came.append((saved, node.now))
    node.turn()
    generation = node.supervisor._generation
    assert generation is not None
    assert not node.group.returncodes
    assert (generation.drain.finished, generation.drain.kept) == (set(), set())
    assert node.supervisor.group is not None
    [value] = [count for _, _, count in node.metrics.checkpoint_saves_total.samples() if count]
    assert value == 1, "but for what the disk writer saves later"


def test_a_save_that_the_disk_refused_is_remembered_until_a_later_one_is_there(node: Supervised) -> None:
    def report(step: int, result: Any) -> None:
        saved = SaveReport(1, 0, step, result, 1.0, 10, directory="/runs/x")
        node.links.came.append((saved, node.now))

    report(5, "error")
    assert node.supervisor.lost_save(1).startswith("step 5 is NOT on disk in /runs/x")
    report(6, "ok")
    assert node.supervisor.lost_save(1) == ""
    for rank in range(8):
        node.exit(rank, 0)
        node.turn()
    report(7, "error")
    assert node.supervisor.lost_save(1).startswith("step 7 "), "it was on its way when the workers ended"


def test_survivors_that_guard_their_last_step_are_not_signalled_before_it_is_kept(node: Supervised) -> None:
    node.supervisor.guard_sent(1, 1, Guarding(1, 1))
    node.exit(0, 1)
    node.turn()
    node.logs.answer()
    node.turn()
    assert node.group.stopping
    assert not node.group.signals
    assert node.links.sent == [(1, Hold(1.0))]
    node.supervisor.guard_sent(1, 1, Held(7))
    assert node.links.sent[1:] == [(1, Keep())]
    node.turn(1.5)
    node.supervisor.guard_sent(1, 1, Kept(7))
    node.turn()
    assert node.links.sent[2:] == [(1, Go())]
    assert [rank for rank, _ in node.group.signals] == list(range(1, 8))
    assert node.group.kill_at == node.now + node.config.stop.failure_grace_s


def test_a_planned_stop_keeps_the_last_step_too_and_takes_no_longer_for_it(node: Supervised) -> None:
    node.supervisor.guard_sent(1, 1, Guarding(1, 1))
    asked_at = node.now
    node.supervisor.stop(1.5, gently=True, reason="a planned change")
    assert not node.group.signals
    assert node.links.sent == [(1, Hold(0.75))]
    node.supervisor.guard_sent(1, 1, Held(7))
    node.turn(1.0)
    node.supervisor.stop(1.5, gently=True, reason="a planned change")
    node.supervisor.guard_sent(1, 1, Kept(7))
    node.turn()
    assert [rank for rank, _ in node.group.signals] == list(range(8))
    assert node.group.kill_at == asked_at + 1.5


def test_a_crash_in_a_planned_change_counts_by_what_the_store_holds(node: Supervised) -> None:
    assert node.supervisor.drain(Drain(1, False, "a node joins"))
    node.exit(0, 1)
    node.turn()
    assert (node.last_steps.looks, node.reported) == (1, [])
    node.stop_was(None)
    node.turn()
    node.logs.answer()
    node.turn()
    assert node.reported == ["exit code 1"]


def test_workers_that_drain_are_no_failure(node: Supervised) -> None:
    node.supervisor.drain(Drain(1, True, "a node joins"))
    for rank in range(8):
        node.supervisor.worker_answered(1, rank, 5, End(5))
        node.supervisor.worker_kept(1, rank)
        node.exit(rank, DRAINED)
    signals = node.group.signals
    assert node.turn()
    assert not node.reported
    assert not signals


def test_workers_that_do_not_move_are_ended_by_the_signal_that_shows_where_they_stand(tmp_path: Path) -> None:
    node = Supervised(tmp_path, 2, TimeoutConfig(hang=10.0))
    node.start()
    generation = node.supervisor._generation
    assert generation is not None
    generation.hang.stepped(0, 3, node.now)
    generation.hang.stepped(1, 2, node.now)
    node.turn(9.9)
    assert not node.reported
    node.turn(0.2)
    suspicion = node.participant._session.record.suspicion
    assert suspicion is not None
    assert suspicion.urgency is Urgency.LAST
    node.turn(VERDICT_S - 0.1)
    assert not node.reported, "the verdict of all nodes may still come"
    node.turn(0.2)
    assert node.reported[0].startswith("hang: no step or checkpoint reported for 10 s (--hang-timeout)")
    assert node.group.signals == [(rank, signal.SIGABRT) for rank in range(2)]
    node.exit(0, -signal.SIGABRT)
    node.exit(1, -signal.SIGABRT)
    assert node.turn()
    assert len(node.reported) == 1


def test_a_worker_that_leaves_sigterm_to_the_agent_is_killed_where_sigterm_would_have_ended_it(
    node: Supervised,
) -> None:
    generation = node.supervisor._generation
    assert generation is not None
    generation.pages.by_rank[2].words[LEAVES_SIGTERM] = 1
    node.supervisor.stop(30.0, gently=True, reason="a planned change")
    asked = dict(node.group.signals)
    assert asked == {rank: signal.SIGKILL if rank == 2 else signal.SIGTERM for rank in range(8)}


# ---------------------------------------------------------------- evidence


def hanging(tmp_path: Path) -> Supervised:
    node = Supervised(tmp_path, 2, TimeoutConfig(hang=10.0))
    node.start()
    generation = node.supervisor._generation
    assert generation is not None
    generation.hang.stepped(0, 3, node.now)
    node.evidence.at_once = False
    return node


def test_workers_that_hang_are_seen_before_they_are_ended(tmp_path: Path) -> None:
    node = hanging(tmp_path)
    node.turn(10.1)
    node.turn(VERDICT_S)
    assert [why for why, _ in node.evidence.looks] == ["hang"]
    assert not node.group.signals
    node.turn(0.1)
    assert len(node.evidence.looks) == 1
    node.evidence.end()
    node.turn()
    assert node.group.signals == [(rank, signal.SIGABRT) for rank in range(2)]


def test_a_look_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    node = hanging(tmp_path)
    node.turn(10.1)
    node.turn(VERDICT_S)
    node.turn(SEEN_WITHIN_S + 0.1)
    assert node.group.signals


@pytest.mark.parametrize("before", [0, 1])
def test_what_this_machine_lacks_for_its_workers_fails_the_generation_and_is_named(
    tmp_path: Path, before: int
) -> None:
    node = Supervised(tmp_path, 2)
    node.lacks, node.before_lack = [OSError(errno.EMFILE, "Too many open files")], before
    assert "ulimit -n" in node.start()
    [failure] = node.participant.failures
    assert (failure.cause, failure.action) == ("not_started", Action.FREE)
    assert "ulimit -n" in failure.summary
    for rank in range(before):
        node.exit(rank, -signal.SIGTERM)
    assert node.turn()
    training = node.supervisor._observer.training
    training.advance(node.now + 3.0)
    assert training._node.spent["rendezvous"] == 3.0, "it waits for the next world, and for nothing else"
    assert node.start(2) == ""
    assert node.group.running == 2


def test_a_folder_of_the_agent_that_was_removed_is_a_lack(tmp_path: Path) -> None:
    folder = tmp_path / "elastic-agent-1"
    folder.mkdir()
    node = Supervised(folder, 2)
    shutil.rmtree(folder)
    assert f"{folder} was removed" in node.start()
    assert node.turn()


def test_the_verdict_that_ends_a_generation_is_in_the_journal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = hanging(tmp_path)
    generation = node.supervisor._generation
    assert generation is not None
    found = HangProbe(2, finding=HangFinding.CERTAIN, why="rank 1 on node a is stopped", node="a", rank=1)
    ended = replace(generation.world, phase=Phase.STOPPING, inquiry=found)
    monkeypatch.setattr(type(node.participant), "world", property(lambda _: ended))
    for _ in range(2):
        node.supervisor.show_failure(Failure(1, "f", "hang: rank 1", cause="hang", node="a", rank=1))
    events = node.supervisor._observer.journal.since(0, 99)
    told = [
        (one.kind, one.rank, one.about)
        for one in events
        if one.kind in (EventKind.VERDICT, EventKind.FAILURE)
    ]
    assert told == [(EventKind.VERDICT, 1, "a"), (EventKind.FAILURE, 1, "a")]
