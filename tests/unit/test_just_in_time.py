"""The guard in the worker, with an agent of the test's own: what it keeps, and what it refuses to."""

from __future__ import annotations

import contextlib
import copy
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from elastic_agent.worker import Checkpointer, ElasticSampler, step
from elastic_agent.worker.checkpointing.replicated.just_in_time import JustInTime, of_a_collective
from elastic_agent.worker.state import rng
from elastic_agent.worker.steps import progress
from elastic_agent.worker.steps.drain import Checkpointers
from elastic_agent.worker.storage.memory.rank_state import Buffers, RankStateFile, find
from elastic_agent.worker.storage.memory.slot_memory import RankPlace
from elastic_agent.worker.storage.memory.slots import HeldSlot, NoRoom
from elastic_agent.worker.wire.channel import Lines, receive, send
from elastic_agent.worker.wire.messages import (
    FROM_WORKERS,
    Broken,
    CommitGranted,
    CommitQuestion,
    FromGuard,
    Go,
    Guarding,
    Held,
    Hold,
    Keep,
    Kept,
    Question,
    ToGuard,
    encode,
)

numpy = pytest.importorskip("numpy")

PATIENCE_S = 10.0
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42688")


class Agent:
    """What the guard of one worker is connected to; whoever asks may commit."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._guards: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._lines = Lines(FROM_WORKERS)
        self._heard: list[Question | FromGuard] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(PATIENCE_S)
            first = receive(connection, FROM_WORKERS, PATIENCE_S)
            if isinstance(first, CommitQuestion):
                with connection:
                    send(connection, CommitGranted(60.0), PATIENCE_S)
            else:
                assert first == Guarding(1, 0)
                self._guards.put(connection)

    def accept(self) -> None:
        self._connection = self._guards.get(timeout=PATIENCE_S)

    def hears(self) -> Question | FromGuard | None:
        """None when the guard has ended."""
        while not self._heard:
            data = self._connection.recv(4096)
            if not data:
                return None
            self._heard += self._lines.add(data)
        return self._heard.pop(0)

    def says(self, message: ToGuard) -> None:
        self._connection.sendall(encode(message))

    def asks(self, message: ToGuard) -> Question | FromGuard | None:
        self.says(message)
        return self.hears()

    def silent(self, for_s: float = 0.1) -> bool:
        self._connection.settimeout(for_s)
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._connection.settimeout(PATIENCE_S)


class Script:
    """A training script that can be stopped anywhere within a step."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.sampler = ElasticSampler(range(100), batch_size=1)
        self.feed = iter(self.sampler)
        self.meta: dict[str, Any] = {"begun": 0}
        self.parts = {
            "model": self.model, "optimizer": self.optimizer, "sampler": self.sampler, "meta": self.meta
        }  # fmt: skip
        self.checkpoints = Checkpointer(directory, self.parts)
        self.done = 0

    def forward_and_backward(self) -> None:
        next(self.feed)
        self.meta["begun"] += 1
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().mean().backward()

    def step(self) -> None:
        self.done += 1
        step(self.done)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.forward_and_backward()
            self.optimizer.step()
            self.step()

    def state(self) -> dict[str, Any]:
        states = {
            name: dict(part) if isinstance(part, dict) else part.state_dict()
            for name, part in self.parts.items()
        }
        return copy.deepcopy(states)


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.normal(), torch.rand(3).tolist()]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, only_worker: Path, tmp_path: Path) -> Agent:
    monkeypatch.setenv("ELASTIC_AGENT_SOCKET", str(tmp_path / "just-in-time"))
    return Agent(tmp_path / "just-in-time")


@pytest.fixture
def script(tmp_path: Path, agent: Agent) -> Script:
    return Script(tmp_path / "disk")


@contextlib.contextmanager
def elsewhere(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# --- What is kept


def test_what_forward_has_changed_is_put_back_to_the_boundary(
    script: Script, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(3)
        at_the_boundary = script.state()
        expected = rng.capture()
        script.forward_and_backward()  # and here the collective of the gradients does not end
        assert not equal(script.state(), at_the_boundary)
        assert agent.asks(Hold(1.0)) == Held(3)
        assert agent.asks(Keep()) == Kept(3)
        agent.says(Go())

    monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "2")
    resumed = Script(tmp_path / "disk")
    assert resumed.checkpoints.load() == 3
    assert equal(resumed.state(), at_the_boundary)
    drawn = draws()
    rng.restore(expected)
    assert draws() == drawn


def test_who_has_no_rank_state_gets_the_buffers_of_the_boundary_from_whoever_kept_them(
    script: Script, agent: Agent, tmp_path: Path
) -> None:
    """In another world, or on another node."""
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(2)
        at_the_boundary = script.state()
        script.forward_and_backward()
        assert agent.asks(Hold(1.0)) == Held(2)
        assert agent.asks(Keep()) == Kept(2)
        agent.says(Go())
    (rank_state,) = tmp_path.glob("memory/*/rank-state-0")
    rank_state.unlink()
    resumed = Script(tmp_path / "disk")
    assert resumed.checkpoints.load() == 2
    assert equal(resumed.state(), at_the_boundary)


def test_a_step_that_is_being_made_is_ended_first(script: Script, agent: Agent) -> None:
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
        script.forward_and_backward()
        script.optimizer.step()
        agent.says(Hold(PATIENCE_S))
        assert agent.silent(), "between the optimizer and step() nothing is whole"
        script.step()
        assert agent.hears() == Held(2)
        agent.says(Go())


def test_no_update_begins_while_it_is_held(script: Script, agent: Agent) -> None:
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
        assert agent.asks(Hold(1.0)) == Held(1)
        before = script.state()["model"]

        with elsewhere(lambda: script.train(1)) as thread:
            thread.join(0.1)
            assert thread.is_alive()
            assert equal(script.model[0].weight, before["0.weight"])
            assert agent.asks(Keep()) == Kept(1)
            agent.says(Go())
        assert not equal(script.model[0].weight, before["0.weight"])


def test_a_step_that_another_rank_has_finished_is_waited_for(script: Script, agent: Agent) -> None:
    """It was killed right after; this rank has the gradients of that step, and is about to change its weights."""
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
        script.forward_and_backward()
        agent.says(Hold(PATIENCE_S, 2))
        assert agent.silent()
        script.optimizer.step()
        script.step()
        assert agent.hears() == Held(2)
        agent.says(Go())


def test_a_step_that_does_not_come_here_is_waited_for_half_of_the_time(script: Script, agent: Agent) -> None:
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
        assert agent.asks(Hold(0.2, 2)) == Held(1)
        agent.says(Go())


def test_a_step_whose_collective_raises_is_not_waited_for(script: Script, agent: Agent) -> None:
    trained, lost = threading.Event(), threading.Event()

    def run() -> None:
        with contextlib.suppress(RuntimeError), script.checkpoints.just_in_time():
            script.train(1)
            trained.set()
            lost.wait(PATIENCE_S)
            raise GLOO

    with elsewhere(run):
        agent.accept()
        assert trained.wait(PATIENCE_S)
        agent.says(Hold(4 * PATIENCE_S, 2))
        assert agent.silent()
        lost.set()
        assert {agent.hears(), agent.hears()} == {Broken(), Held(1)}
        agent.says(Go())


def test_an_update_that_does_not_end_is_not_waited_for(script: Script, agent: Agent) -> None:
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
        script.forward_and_backward()
        script.optimizer.step()
        assert agent.asks(Hold(0.05)) == Held(None)
        assert agent.asks(Keep()) == Kept(None)
        script.step()
        agent.says(Go())


def test_before_the_first_step_there_is_nothing_to_keep(script: Script, agent: Agent) -> None:
    with script.checkpoints.just_in_time():
        agent.accept()
        script.forward_and_backward()
        assert agent.asks(Hold(1.0)) == Held(None)
        agent.says(Go())


def test_another_optimizer_counts_too(script: Script, agent: Agent) -> None:
    """One that is not in the state may still change what is."""
    other = torch.optim.SGD(script.model.parameters(), lr=0.1)
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
        script.forward_and_backward()
        other.step()
        assert agent.asks(Hold(0.05)) == Held(None)
        agent.says(Go())


def test_a_buffer_that_a_module_has_exchanged_is_put_back_too(
    script: Script, agent: Agent, tmp_path: Path
) -> None:
    norm = script.model[1]
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
        norm.running_mean = torch.full((4,), 7.0)
        script.train(1)
        kept = norm.running_mean.clone()
        norm.running_mean.fill_(9.0)
        assert agent.asks(Hold(1.0)) == Held(2)
        assert agent.asks(Keep()) == Kept(2)
        agent.says(Go())
    resumed = Script(tmp_path / "disk")
    resumed.checkpoints.load()
    assert torch.equal(resumed.model[1].running_mean, kept)


def test_buffers_of_another_size_end_it(
    script: Script, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
        script.model[1].running_mean = torch.zeros(5)
        script.done += 1
        step(script.done)
        assert agent.asks(Hold(1.0)) == Held(None)
        agent.says(Go())
    assert "changed their size" in caplog.text


# --- Ways in and out


def test_an_error_of_a_collective_waits_until_the_state_is_kept(script: Script, agent: Agent) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with script.checkpoints.just_in_time():
                script.train(2)
                script.forward_and_backward()
                raise GLOO
        except RuntimeError as error:
            raised.append(error)

    with elsewhere(run) as thread:
        agent.accept()
        assert agent.hears() == Broken()
        assert agent.asks(Hold(1.0)) == Held(2)
        assert agent.asks(Keep()) == Kept(2)
        assert thread.is_alive()
        agent.says(Go())
        assert agent.hears() is None
    assert raised == [GLOO]


def test_an_error_in_the_middle_of_an_update_keeps_nothing(script: Script, agent: Agent) -> None:
    def run() -> None:
        with contextlib.suppress(RuntimeError), script.checkpoints.just_in_time():
            script.train(2)
            script.forward_and_backward()
            script.optimizer.step()
            raise GLOO

    with elsewhere(run):
        agent.accept()
        assert agent.hears() == Broken()
        assert agent.asks(Hold(PATIENCE_S)) == Held(None)
        agent.says(Go())


@pytest.mark.parametrize("error", [ValueError("my own"), RuntimeError("shapes differ"), SystemExit(83)])
def test_the_scripts_own_end_is_no_reason_to_wait(script: Script, agent: Agent, error: BaseException) -> None:
    def run() -> None:
        with script.checkpoints.just_in_time():
            agent.accept()
            script.train(1)
            raise error

    with pytest.raises(type(error)):
        run()
    assert agent.hears() is None
    assert len(progress._listeners) == 1, "the sampler's own"


def test_no_thread_outlives_the_guard(script: Script, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds tensors, and what lets go of the last one while Python ends is ended by torch, with the process."""
    release = JustInTime._release

    def slow(self: JustInTime) -> None:
        time.sleep(0.2)
        release(self)

    monkeypatch.setattr(JustInTime, "_release", slow)
    with script.checkpoints.just_in_time():
        agent.accept()
        script.train(1)
    assert "just-in-time" not in {thread.name for thread in threading.enumerate()}


def test_an_agent_that_has_ended_is_not_waited_for(script: Script, agent: Agent) -> None:
    def run() -> None:
        with script.checkpoints.just_in_time():
            agent.accept()
            agent._connection.close()
            raise GLOO

    with pytest.raises(RuntimeError, match="gloo"):
        run()


def test_without_an_agent_nothing_happens(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ELASTIC_AGENT_SOCKET")
    with script.checkpoints.just_in_time():
        script.train(1)
    assert not caplog.records


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GLOO, True),
        (dist.DistBackendError("NCCL error in: ..."), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_whose_error_it_is(error: BaseException, expected: bool) -> None:
    assert of_a_collective(error) is expected
    wrapped = TypeError("in a trainer")
    wrapped.__cause__ = error
    assert of_a_collective(wrapped) is expected


# --- Several that belong together


class Pair:
    """A model and its moving average, each with a Checkpointer, and an agent that asks for the last step."""

    NAMES = ("model", "ema")

    def __init__(self, folder: Path, agent: Agent) -> None:
        self.folder = folder
        self.agent = agent
        self.both = self.load()

    def load(self) -> list[Checkpointer]:
        both = [Checkpointer(self.folder / name, {"meta": {"of": name}}) for name in self.NAMES]
        self.loaded = [one.load() for one in both]
        return both

    def refuse(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is no room for another copy of this one."""

        def begin(_size: int, **_: bool) -> None:
            raise NoRoom("planted")

        monkeypatch.setattr(self.both[number]._state._memory, "_begin", begin)

    def train_to_the_failure(self, at: int, told: Callable[[int], None]) -> Question | FromGuard | None:
        """What the guard has kept after `at` steps. `told` is called after each of them."""
        with self.both[0].just_in_time():
            self.agent.accept()
            for done in range(1, at + 1):
                step(done)
                told(done)
            assert self.agent.asks(Hold(1.0)) == Held(at)
            kept = self.agent.asks(Keep())
            self.agent.says(Go())
        return kept

    def resume(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "2")
        monkeypatch.setattr("elastic_agent.worker.steps.progress.checkpointers", Checkpointers())
        self.load()
        return self.loaded


@pytest.fixture
def pair(tmp_path: Path, agent: Agent) -> Pair:
    return Pair(tmp_path / "disk", agent)


def test_several_are_kept_at_the_same_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.train_to_the_failure(3, lambda _: None) == Kept(3)
    assert pair.resume(monkeypatch) == [3, 3]


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("remembers_every", [1, 2, None])
@pytest.mark.parametrize("disk", ["quick", "slow"])
def test_several_of_which_one_finds_no_room_go_on_from_one_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, full: int, remembers_every: int | None, disk: str
) -> None:
    """Whatever was in memory before. While a slow disk writes one copy, the next ones replace the other."""
    held: list[HeldSlot] = []

    def told(done: int) -> None:
        for one in pair.both:
            if done == 2:
                one.save(done)
            elif remembers_every and done % remembers_every == 0:
                one.save_to_memory(done)
            if done == 2 and disk == "slow":
                assert one._state._memory is not None
                held.append(one._state._memory.lend((1, done))[1])
        if done == 5:
            pair.refuse(full, monkeypatch)

    kept = pair.train_to_the_failure(5, told)
    for one in held:
        one.stream.close()
    loaded = pair.resume(monkeypatch)
    assert len(set(loaded)) == 1
    assert loaded[0] >= 2
    if remembers_every == 1:
        assert (kept, loaded) == (Kept(5), [5, 5]), "it was there already"


@pytest.mark.parametrize("full", [0, 1])
def test_several_of_which_one_never_found_room_go_on_from_disk(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    pair.refuse(full, monkeypatch)

    def told(done: int) -> None:
        for one in pair.both:
            if done == 2:
                one.save(done)
            one.save_to_memory(done)

    assert pair.train_to_the_failure(5, told) == Kept(None)
    assert pair.resume(monkeypatch) == [2, 2]


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch, only_worker: Path) -> Iterator[dict[str, Any]]:
    """A part of which each rank has its shard, in a world of one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {"shards": distribute_tensor(torch.zeros(4), DeviceMesh("cpu", [0]), [Shard(0)])}
    dist.destroy_process_group()


@pytest.mark.parametrize("remembers_every", [1, 2, None])
def test_a_step_that_a_sharded_state_belongs_to_is_given_up_and_that_is_said(
    tmp_path: Path,
    agent: Agent,
    sharded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    remembers_every: int | None,
) -> None:
    """The rank that has died may have left with its shards of that step."""

    def load() -> tuple[Checkpointer, Checkpointer]:
        return (
            Checkpointer(tmp_path / "same", {"meta": {}}),
            Checkpointer(tmp_path / "sharded", {"part": sharded}),
        )

    both = load()
    assert [one.load() for one in both] == [0, 0]
    with both[0].just_in_time():
        agent.accept()
        for done in range(1, 6):
            step(done)
            if done == 1:
                assert "just_in_time() keeps no step" in caplog.text
            for one in both:
                if done == 2:
                    assert one.save(done)
                    assert one.wait()
                elif remembers_every and done % remembers_every == 0:
                    assert one.save_to_memory(done)
        assert agent.asks(Hold(1.0)) == Held(5)
        assert agent.asks(Keep()) == Kept(None)
        agent.says(Go())
    assert f"step 5 is not kept: the state in {tmp_path / 'sharded'} is sharded" in caplog.text
    monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "2")
    monkeypatch.setattr(progress, "checkpointers", Checkpointers())
    assert [one.load() for one in load()] == [{1: 4, 2: 4, None: 2}[remembers_every]] * 2


@pytest.mark.parametrize("first", ["same", "sharded"])
def test_a_sharded_state_and_another_one_that_go_on_from_two_steps_are_named(
    tmp_path: Path, sharded: dict[str, Any], caplog: pytest.LogCaptureFixture, first: str
) -> None:
    both = {
        name: Checkpointer(tmp_path / name, {"part": part})
        for name, part in (("same", {}), ("sharded", sharded))
    }
    both["same"].save_to_memory(30)
    both["sharded"].save(32)
    loaded = {name: both[name].load() for name in sorted(both, reverse=first == "sharded")}
    assert loaded == {"same": 30, "sharded": 32}
    assert "training goes on from two steps" in caplog.text


# --- The file of one rank


def place(generation: int, world_size: int = 2) -> RankPlace:
    return RankPlace("a", generation, 1, 1, world_size)


def test_a_rank_state_file_knows_two_boundaries_and_the_step_under_way(tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(2)
    buffers = Buffers([module])
    assert buffers.size == 2 * 4 + 2 * 4 + 8
    rank_state = RankStateFile(str(tmp_path), place(7), buffers.size)

    def at(step: int) -> float | None:
        entry = find(str(tmp_path), 1, 2, 7, step)
        if entry is None:
            return None
        assert entry.random_state == snapshots[step]
        return torch.frombuffer(bytearray(entry.buffers), dtype=torch.float32)[0].item()

    snapshots: dict[int, bytes] = {}
    assert at(1) is None
    for newest in range(1, 5):
        module.running_mean.fill_(newest - 0.5)  # type: ignore[union-attr, operator]
        torch.manual_seed(100 + newest)
        snapshots[newest] = rng.capture()
        rank_state.under_way(buffers)
        assert at(newest) == newest - 0.5, "killed now, the others may still finish this step"
        module.running_mean.fill_(newest)  # type: ignore[union-attr, operator]
        torch.manual_seed(newest)
        snapshots[newest] = rng.capture()
        rank_state.finished(newest, buffers)
        assert at(newest) == newest
        assert at(newest - 1) == (newest - 1 if newest > 1 else None)
        assert at(newest - 2) is None
        assert at(newest + 1) is None, "no other can be there while this one has not begun its backward"
    assert find(str(tmp_path), 1, 2, 8, 4) is None, "another generation"
    assert find(str(tmp_path), 1, 3, 7, 4) is None, "another world"
    assert find(str(tmp_path), 0, 2, 7, 4) is None, "another rank"


def test_a_generation_does_not_believe_what_an_older_one_had_under_way(tmp_path: Path) -> None:
    buffers = Buffers([])
    old = RankStateFile(str(tmp_path), place(7), 0)
    old.finished(3, buffers)
    old.under_way(buffers)
    assert find(str(tmp_path), 1, 2, 7, 4) is not None
    new = RankStateFile(str(tmp_path), place(8), 0)
    assert find(str(tmp_path), 1, 2, 8, 4) is None
    new.under_way(buffers)
    assert find(str(tmp_path), 1, 2, 8, 4) is not None


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 4096, b"x" * 300_000])
def test_what_is_no_rank_state_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank-state-1").write_bytes(content)
    assert find(str(tmp_path), 1, 2, 7, 4) is None
