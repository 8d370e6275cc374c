"""Two runs in one checkpoint directory, in every order: who may write, what is kept, and what each is told."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.worker.errors import CheckpointError, Fenced, OtherRun, Unconfirmed
from elastic_agent.worker.storage.disk import (
    checkpoint_files,
    commit,
    durable,
    ownership,
    parts,
    shard_files,
)
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.ownership import Ownership
from elastic_agent.worker.wire import files
from elastic_agent.worker.wire.environment import Run, this_run
from elastic_agent.worker.wire.files import checksum, seal, seal_fields
from tests.shards import commit_whole, write_whole

A, B, C = (Run(f"run-{name}", f"job {name}") for name in "abc")


def permitted() -> None:
    pass


class LockKeeper:
    """What an agent does with a lock that a worker lends it. Deaf: it does not get it."""

    def __init__(self) -> None:
        self.deaf = False
        self.run = ""
        self.kept: list[int] = []

    def keep(self, run: str, *descriptors: int) -> bool:
        if not self.deaf:
            if run != self.run:
                self.end()
            self.run = run
            self.kept += map(os.dup, descriptors)
        return not self.deaf

    def end(self) -> None:
        while self.kept:
            os.close(self.kept.pop())


class Job:
    """Rank 0 of one generation of one run, without torch."""

    def __init__(
        self,
        directory: Path,
        run: Run,
        *,
        keep: int = 2,
        generation: int = 1,
        agent: LockKeeper | None = None,
    ) -> None:
        lend = agent.keep if agent is not None else (lambda *_: False)
        self.files = CheckpointFiles(directory, keep=keep, run=run, lend=lend)
        self.run = run
        self.generation = generation
        self.step = 0
        self.saved: list[int] = []

    def load(self) -> int:
        try:
            self.files.claim.await_former_run(wait_s=0)
            found, _ = self.files.find()
            self.step, run = 0, None
            if found is not None:
                found.stream.close()
                self.step, run = found.manifest.step, found.manifest.run
            self.files.claim.take(self.step, run)
        except CheckpointError:
            self.files.claim.release_lock()
            raise
        return self.step

    def save(self, step: int, may_change: Callable[[], None] = permitted) -> None:
        self.files.claim.uphold(self.step)
        attempt = write_whole(self.files, step, generation=self.generation, may_change=may_change)
        commit_whole(self.files, attempt, step, generation=self.generation, may_change=may_change)
        self.step = step
        self.saved.append(step)


def steps(directory: Path) -> dict[int, str]:
    """By step, whose checkpoint is there; each is whole."""
    reader = CheckpointFiles(directory, keep=1, run=Run("reader"))
    found = {}
    for step in reader.steps():
        with (checkpoint := reader.open(step)).stream:
            found[step] = checkpoint.manifest.run
    return found


def owner_of(directory: Path) -> Ownership:
    return Ownership.from_json((directory / "owner.json").read_bytes())


@pytest.fixture(autouse=True)
def power_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without them."""
    monkeypatch.setattr(ownership.Lock, "take", lambda self, dir_fd: True)


# ---------------------------------------------------------------- the value


def test_an_owner_is_read_as_it_was_written() -> None:
    assert Ownership.from_json(OWNER.to_json()) == OWNER
    for schema in (2, 4):
        assert Ownership.from_json(seal(schema, OWNER)) == OWNER, "that of the version before is read, too"


OWNER = Ownership(A, {"run-b": 7})


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 1}, {"run": None}, {"run": {"id": "a/b", "label": ""}}, {"run": {"id": "a", "extra": 1}},
        {"took_over": {"b": -1}}, {"took_over": {"b": True}}, {"took_over": {"a/b": 1}}, {"took_over": [["b", 1]]},
        {"took_over": None}, {"run": {"id": "a", "label": "x" * 201}},
    ],
)  # fmt: skip
def test_what_is_no_owner_is_refused(change: dict[str, Any]) -> None:
    body = {**json.loads(OWNER.to_json()), **change}
    del body["check"]
    with pytest.raises(ValueError, match=r"owner|run"):
        Ownership.from_json(json.dumps({**body, "check": checksum(body)}).encode())


def test_no_bit_of_an_owner_may_flip_unnoticed() -> None:
    raw = OWNER.to_json()
    for position in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[position // 8] ^= 1 << position % 8
        try:
            assert Ownership.from_json(bytes(flipped)) == OWNER  # white space
        except ValueError:
            continue


def test_the_agent_names_the_run_and_without_one_each_process_is_its_own() -> None:
    assert this_run({"ELASTIC_AGENT_RUN": "x", "TORCHELASTIC_RUN_ID": "demo"}).id == "x"
    assert "job demo" in this_run({"TORCHELASTIC_RUN_ID": "demo"}).label
    mine = this_run({}).id
    assert this_run({}).id == mine
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writes, this_run({}).id.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reads, 100).decode() != mine
    os.close(reads)
    os.close(writes)


# ---------------------------------------------------------------- two runs, in every order


class Interrupted:
    """Lets `then` happen right before the call number `at` of those that reach the file system."""

    CALLS = ("open", "write", "rename", "unlink", "fsync", "listdir", "mkdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, then: Callable[[], None]) -> None:
        self._left = at
        self._then = then
        self.happened = False
        for module in (checkpoint_files, commit, ownership, durable, files, parts, shard_files):
            monkeypatch.setattr(module, "os", self)

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in self.CALLS:
            return call

        def counted(*args: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.happened = True
                self._then()
            return call(*args, **named)

        return counted


def interruptions(
    tmp_path: Path,
    first: Callable[[Path], Job],
    does: Callable[[Job], object],
    other: Callable[[Path], Job],
    meanwhile: Callable[[Job], object],
) -> Iterator[tuple[Path, Job, Job, CheckpointError | None, CheckpointError | None]]:
    """`does` of a first job, and all that another does `meanwhile`, between any two calls of it."""
    for at in count(1):
        directory = tmp_path / str(at)
        one = first(directory)
        another = other(directory)
        refusals: list[CheckpointError] = []

        def then(another: Job = another, refusals: list[CheckpointError] = refusals) -> None:
            try:
                meanwhile(another)
            except CheckpointError as error:
                refusals.append(error)

        refusal = None
        with pytest.MonkeyPatch.context() as patched:
            interrupted = Interrupted(patched, at, then)
            try:
                does(one)
            except CheckpointError as error:
                refusal = error
        if not interrupted.happened:
            assert at > 8, "the calls are counted"
            return
        yield directory, one, another, refusal, refusals[0] if refusals else None


def started(directory: Path) -> Job:
    """Run A, which has saved 10, 20 and 30."""
    job = Job(directory, A)
    job.load()
    for step in (10, 20, 30):
        job.save(step)
    return job


def second(directory: Path) -> Job:
    return Job(directory, B)


def go_on(*saves: int) -> Callable[[Job], None]:
    def do(job: Job) -> None:
        job.load()
        for step in saves:
            job.save(step)

    return do


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("saves", [(), (35,), (50,), (40, 45), (31, 32, 33)], ids=str)
def test_whoever_takes_over_in_the_middle_of_a_save_keeps_all_and_the_other_is_told(
    tmp_path: Path, saves: tuple[int, ...]
) -> None:
    for directory, a, b, told_a, told_b in interruptions(
        tmp_path, started, lambda job: job.save(40), second, go_on(*saves)
    ):
        there = steps(directory)
        if told_b is not None:
            # It had saved 40 after A's 40: the same step, which it does not come from.
            assert isinstance(told_b, OtherRun)
            continue
        assert b.saved == list(saves)
        assert told_a is None or (isinstance(told_a, OtherRun) and "job b" in str(told_a))
        if told_a is not None:
            assert 40 not in there or there[40] == B.id
        # What B was told is saved is there, and A's newest that it came from, or a newer one of B.
        assert all(there[step] == B.id for step in saves[-2:])
        newest = max(there)
        assert there[newest] == (B.id if saves else A.id)
        assert newest == max([*saves, 0]) or newest == b.step
        # A's next save is refused, and so is its next generation; B goes on.
        with pytest.raises(OtherRun, match=r"taken over by run run-b \(job b\).*this run run-a"):
            a.save(60)
        with pytest.raises(OtherRun, match="taken over"):
            Job(directory, A, generation=2).load()
        b.save(70)
        assert Job(directory, B, generation=2).load() == 70
        assert not [name for name in os.listdir(directory) if name.startswith("tmp-")]


def started_later(directory: Path) -> Job:
    job = started(directory)
    job.files.claim.uphold(30)
    return job


def one_save(job: Job) -> None:
    job.load()
    job.save(job.step + 40)


@pytest.mark.usefixtures("no_locks")
def test_what_is_saved_while_another_run_loads_is_to_be_loaded(tmp_path: Path) -> None:
    a = started(tmp_path)
    b = Job(tmp_path, B)
    a.save(40)
    assert not b.files.claim.take(30, A.id, again=True)
    assert b.files.claim.take(40, A.id, again=True)
    with pytest.raises(OtherRun, match="taken over"):
        a.save(50)


@pytest.mark.usefixtures("no_locks")
def test_of_two_that_come_at_once_one_has_the_directory(tmp_path: Path) -> None:
    for directory, b, c, told_b, told_c in interruptions(
        tmp_path, second, one_save, lambda directory: Job(directory, C), one_save
    ):
        assert told_c is None or isinstance(told_c, OtherRun)
        assert told_b is None or isinstance(told_b, OtherRun) or "load again" in str(told_b)
        saved = {job.saved[-1]: job.run.id for job in (b, c) if job.saved}
        there = steps(directory)
        assert all(there[step] == run for step, run in saved.items() if step == max(saved))
        goes_on = []
        for run in (B, C):
            again = Job(directory, run, generation=2)
            with contextlib.suppress(OtherRun):
                assert again.load() == max(saved, default=0)
                again.save(again.step + 10)
                goes_on.append(again)
        assert len(goes_on) == 1
        assert steps(directory)[goes_on[0].step] == goes_on[0].run.id


@pytest.mark.usefixtures("no_locks")
def test_a_run_that_was_set_back_does_not_delete_what_another_has_saved(tmp_path: Path) -> None:
    """B loads 30 of A; A, which cannot see that yet (a cached directory), comes to 90; B saves 31."""
    started(tmp_path)
    b = Job(tmp_path, B)
    b.load()
    owner = (tmp_path / "owner.json").read_bytes()
    a = Job(tmp_path, A, generation=2)
    (tmp_path / "owner.json").write_bytes(Ownership(A).to_json())
    a.load()
    a.save(80)
    a.save(90)
    (tmp_path / "owner.json").write_bytes(owner)
    with pytest.raises(OtherRun, match=r"holds step 90 of run run-a, which this run run-b .* at step 30"):
        b.save(31)
    assert steps(tmp_path) == {80: A.id, 90: A.id}
    with pytest.raises(OtherRun, match="step 90 of run run-a"):
        Job(tmp_path, B, generation=2).load()


# ---------------------------------------------------------------- what a run that comes here may delete


def fill(job: Job) -> None:
    """Save so often that all that may be deleted is gone."""
    for step in range(job.step + 1, job.step + 4):
        job.save(step)


def of(directory: Path, run: Run) -> list[int]:
    return sorted(step for step, whose in steps(directory).items() if whose == run.id)


def test_what_ended_runs_have_left_is_loaded_and_deleted_by_their_successor(tmp_path: Path) -> None:
    started(tmp_path)
    for run in (B, C):
        job = Job(tmp_path, run)
        job.load()
        job.save(job.step + 5)
        del job
    last = Job(tmp_path, Run("last"))
    assert last.load() == 40
    assert steps(tmp_path) == {35: B.id, 40: C.id}
    fill(last)
    assert set(steps(tmp_path).values()) == {"last"}
    assert len(os.listdir(tmp_path)) == 6, "two checkpoints, the owner and the lock"


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_successor_still_has_what_it_loaded(tmp_path: Path) -> None:
    a = started(tmp_path)
    b = Job(tmp_path, B)
    b.load()
    fill(b)
    assert set(steps(tmp_path).values()) == {B.id}
    with pytest.raises(OtherRun, match="taken over by run run-b"):
        a.save(40)


def copied(tmp_path: Path) -> Path:
    """A's 20 and 30, and below them B's 5 and 7, that somebody has copied there."""
    directory = tmp_path / "x"
    started(directory)
    b = Job(tmp_path / "b", B)
    for step in (5, 7):
        b.save(step)
    for path in (tmp_path / "b").glob("step-*"):
        path.rename(directory / path.name)
    return directory


@pytest.mark.parametrize("owner", ["kept", "damaged", "lost"])
def test_older_checkpoints_of_a_run_that_ones_own_does_not_come_from_stay(tmp_path: Path, owner: str) -> None:
    directory = copied(tmp_path)
    if owner == "damaged":
        (directory / "owner.json").write_bytes(b"half")
    if owner == "lost":
        (directory / "owner.json").unlink()
    for run in (C, Run("again")):
        job = Job(directory, run)
        assert job.load() >= 30
        fill(job)
        assert of(directory, B) == [5, 7]
        assert not of(directory, A)
        job.files.claim._lock.forget()


@pytest.mark.parametrize("whose", [A, B])
def test_a_manifest_that_cannot_be_read_is_deleted_with_its_run_and_not_otherwise(
    tmp_path: Path, whose: Run
) -> None:
    directory = copied(tmp_path)
    step = 20 if whose == A else 7
    (directory / f"step-{step:012d}.json").write_bytes(b"half")
    c = Job(directory, C)
    assert c.load() == 30
    fill(c)
    assert (directory / f"step-{step:012d}.json").exists() == (whose == B)
    assert len(list(directory.glob(f"step-{step:012d}-*"))) == (whose == B)


def test_what_a_version_without_runs_has_left_is_named_and_stays(tmp_path: Path) -> None:
    old = tmp_path / "step-000000000020.json"
    data = tmp_path / f"step-000000000020-{'a' * 16}.pt"
    data.write_bytes(b"x")
    body = {"schema": 1, "step": 20, "generation": 1, "world_size": 1, "file": data.name, "size": 1}
    old.write_bytes(seal_fields({**body, "sha256": "a" * 64}))
    b = Job(tmp_path, B)
    found, (bad,) = b.files.find()
    assert found is None
    assert "manifest has schema 1" in str(bad)
    b.load()
    for step in (10, 30, 40):
        b.save(step)
    assert old.exists()
    assert data.exists()


# ---------------------------------------------------------------- one run, as ever


def test_the_next_generation_goes_on_also_where_the_last_one_holds_the_lock(tmp_path: Path) -> None:
    frozen = started(tmp_path)
    before = (tmp_path / "owner.json").read_bytes()
    again = Job(tmp_path, A, generation=2)
    assert again.load() == 30
    again.save(40)
    assert (tmp_path / "owner.json").read_bytes() == before, "a restart writes nothing there"
    frozen.files.claim._lock.forget()
    with pytest.raises(OtherRun):
        Job(tmp_path, B).load()


def test_a_job_that_is_started_again_goes_on_and_so_does_the_next(tmp_path: Path) -> None:
    started(tmp_path)
    for number in range(3):
        job = Job(tmp_path, Run(f"again-{number}"))
        assert job.load() == 30 + number
        job.save(31 + number)
        del job


def lose_data(directory: Path, step: int) -> None:
    (attempt,) = directory.glob(f"step-{step:012d}-*")
    shutil.rmtree(attempt)


def test_going_back_deletes_what_was_given_up_of_ones_own_and_of_those_before(tmp_path: Path) -> None:
    started(tmp_path)
    job = Job(tmp_path, B)
    job.load()
    lose_data(tmp_path, 30)
    again = Job(tmp_path, B, generation=2)
    assert again.load() == 20
    again.save(25)
    assert steps(tmp_path) == {20: A.id, 25: B.id}


def test_a_newer_step_that_does_not_verify_stops_nobody(tmp_path: Path) -> None:
    started(tmp_path)
    lose_data(tmp_path, 30)
    job = Job(tmp_path, B)
    assert job.load() == 20
    job.save(25)
    assert steps(tmp_path) == {20: A.id, 25: B.id}


def test_two_processes_of_one_run_may_make_the_directory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As groups of ranks that save apart. The other one has the lock for itself until its name is in it."""
    directory, share = tmp_path / "new", ownership.Lock._share

    def make(path: str) -> None:
        if not directory.exists():
            durable.make_directory(path)
            fcntl.flock(other := open(directory / "owner.lock", "w"), fcntl.LOCK_EX)  # noqa: SIM115
            others.append(other)

    def look(lock: ownership.Lock, file: Any) -> bool:
        found = share(lock, file)
        for other in others:
            print(A, end="", file=other, flush=True)
            fcntl.flock(other, fcntl.LOCK_SH)
        others.clear()
        return found

    others: list[Any] = []
    monkeypatch.setattr(ownership, "make_directory", make)
    monkeypatch.setattr(ownership.Lock, "_share", look)
    Job(directory, A).save(10)
    assert steps(directory) == {10: A.id}


def test_a_save_without_a_load_makes_the_directory_ones_own(tmp_path: Path) -> None:
    job = Job(tmp_path, A)
    job.save(10)
    assert owner_of(tmp_path) == Ownership(A)


def test_without_an_owner_ones_own_is_not_set_above_what_another_has_saved_since(tmp_path: Path) -> None:
    started(tmp_path)
    b = Job(tmp_path, B)
    b.load()
    b.save(35)
    del b
    (tmp_path / "owner.json").write_bytes(b"half")
    with pytest.raises(OtherRun, match="holds step 35 of run run-b"):
        Job(tmp_path, A, generation=3).load()
    assert steps(tmp_path) == {30: A.id, 35: B.id}
    assert Job(tmp_path, C).load() == 35


# ---------------------------------------------------------------- the lock


def test_while_a_run_lives_another_is_refused_after_a_while_and_told_whom_it_met(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = started(tmp_path)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OtherRun, match=r"run run-a \(job a\) is alive.*this is run run-b \(job b\)"):
        Job(tmp_path, B).files.claim.await_former_run(wait_s=60.0, clock=lambda: now, sleep=sleep)
    assert now >= 60.0
    monkeypatch.setenv("ELASTIC_AGENT_PROCESS_GROUP_TIMEOUT_S", "20.0")
    now = 0.0
    with pytest.raises(OtherRun):
        Job(tmp_path, C).files.claim.await_former_run(clock=lambda: now, sleep=sleep)
    assert 10.0 < now < 20.0, "the other ranks' collective still waits"
    caplog.records.pop()
    assert len([one for one in caplog.records if "waiting for its end" in one.message]) == 1
    assert sorted(os.listdir(tmp_path)) == before
    a.save(40)


def test_who_waits_goes_on_when_the_other_ends(tmp_path: Path) -> None:
    a = started(tmp_path)

    def sleep(_: float) -> None:
        a.save(40)
        a.files.claim._lock.forget()

    b = Job(tmp_path, B)
    b.files.claim.await_former_run(sleep=sleep)
    assert b.load() == 40


def test_no_other_run_comes_in_between_two_generations(tmp_path: Path) -> None:
    agent = LockKeeper()
    a = Job(tmp_path, A, agent=agent)
    a.load()
    a.save(10)
    a.files.claim._lock.forget()
    with pytest.raises(OtherRun, match="is in use"):
        Job(tmp_path, B).load()
    again = Job(tmp_path, A, generation=2, agent=agent)
    assert again.load() == 10
    again.save(20)
    again.files.claim._lock.forget()
    with pytest.raises(OtherRun, match="is in use"):
        Job(tmp_path, B).load()
    agent.end()
    assert Job(tmp_path, B).load() == 20


def test_an_agent_that_did_not_get_the_lock_gets_it_at_the_next_save(tmp_path: Path) -> None:
    agent = LockKeeper()
    agent.deaf = True
    a = Job(tmp_path, A, agent=agent)
    a.load()
    agent.deaf = False
    a.save(10)
    a.save(20)
    assert len(agent.kept) == 1, "once it has it, it is not lent again"
    a.files.claim._lock.forget()
    with pytest.raises(OtherRun, match="is in use"):
        Job(tmp_path, B).load()
    agent.end()


def test_a_run_that_lost_the_node_of_rank_0_still_has_the_directory(tmp_path: Path) -> None:
    first_agent, other_agent = LockKeeper(), LockKeeper()
    a = Job(tmp_path, A, agent=first_agent)
    a.load()
    a.save(10)
    elsewhere = Job(tmp_path, A, agent=other_agent)
    elsewhere.files.claim.share_lock()
    first_agent.end()
    for job in (a, elsewhere):
        job.files.claim._lock.forget()
    with pytest.raises(OtherRun, match="is in use"):
        Job(tmp_path, B).load()
    assert Job(tmp_path, A, generation=2, agent=other_agent).load() == 10
    other_agent.end()


def test_an_agent_that_goes_on_in_another_run_lets_go_of_the_locks_of_the_past_one(tmp_path: Path) -> None:
    agent = LockKeeper()
    a = Job(tmp_path, A, agent=agent)
    a.load()
    a.save(10)
    a.files.claim._lock.forget()
    again = Job(tmp_path, B, agent=agent)
    again.files.claim.release_former_locks()
    assert again.load() == 10


def test_a_node_without_rank_0_locks_nothing_that_its_run_has_not(tmp_path: Path) -> None:
    Job(tmp_path, A).files.claim.share_lock()
    assert os.listdir(tmp_path) == []
    started(tmp_path).files.claim._lock.forget()
    Job(tmp_path, B).files.claim.share_lock()
    assert Job(tmp_path, C).load() == 30


def test_an_owner_that_lost_its_file_is_told_from_others_by_the_lock(tmp_path: Path) -> None:
    agent = LockKeeper()
    a = Job(tmp_path, A, agent=agent)
    a.load()
    a.save(10)
    a.files.claim._lock.forget()
    (tmp_path / "owner.json").unlink()
    assert Job(tmp_path, A, generation=2).load() == 10
    agent.end()


def test_a_save_without_a_load_waits_too(tmp_path: Path) -> None:
    a = started(tmp_path)
    b = Job(tmp_path, B)
    b.step = 31
    end = threading.Timer(0.05, a.files.claim._lock.forget)
    end.start()
    b.save(32)
    end.join()
    assert owner_of(tmp_path).run == B


def test_a_load_that_failed_lets_go_of_the_directory(tmp_path: Path) -> None:
    started(tmp_path)
    b = CheckpointFiles(tmp_path, keep=1, run=B)
    b.claim.await_former_run(wait_s=0)
    with pytest.raises(OtherRun):
        Job(tmp_path, C).load()
    b.claim.release_lock()
    assert Job(tmp_path, C).load() == 30


# ---------------------------------------------------------------- saves that end badly


def away() -> None:
    raise Unconfirmed("the store is away")


def test_saves_that_nobody_confirms_write_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, A)
    job.load()
    job.save(1)
    job.save(2)
    before = sorted(os.listdir(tmp_path))
    for step in range(3, 23):
        with pytest.raises(Unconfirmed):
            job.save(step, away)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("refusal", [Unconfirmed, Fenced, OSError, KeyboardInterrupt])
def test_a_publish_that_fails_leaves_the_data_of_one_save_at_most(
    tmp_path: Path, refusal: type[BaseException]
) -> None:
    job = Job(tmp_path, A)
    job.load()
    job.save(1)
    before = set(os.listdir(tmp_path))
    for step in range(2, 22):

        def may_change(step: int = step) -> None:
            if list(tmp_path.glob(f"step-{step:012d}-*/.metadata")):  # all but the manifest is there
                raise refusal("no")

        with pytest.raises(refusal):
            job.save(step, may_change)
        left = set(os.listdir(tmp_path)) - before
        assert len(left) <= (refusal is not Fenced), "another try may publish it"
    job.save(22)
    assert not left.intersection(os.listdir(tmp_path))


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    job = Job(tmp_path, A)
    job.load()
    for step in range(1, 21):
        write_whole(job.files, step)  # killed before it could publish, or clear up
    job.save(21)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
