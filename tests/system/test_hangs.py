"""Kinds of hangs of real training on gloo: who is named, of what is seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.workers.rank_activity import StackFile, Target, WorkerFacts, look_at, rank_state
from elastic_agent.health.diagnosis import diagnose
from elastic_agent.health.hang_report import HangFinding, RankActivity, RankReport
from elastic_agent.health.hang_report import HangReport as Answer
from elastic_agent.rendezvous.records import Cause, CauseKind, Endpoint, Member, Phase, World

HERE = Path(__file__).parent
RANKS = 3
CULPRIT = 1
WITHIN_S = 60.0
PAUSE_S = 0.2

KINDS: dict[str, RankActivity] = {
    "skipped_collective": RankActivity.IN_COLLECTIVE,
    "other_order": RankActivity.IN_COLLECTIVE,
    "extra_collective": RankActivity.IN_COLLECTIVE,
    "other_group": RankActivity.IN_COLLECTIVE,
    "stopped": RankActivity.STOPPED,
    "asleep": RankActivity.WAITS,
    "lock_of_python": RankActivity.WAITS,
    "busy": RankActivity.WORKS,
    "deadlock": RankActivity.WAITS,
    "data_loader": RankActivity.WAITS,
    "data_loader_without_processes": RankActivity.WAITS,
    "read_of_a_pipe": RankActivity.WAITS,
    "read_of_a_socket": RankActivity.WAITS,
    "child_that_does_not_end": RankActivity.WAITS,
    "exit_handler": RankActivity.WAITS,
    "save": RankActivity.IN_SAVE,
    "file_server": RankActivity.UNINTERRUPTIBLE,
    "late_for_backward": RankActivity.WAITS,
    "late_for_rendezvous": RankActivity.WAITS,
}
"""What the rank that is to blame does in each."""
OFTEN = (
    "skipped_collective",
    "stopped",
    "asleep",
    "lock_of_python",
    "data_loader",
    "save",
    "late_for_rendezvous",
)
"""In `make test`; the others are variants."""


def of_kind(kind: str) -> Any:
    """A parameter."""
    return pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.long)


@dataclass
class Hang:
    """One job that hangs."""

    kind: str
    marks: Path
    stacks: list[StackFile]
    pids: list[int]
    seen: tuple[WorkerFacts, ...] = ()

    @property
    def targets(self) -> list[Target]:
        return [Target(rank, 0, self.pids[rank], self.stacks[rank]) for rank in range(RANKS)]

    @property
    def states(self) -> list[RankReport]:
        return [rank_state(facts) for facts in self.seen]

    @property
    def settled(self) -> bool:
        """The others wait for the one that does not come, and that one has come to what it never comes back from."""
        marked = {int(line) for line in self.marks.read_text().split()} if self.marks.exists() else set()
        waits = [state.doing is RankActivity.IN_COLLECTIVE for state in self.states if state.rank != CULPRIT]
        stands = any(state.doing is KINDS[self.kind] for state in self.states if state.rank == CULPRIT)
        return marked == set(range(RANKS)) and all(waits) and stands


WORLD = World(
    "job",
    1,
    Phase.RUNNING,
    tuple(Member(f"n{rank}", f"i{rank}", 1, rank) for rank in range(RANKS)),
    Endpoint("127.0.0.1", 1),
    Cause(CauseKind.START),
)


@pytest.fixture(scope="module")
def mountpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """Of a file system whose fsync is never answered; None where this user may not mount one."""
    folder = tmp_path_factory.mktemp("fuse")
    command = [sys.executable, HERE.parent / "slow_fuse.py", folder, "-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        mounted = server.stdout.readline().strip() == "mounted"
        yield folder if mounted else None
        server.kill()
    if mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def hangs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mountpoint: Path | None
) -> Iterator[dict[str, Hang]]:
    """All kinds that are asked for at once, seen when all others wait, or when that takes too long."""
    folder = tmp_path_factory.mktemp("hangs")
    asked = {item.callspec.params["kind"] for item in request.session.items if item.path == request.path}
    kinds = [kind for kind in KINDS if kind in asked and (kind != "file_server" or mountpoint is not None)]
    found = {kind: Hang(kind, folder / kind, [StackFile() for _ in range(RANKS)], []) for kind in kinds}
    ranks = [
        (kind, _variables(found[kind], rank, mountpoint), found[kind].stacks[rank].path)
        for kind in kinds
        for rank in range(RANKS)
    ]
    log = folder / "output"
    with log.open("w") as output:
        nursery = subprocess.Popen(
            [sys.executable, HERE / "hang_nursery.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    with nursery:
        nursery.stdin.write(json.dumps(ranks) + "\n")
        nursery.stdin.flush()
        pids = json.loads(nursery.stdout.readline())
        for number, (kind, _, _) in enumerate(ranks):
            found[kind].pids.append(pids[number])
        _look_at(list(found.values()))
        print(log.read_text())
        yield found
        for pid in pids:
            _kill(pid)
        nursery.stdin.close()


def _variables(hang: Hang, rank: int, mountpoint: Path | None) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "HANGING_STORE": f"file://{hang.marks}.store",
        "HANGING_MARKS": str(hang.marks),
        "HANGING_MOUNT": str(mountpoint),
    }


def _look_at(hangs: list[Hang]) -> None:
    """Until all others wait in each."""
    deadline = time.monotonic() + WITHIN_S
    left = hangs
    while left and time.monotonic() < deadline:
        seen = iter(_look([target for hang in left for target in hang.targets]))
        for hang in left:
            hang.seen = tuple(next(seen) for _ in range(RANKS))
        left = [hang for hang in left if not hang.settled]
        time.sleep(PAUSE_S)


def _look(targets: list[Target]) -> tuple[WorkerFacts, ...]:
    return look_at(targets, time.monotonic, time.sleep)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


@pytest.mark.parametrize("kind", list(map(of_kind, KINDS)))
def test_the_one_that_does_not_come_is_named(kind: str, hangs: dict[str, Hang]) -> None:
    if kind not in hangs:
        pytest.skip("this user may not mount a file system")
    hang = hangs[kind]
    assert hang.settled, hang.seen
    found = diagnose([Answer(1, 1, (state,)) for state in hang.states], WORLD.node_of_ranks)
    assert (found.rank, found.node) == (CULPRIT, f"n{CULPRIT}"), (found, hang.seen)
    works = KINDS[kind] is RankActivity.WORKS  # as far as can be seen
    assert found.finding in ((HangFinding.HEALTHY,) if works else (HangFinding.LIKELY, HangFinding.CERTAIN))
    assert hang.states[CULPRIT].doing is KINDS[kind], _shown(hang.seen[CULPRIT])


@pytest.mark.parametrize("kind", list(map(of_kind, ["asleep", "late_for_backward", "read_of_a_pipe"])))
def test_of_workers_without_stacks_one_that_sleeps_or_reads_is_named(
    kind: str, hangs: dict[str, Hang]
) -> None:
    """As of those that started cold and call nothing of the library: threads of gloo tell the others' wait."""
    targets = [replace(target, stacks=None) for target in hangs[kind].targets]
    seen = _look(targets)
    states = [rank_state(facts) for facts in seen]
    found = diagnose([Answer(1, 1, (state,)) for state in states], WORLD.node_of_ranks)
    assert (found.finding, found.rank, states[CULPRIT].doing) == (
        HangFinding.LIKELY,
        CULPRIT,
        RankActivity.WAITS,
    ), seen


@pytest.mark.parametrize("kind", [of_kind("deadlock")])
def test_and_one_that_waits_for_a_lock_is_not(kind: str, hangs: dict[str, Hang]) -> None:
    targets = [replace(target, stacks=None) for target in hangs[kind].targets]
    seen = _look(targets)
    found = diagnose([Answer(1, 1, (rank_state(facts),)) for facts in seen], WORLD.node_of_ranks)
    assert (found.finding, found.rank) == (HangFinding.UNCLEAR, None), seen


def _shown(facts: WorkerFacts) -> str:
    return "\n".join(map(str, (*facts.threads, *facts.stacks)))
