"""What is kept of workers before they end: files that are this user's alone, bounded, without what may be secret."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from elastic_agent.agent.workers import evidence as module
from elastic_agent.agent.workers import rank_activity as facts
from elastic_agent.agent.workers.evidence import MOST_LOOKS, Evidence, EvidenceKeeper, FlightRecords
from elastic_agent.agent.workers.processes.proc import stat_of
from elastic_agent.agent.workers.rank_activity import StackFile, Target
from elastic_agent.health.hang_report import InGroup, RankActivity, Recorded
from elastic_agent.threads import Thread

SECRET = "s3cr3t-canary"
SCRIPT = """
import os, sys, time
from elastic_agent.worker.wire.shared_progress import register_stacks
register_stacks(os.environ["STACKS"])
def train(token="s3cr3t-canary"):
    print("ready", flush=True)
    time.sleep(600)  # s3cr3t-canary
train()
"""


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    """A worker that sleeps, with secrets wherever a program may have them."""
    stacks = StackFile()
    environment = {**os.environ, "STACKS": stacks.path, "TOKEN": SECRET}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, f"--token={SECRET}", SECRET]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 30
        while (stat := stat_of(f"/proc/{process.pid}")) is not None and stat.state != "S":
            assert time.monotonic() < deadline
        yield Target(3, 0, process.pid, stacks, step=7)
        process.kill()


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time enough for a machine that has much to do."""
    monkeypatch.setattr(facts, "ANSWER_S", 20.0)
    monkeypatch.setattr(module, "LOOK_S", 20.0)


def over(look: Evidence) -> Evidence:
    deadline = time.monotonic() + 30
    while not look.over:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return look


def kept(keeper: EvidenceKeeper, target: Target) -> Evidence:
    look = over(keeper.look("hang", [target]))
    assert keeper._thread is not None
    keeper._thread.join(30)
    return look


@pytest.fixture
def keeper(tmp_path: Path) -> EvidenceKeeper:
    keeper = EvidenceKeeper("a", tmp_path / "logs", time.monotonic)
    keeper.begin("digits", "r1", 4)
    return keeper


def test_what_a_worker_does_is_kept(keeper: EvidenceKeeper, target: Target) -> None:
    look = kept(keeper, target)
    assert [state.doing for state in look.states] == [RankActivity.WAITS]
    assert look.path == keeper.folder / "a" / "1-hang"  # type: ignore[operator]
    assert (look.path / "summary.txt").read_text().startswith("rank 3: waits, train.py:7 in train")
    text = (look.path / "rank3.txt").read_text()
    for wanted in ("step 7", "node a, generation 4", "time to pass", "train.py:7 in train"):
        assert wanted in text


def test_no_secret_is_in_it(target: Target, tmp_path: Path) -> None:
    """Also not by itself, without a name or a form that tells."""
    keeper = EvidenceKeeper("a", tmp_path / "logs", time.monotonic, secrets={SECRET})
    keeper.begin("digits", "r1", 4)
    kept(keeper, target)
    files = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET in path.read_text()]


def test_files_and_folders_are_this_users_alone(keeper: EvidenceKeeper, target: Target) -> None:
    before = os.umask(0)
    try:
        path = kept(keeper, target).path
    finally:
        os.umask(before)
    assert path is not None
    for folder in (path, path.parent, path.parents[1]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


class Recorder:
    """As torch's thread is that waits for orders: it answers each one with the same dump."""

    def __init__(self, folder: Path, content: bytes) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._content = content
        os.mkfifo(folder / "pipe_3.pipe")
        self._pipe = os.open(folder / "pipe_3.pipe", os.O_RDWR)
        self.orders = 0
        self._thread = Thread(self._answer, "test")
        self._thread.start()

    def _answer(self) -> None:
        while os.read(self._pipe, 1) == b"1":
            self.orders += 1
            (self._folder / "rank_3").write_bytes(self._content)

    def close(self) -> None:
        os.write(self._pipe, b"0")
        self._thread.join(10)
        os.close(self._pipe)


ENTRY = {
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 7,
    "profiling_name": "nccl:all_reduce",
    "state": "started",
    "retired": False,
    "is_p2p": False,
}


def test_the_flight_recorder_of_a_rank_that_has_one_is_asked_and_read(
    keeper: EvidenceKeeper, target: Target
) -> None:
    folder = keeper.folder.parent / "flight_records"  # type: ignore[union-attr]
    dump = {"version": "2.10", "pg_config": {}, "entries": [ENTRY]}
    recorder = Recorder(folder, pickle.dumps(dump, protocol=2))
    first, second = kept(keeper, target), kept(keeper, target)
    recorder.close()
    assert recorder.orders == 2
    assert first.states[0].recorded == Recorded(0.0, True, (InGroup("default_pg", None, 7, 7, "all_reduce"),))
    assert second.states[0].recorded is not None
    assert second.states[0].recorded.still_s > 0
    text = (first.path / "rank3.txt").read_text()  # type: ignore[operator]
    assert "group default_pg: waits in all_reduce 7" in text
    assert not module.ask(folder.parent, 3)
    assert not module.ask(folder.parent, 4)


def test_a_recorder_that_does_not_answer_is_waited_for_as_long_as_the_look_may_take(
    keeper: EvidenceKeeper, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is asked no second time meanwhile."""
    asked = list[Sequence[int]]()
    goes_on = threading.Event()

    def order(records: FlightRecords, ranks: Sequence[int]) -> None:
        asked.append(ranks)
        goes_on.wait(60)

    monkeypatch.setattr(FlightRecords, "order", order)
    monkeypatch.setattr(module, "LOOK_S", 3.0)
    look = kept(keeper, target)
    assert time.monotonic() >= look.began_at + 3.0 - module.READ_S
    kept(keeper, target)
    goes_on.set()
    assert look.states[0].recorded is None
    assert asked == [[3]]


def test_of_many_looks_a_few_are_kept_and_each_generation_has_its_own(
    keeper: EvidenceKeeper, target: Target
) -> None:
    paths = [kept(keeper, target).path for _ in range(MOST_LOOKS + 2)]
    assert [path is None for path in paths] == [False] * MOST_LOOKS + [True] * 2
    keeper.begin("digits", "r1", 5)
    assert "gen5" in str(kept(keeper, target).path)


def test_without_a_folder_states_are_known_all_the_same(target: Target) -> None:
    keeper = EvidenceKeeper("a", None, time.monotonic)
    keeper.begin("digits", "r1", 1)
    look = kept(keeper, target)
    assert (look.path, keeper.folder) == (None, None)
    assert look.states


def test_a_disk_that_refuses_is_said_once(
    keeper: EvidenceKeeper, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").touch()
    for _ in range(2):
        assert kept(keeper, target).states
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"evidence is not kept in {keeper.folder}/a/1-hang"
    ]


def test_a_disk_that_stands_still_holds_up_files_and_no_answer(
    keeper: EvidenceKeeper, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(module, "_make_private", lambda path: goes_on.wait(60))
    monkeypatch.setattr(module, "ask", lambda generation, rank: goes_on.wait(60) and False)
    monkeypatch.setattr(module, "LOOK_S", 5.0)
    looks = []
    for _ in range(3):
        looks.append(over(keeper.look("inquiry", [target])))
    assert [[state.doing for state in look.states] for look in looks] == [[RankActivity.WAITS]] * 3
    assert [look.path is None for look in looks] == [False, True, True]
    goes_on.set()
    keeper.close()
