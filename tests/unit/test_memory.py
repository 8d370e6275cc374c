"""States in this node's memory, in one process: what is put in comes out again, bit by bit, and nobody keeps it."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.worker import Checkpointer, NotPlainData
from elastic_agent.worker.checkpointing.replicated.contents import Boundary
from elastic_agent.worker.steps import progress
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.memory import available_memory, slots
from elastic_agent.worker.storage.memory.available_memory import Memory
from elastic_agent.worker.storage.memory.slot_memory import RankPlace, SlotMemory
from elastic_agent.worker.storage.memory.slots import NoRoom, Slots
from elastic_agent.worker.wire.environment import Run
from tests.shards import data_of

pytestmark = pytest.mark.usefixtures("only_worker")


@pytest.fixture
def opened(only_worker: Path, tmp_path: Path) -> Slots:
    return Slots(str(only_worker), str(tmp_path / "disk"))


class Training:
    """A model with tied weights, an optimizer with state, and plain data."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Dropout())
        self.model[1].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.meta: dict[str, Any] = {"step": 0, "table": torch.zeros(1000)}
        self.meta["part of it"] = self.meta["table"][10:20]
        state = {"model": self.model, "optimizer": self.optimizer, "meta": self.meta}
        self.checkpoints = Checkpointer(directory, state, **options)

    def train(self, until: int) -> None:
        for step in range(self.meta["step"] + 1, until + 1):
            self.optimizer.zero_grad()
            self.model(torch.rand(4, 64) + random.random()).square().sum().backward()
            self.optimizer.step()
            self.meta["table"][step] = step
            self.meta["step"] = step
            progress.step(step)

    def bits(self) -> bytes:
        buffer = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.meta], buffer)
        return buffer.getvalue()


def test_what_was_remembered_comes_back_bit_by_bit(tmp_path: Path) -> None:
    first = Training(tmp_path / "disk")
    first.train(5)
    assert first.checkpoints.save_to_memory(5)
    at_five = first.bits()
    drawn = random.random(), torch.rand(1)
    first.train(7)

    second = Training(tmp_path / "disk")
    assert second.checkpoints.load() == 5
    assert second.bits() == at_five
    assert (random.random(), torch.rand(1)) == drawn
    second.train(7)
    assert not list((tmp_path).glob("disk/step-*")), "nothing of this was on disk"


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    random.seed(1)
    undisturbed = Training(tmp_path / "disk", memory_every=2)
    undisturbed.train(6)
    state = random.getstate(), torch.get_rng_state()
    undisturbed.train(7)
    resumed = Training(tmp_path / "disk")
    assert resumed.checkpoints.load() == 6
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    resumed.train(7)
    assert resumed.bits() == undisturbed.bits()


def test_nothing_that_was_loaded_lives_in_the_slot(tmp_path: Path) -> None:
    """The optimizer keeps tensors it is given on the CPU, and plain data is kept whole."""
    first = Training(tmp_path / "disk")
    first.train(3)
    first.checkpoints.save_to_memory(3)
    second = Training(tmp_path / "disk")
    second.checkpoints.load()
    loaded = second.bits()
    first.train(20)
    for step in (20, 21, 22):
        first.checkpoints.save_to_memory(step)
    assert second.bits() == loaded


@pytest.mark.parametrize(
    ("rank", "local_rank", "copies", "saves_just_in_time"),
    [(0, 0, True, True), (1, 1, True, False), (1, 0, False, False)],
)
def test_only_the_node_of_rank_0_copies_what_is_rank_0s_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    local_rank: int,
    copies: bool,
    saves_just_in_time: bool,
) -> None:
    """A copy of another node, or that another rank makes in place of one that failed, would be another state."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("ELASTIC_AGENT_LOCAL_RANK", str(local_rank))
    checkpoints = Checkpointer(tmp_path / "disk", {"own": {"of": rank}}, from_rank_0=["own"])
    checkpoints.load()
    assert checkpoints.save_to_memory(1) is copies
    boundary = Boundary({"own": {"of": rank}}, {})
    assert checkpoints._state.save_just_in_time(2, boundary) is saves_just_in_time


def test_shared_memory_stays_shared(tmp_path: Path) -> None:
    first = Training(tmp_path / "disk")
    first.checkpoints.save_to_memory(1)
    second = Training(tmp_path / "disk")
    second.checkpoints.load()
    second.meta["table"][15] = 7.0
    assert second.meta["part of it"][5] == 7.0


def test_a_slot_holds_the_bytes_that_are_on_disk(tmp_path: Path, opened: Slots) -> None:
    training = Training(tmp_path / "disk")
    training.train(2)
    training.checkpoints.save(2)
    (name,) = opened.headers()
    with opened.hold(name) as held:
        kept = held.stream.read()
    assert newest_data(tmp_path / "disk").read_bytes().startswith(kept)


def newest_data(directory: Path) -> Path:
    manifest = CheckpointFiles(directory, keep=1, run=Run("reader")).newest_manifest()
    assert manifest is not None
    return data_of(directory, manifest)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"empty": torch.zeros(0)},
        {
            "scalar": torch.tensor(3),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "bool": torch.tensor([True]),
        },
        {"complex": torch.ones(2, dtype=torch.complex64), "row": torch.arange(12).reshape(3, 4).t()},
        {"sparse": torch.eye(3).to_sparse()},
        {"all": [(torch.ones(1), {"deep": torch.ones(2)}, None)], "big": 2**80, "text": "é" * 1000},
    ],
    ids=lambda state: ",".join(state) or "nothing",
)
def test_any_state_that_torch_can_load_can_be_kept(tmp_path: Path, state: dict[str, Any]) -> None:
    Checkpointer(tmp_path / "disk", {"state": state}).save_to_memory(1)
    loaded: dict[str, Any] = {}
    assert Checkpointer(tmp_path / "disk", {"state": loaded}).load() == 1
    assert str(loaded) == str(state)


def test_a_state_that_is_code_is_refused_whenever_it_comes(tmp_path: Path, opened: Slots) -> None:
    meta: dict[str, Any] = {"where": "x"}
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": meta})
    checkpoints.save_to_memory(1)
    checkpoints.save_to_memory(2)
    meta["where"] = Path("x")
    with pytest.raises(NotPlainData, match="pathlib"):
        checkpoints.save_to_memory(3)
    assert sorted(header.step for header in opened.headers().values()) == [1, 2], "before a slot was taken"
    meta["where"] = "y"
    assert checkpoints.save_to_memory(4)


def test_every_nth_step_is_remembered(tmp_path: Path, opened: Slots) -> None:
    Training(tmp_path / "disk", memory_every=3).train(7)
    assert sorted(header.step for header in opened.headers().values()) == [3, 6]


def test_a_save_is_remembered_too_and_needs_no_records(tmp_path: Path, opened: Slots) -> None:
    training = Training(tmp_path / "disk")
    training.train(1)
    training.checkpoints.save(1)
    (header,) = opened.headers().values()
    assert (header.step, header.rng_holes) == (1, ())
    drawn = torch.rand(1)
    torch.manual_seed(9)
    shutil.rmtree(tmp_path / "disk")
    assert Training(tmp_path / "disk").checkpoints.load() == 1
    assert torch.rand(1) == drawn


def test_a_state_too_large_for_the_limit_goes_to_disk_only_and_that_is_said_once(
    tmp_path: Path, opened: Slots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_MEMORY_BYTES", str(1 << 20))
    meta = {"table": torch.zeros(1 << 20)}
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": meta})
    assert [checkpoints.save_to_memory(step) for step in (1, 2)] == [False, False]
    assert checkpoints.save(3)
    assert caplog.text.count("no copy in memory") == 1
    assert "--memory-checkpoints" in caplog.text
    assert opened.headers() == {}
    meta["table"] = torch.zeros(10)
    assert checkpoints.save_to_memory(4)
    assert "copies in memory again" in caplog.text


def test_full_memory_goes_to_disk_only_until_there_is_room(
    tmp_path: Path, opened: Slots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(slots.os, "posix_fallocate", full)
        assert not checkpoints.save_to_memory(1)
    assert "No space left" in caplog.text
    assert checkpoints.save_to_memory(2)


def test_a_machine_short_of_memory_gives_back_the_older_copy_and_keeps_the_newest(
    tmp_path: Path, opened: Slots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {"table": torch.zeros(100_000)}})
    for step in (1, 2):
        checkpoints.save_to_memory(step)
    before = opened.taken()
    with monkeypatch.context() as patch:
        patch.setattr(available_memory, "read_memory", lambda: (Memory(1 << 20, 1 << 30),))
        assert not checkpoints.save_to_memory(3)
        assert "this machine has 1 MiB left of 1024" in caplog.text
        assert [header.step for header in opened.headers().values()] == [2]
        assert 0 < opened.taken() <= before // 2
        assert checkpoints.save(4), "on disk"
    assert checkpoints.save_to_memory(5)
    assert "copies in memory again: step=5" in caplog.text


def test_a_slot_does_not_take_the_last_memory(
    tmp_path: Path, opened: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available_memory, "read_memory", lambda: (Memory(100 << 20, 1 << 30),))
    large = Checkpointer(tmp_path / "disk", {"meta": {"table": torch.zeros(10 << 20)}})
    assert not large.save_to_memory(1), "80 MiB more would leave less than 5 %"
    assert opened.taken() == 0
    assert Checkpointer(tmp_path / "disk", {"meta": {"table": torch.zeros(1 << 20)}}).save_to_memory(1)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("levels", "fits"),
    [
        ((), True),
        ((Memory(30 * GIB, 64 * GIB),), True),
        ((Memory(90 * GIB, 2048 * GIB), Memory(30 * GIB, 64 * GIB, of="the cgroup")), True),
        ((Memory(90 * GIB, 2048 * GIB), Memory(12 * GIB, 64 * GIB, of="the cgroup")), False),
        ((Memory(20 * GIB, 2048 * GIB), Memory(30 * GIB, 64 * GIB, of="the cgroup")), False),
    ],
)
def test_the_level_with_the_least_memory_decides_whether_a_slot_grows(
    opened: Slots, monkeypatch: pytest.MonkeyPatch, levels: tuple[Memory, ...], fits: bool
) -> None:
    """A large machine in whose cgroup a job may have a part only: 5 % of all of it is more than the job needs."""
    monkeypatch.setattr(available_memory, "read_memory", lambda: levels)
    monkeypatch.setattr(available_memory, "file_system", lambda _: Memory(1000 * GIB, 1000 * GIB))
    monkeypatch.setattr(opened, "begin", lambda size, protected: size)
    of = SlotMemory(opened, 1000 * GIB, RankPlace("a", 1, 0, 0, 1))
    if fits:
        of._begin(5 * GIB)  # and room for the other slot
    else:
        with pytest.raises(NoRoom, match="are to be left"):
            of._begin(5 * GIB)


def test_without_an_agent_there_is_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_AGENT_MEMORY")
    checkpoints = Checkpointer(tmp_path / "disk", {}, memory_every=1)
    assert not checkpoints.save_to_memory(1)
    progress.step(1)
    assert checkpoints.load() == 0


def test_a_torch_that_tells_too_little_means_disk_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.serialization, "skip_data", contextlib.nullcontext)
    assert not Checkpointer(tmp_path / "disk", {"meta": {"x": torch.ones(3)}}).save_to_memory(1)
    assert "left out" in caplog.text


def flip_a_bit_of_the_newest(opened: Slots) -> None:
    name = opened.newest_first()[0]
    header = opened.headers()[name]
    with opened.hold(name) as held:
        sums = slots.sums_of(held.stream, header.size)
        opened.put_header(name, replace(header, sums=sums))
    path = Path(opened.folder) / f"{name}.pt"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut_the_newest(opened: Slots) -> None:
    os.truncate(Path(opened.folder) / f"{opened.newest_first()[0]}.pt", 100)


def remove_the_newest(opened: Slots) -> None:
    os.unlink(Path(opened.folder) / f"{opened.newest_first()[0]}.pt")


@pytest.mark.parametrize("spoil", [flip_a_bit_of_the_newest, cut_the_newest, remove_the_newest])
def test_a_spoilt_copy_gives_way_to_the_one_before_loudly(
    tmp_path: Path, opened: Slots, spoil: Callable[[Slots], None], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    for step in (1, 2):
        checkpoints.save_to_memory(step)
    spoil(opened)
    again = Checkpointer(tmp_path / "disk", {"meta": {}})
    assert again.load() == 1
    assert "a copy in memory is left aside: step=2" in caplog.text
    assert again.save_to_memory(2)


def test_spoilt_copies_only_give_way_to_the_disk(tmp_path: Path, opened: Slots) -> None:
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    checkpoints.save(10)
    for step in (11, 12):
        checkpoints.save_to_memory(step)
    cut_the_newest(opened)
    opened.drop(lambda version: version == (1, 12))
    cut_the_newest(opened)
    assert Checkpointer(tmp_path / "disk", {"meta": {}}).load() == 10


def test_a_disk_that_only_claims_to_be_newer_does_not_win(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    checkpoints.save(10)
    checkpoints.save_to_memory(11)
    checkpoints.save(12)
    checkpoints.save_to_memory(13)
    checkpoints.save_to_memory(14)  # the copies of the saves are gone
    checkpoints.save(20)
    checkpoints.save_to_memory(21)
    checkpoints.save_to_memory(22)
    assert checkpoints._state._memory is not None
    checkpoints._state._memory.abandon_newer((1, 20))
    os.truncate(newest_data(tmp_path / "disk"), 5)
    checkpoints.save_to_memory(13)
    assert Checkpointer(tmp_path / "disk", {"meta": {}}).load() == 13


def test_the_disk_is_not_read_when_the_memory_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpointer(tmp_path / "disk", {"meta": {}})
    checkpoints.save(10)
    checkpoints.save_to_memory(11)
    again = Checkpointer(tmp_path / "disk", {"meta": {}})
    monkeypatch.setattr(again._files, "find", lambda _: pytest.fail("reads the disk"))
    assert again.load() == 11


def test_all_that_were_loaded_are_kept_for_a_drain_and_an_archive_is_not(tmp_path: Path) -> None:
    model, ema, best = (Checkpointer(tmp_path / name, {"meta": {}}) for name in ("model", "ema", "best"))
    assert not progress.checkpointers.all()
    model.load()
    ema.load()
    best.save(5)
    for saver in progress.checkpointers.all():
        saver.save_last_step(7, leaves=False)
    assert [Checkpointer(tmp_path / name, {"meta": {}}).load() for name in ("model", "ema", "best")] == [
        7,
        7,
        5,
    ]


def test_a_last_save_that_the_disk_refuses_keeps_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ELASTIC_AGENT_MEMORY")
    directory = tmp_path / "disk"
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.load()
    shutil.rmtree(directory)
    directory.write_text("no directory")
    (saver,) = progress.checkpointers.all()
    assert not saver.save_last_step(8, leaves=False)
    assert f"step 8 is NOT on disk in {directory}" in caplog.text


def test_two_that_go_on_from_different_steps_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, step in (("one", 30), ("other", 32)):
        Checkpointer(tmp_path / name, {"meta": {}}).save(step)
    one, other = (Checkpointer(tmp_path / name, {"meta": {}}) for name in ("one", "other"))
    one.load()
    assert not caplog.records
    other.load()
    assert f"step=32 directory={tmp_path / 'other'} other_step=30" in caplog.text


def test_two_checkpointers_do_not_disturb_each_other(tmp_path: Path) -> None:
    one, other = (Checkpointer(tmp_path / name, {"meta": {"is": name}}) for name in ("one", "other"))
    one.save_to_memory(1)
    other.save_to_memory(2)
    for name, step in (("one", 1), ("other", 2)):
        meta: dict[str, Any] = {}
        assert Checkpointer(tmp_path / name, {"meta": meta}).load() == step
        assert meta == {"is": name}
